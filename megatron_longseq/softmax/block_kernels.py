"""Softmax attention on one (query block, key block) pair: one contract, several kernels.

    forward(query, key, value)                          -> out, lse
    backward(out_gradient, query, key, value, out, lse) -> dq, dk, dv

The backward takes the **final** output and log-sum-exp of the query rows, over all key blocks, and
returns exactly this block's term: the gradients of a query block are sums over key blocks.

Shapes: query ``[rows, b, a, d]``, key ``[keys, b, g, d]``, value ``[keys, b, g, dv]`` where g
divides a; out ``[rows, b, a, dv]``; lse ``[b, a, rows]``, the natural log-sum-exp of the scaled
scores. A query row that sees no key has out = 0 and lse = -inf.

What is visible is all, a causal triangle, a band along the diagonal, or any matrix.

    aten        PyTorch's own flash kernels, CPU and CUDA; they return the log-sum-exp
    flash       the flash-attn package, CUDA
    reference   plain torch: any dtype and device; what the others are tested against
"""

from typing import Protocol

import torch
from torch import Tensor

from ..errors import UserError
from ..token_layout import Band
from .aten_kernel import AtenKernel
from .flash_kernel import FlashKernel
from .reference_kernel import ReferenceKernel

SUPPORTED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class BlockKernel(Protocol):
    """Forward and backward of one block; see the module's description for shapes."""

    name: str
    # Whether it skips what a band leaves out; otherwise a band is a matrix to it, so large bands
    # should come in tiles.
    skips_outside_bands: bool

    def unusable(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why this kernel cannot work on such tensors here; ``None`` if it can."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        scale: float,
        visible: Tensor | None = None,
        band: Band | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of a query block to a key block.

        Args:
            causal: query row i sees key rows 0..i; the blocks have equally many rows.
            scale: factor of the scores.
            visible: boolean ``[rows, keys]``, what sees what, instead of ``causal``.
            band: ``(low, high)``, instead of ``causal``: query row i sees key rows i + low to
                i + high, ``None`` being no bound. Every row sees one.

        Returns:
            out, in the dtype of the query or wider, and lse in fp32 (fp64 for fp64).
        """

    def backward(
        self,
        out_gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
        visible: Tensor | None = None,
        band: Band | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This block's terms of the gradients of query, key and value.

        Args:
            out, lse: of the query rows over **all** key blocks; out in the dtype of the query.
        """


def kernels() -> dict[str, BlockKernel]:
    """All kernels by name, the preferred one first."""
    known: tuple[BlockKernel, ...] = (FlashKernel(), AtenKernel(), ReferenceKernel())
    return {kernel.name: kernel for kernel in known}


def choose_kernel(name: str, dtype: torch.dtype, device: torch.device) -> BlockKernel:
    """The kernel called ``name``; for ``"auto"`` the first usable one of flash, aten, reference.

    Raises:
        UserError: there is no such kernel, or it cannot work on such tensors here.
    """
    known = kernels()
    if name == "auto":
        return next(k for k in known.values() if k.unusable(dtype, device) is None)
    if name not in known:
        raise UserError(f"kernel {name!r}: unknown; there are auto, {', '.join(known)}")
    reason = known[name].unusable(dtype, device)
    if reason is not None:
        usable = [k.name for k in known.values() if k.unusable(dtype, device) is None]
        raise UserError(
            f"kernel {name!r} cannot be used: {reason}; for {dtype} on {device.type} there are: "
            f"auto, {', '.join(usable)}"
        )
    return known[name]
