"""One rank's part of linear attention: one contract, several kernels. A kernel sees no group.

    forward     summary     (A, X) of each segment, from keys, values and gates    -> the scan
                intra       what a segment's tokens read of their own segment
                apply       what they read of the state that came in, once it is there
    backward    d_summary   (A^T, Y) of each segment, from queries, gates and dO    -> the scan
                d_intra     all gradients but the share of what follows the segment
                d_apply     that share, once the gradient of the outgoing state is there

``A`` and ``X`` make a segment the map ``S_out = A S_in + X`` of its state; ``Y`` is the gradient of
the incoming state through the segment's own outputs. Shapes, and the meaning of the gates, are in
:mod:`.segments`; states are ``[b, m, h, d, e]`` in fp32 (fp64 for fp64).

    torch       plain torch, in chunks of 64 tokens: any kind of gate, dtype and device
    triton      fused Triton kernels for CUDA: any kind of gate but the delta rule, not in fp64
"""

from typing import Protocol

import torch
from torch import Tensor

from ..errors import UserError
from .recurrence import Affine
from .segments import Gradients, Segments
from .torch_kernels import TorchKernel
from .triton_kernels import TritonKernel

SUPPORTED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ChunkKernel(Protocol):
    """The six parts of linear attention on one rank; see the module's description."""

    name: str

    def unusable(self, segments: Segments) -> str | None:
        """Why this kernel cannot work on such segments here; ``None`` if it can."""

    def summary(self, segments: Segments) -> tuple[Affine, ...]:
        """The map of each of the m segments. Needs no query.

        A is ``[1 or b, h]``, ``[b, h, d]`` or ``[b, h, d, d]`` by the kind of gates, exactly 0
        where a document starts in the segment; X is ``[b, h, d, e]``.
        """

    def intra(
        self, segments: Segments, *, dtype: torch.dtype, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The output from a given state, or from zero: what a segment's own tokens contribute.

        Args:
            dtype: of the output; a kernel adds up in fp32 (fp64 for fp64) in any case.
            state: ``[b, m, h, d, e]``, at each segment's first token; zero if not given.

        Returns:
            The output ``[b, m, n, ho, e]``, and the states ``[b, m, h, d, e]`` after each segment.
        """

    def apply(self, segments: Segments, out: Tensor, state: Tensor) -> None:
        """Adds to ``out``, in place, what the tokens read of the state that came in.

        ``intra`` from zero and then ``apply`` equals ``intra`` from ``state``.
        """

    def d_summary(self, segments: Segments, out_gradient: Tensor) -> tuple[Affine, ...]:
        """The map ``dS_in = A^T dS_out + Y`` of each segment, for the scan in reverse.

        Args:
            out_gradient: ``[b, m, n, ho, e]``.
        """

    def d_intra(
        self,
        segments: Segments,
        out_gradient: Tensor,
        state: Tensor | None,
        *,
        dtype: torch.dtype,
        state_gradient: Tensor | None = None,
        gates: bool = True,
    ) -> Gradients:
        """All gradients, of the outputs and of the states after the segments.

        Args:
            out_gradient: ``[b, m, n, ho, e]``.
            state: ``[b, m, h, d, e]``, at each segment's first token; ``None`` for zero.
            dtype: of the gradients of query, key and value.
            state_gradient: ``[b, m, h, d, e]``, of the states after the segments; zero if not
                given, to be followed by ``d_apply``.
            gates: whether the gradient of the decay is wanted.
        """

    def d_apply(
        self,
        segments: Segments,
        gradients: Gradients,
        state: Tensor | None,
        state_gradient: Tensor,
    ) -> None:
        """Adds to ``gradients``, in place, the share of the states after the segments.

        That of the decay includes ``<S_out, dS_out>``, which belongs to the last token: without it
        a segment's decay would not know what follows the segment. The query has no share;
        ``gradients.state`` becomes that of the whole.

        Args:
            state: as for ``d_intra``.
            state_gradient: ``[b, m, h, d, e]``, of the states after the segments.
        """


def kernels() -> dict[str, ChunkKernel]:
    """All kernels by name, the preferred one first."""
    # The one of Triton is tested interpreted; it is to be asked for until it has run on a GPU.
    known: tuple[ChunkKernel, ...] = (TorchKernel(), TritonKernel())
    return {kernel.name: kernel for kernel in known}


def choose_kernel(backend: str | ChunkKernel, segments: Segments) -> ChunkKernel:
    """The kernel of this name, or itself; for ``"auto"`` the first usable one.

    Raises:
        UserError: there is no such kernel, or it cannot work on such segments here.
    """
    known = kernels()
    if backend == "auto":
        return next(k for k in known.values() if k.unusable(segments) is None)
    if isinstance(backend, str) and backend not in known:
        raise UserError(f"backend {backend!r}: unknown; there are auto, {', '.join(known)}")
    kernel = known[backend] if isinstance(backend, str) else backend
    reason = kernel.unusable(segments)
    if reason is not None:
        usable = [k.name for k in known.values() if k.unusable(segments) is None]
        raise UserError(
            f"backend {kernel.name!r} cannot be used: {reason}; for these inputs there are: "
            f"auto, {', '.join(usable)}"
        )
    return kernel
