"""Merging the attention of one query block to several key blocks, by log-sum-exp.

    lse = log(exp(lse1) + exp(lse2))
    out = exp(lse1 - lse) * out1 + exp(lse2 - lse) * out2 = out1 + w * (out2 - out1)

with ``w = exp(lse2 - lse)`` in 0..1. In fp32, or fp64 for fp64 blocks, rounded once at the end:
partial sums in 16 bits would lose accuracy with every block. A side that has seen no key
(lse = -inf) leaves the other as it is, bit for bit; two such sides give 0 and -inf.
"""

import torch
from torch import Tensor

EVERYTHING = slice(None)


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merges a block into ``out`` and ``lse``, in place.

    Args:
        out: ``[rows, b, a, dv]`` fp32 or fp64.
        lse: ``[b, a, rows]``, same dtype.
        block_out, block_lse: the block's part, of any floating dtype.
    """
    total = torch.logaddexp(lse, block_lse)
    # -inf minus -inf is NaN, where neither side has seen a key.
    weight = (block_lse - total).exp_().nan_to_num_(nan=0.0)
    lse.copy_(total)
    # lerp takes the nearer end as its base: at w = 0 and w = 1 it returns that end's bits.
    out.lerp_(block_out.to(out.dtype), weight.permute(2, 0, 1).unsqueeze(-1))


class OnlineSoftmax:
    """The running (out, lse) of a query block.

    Args:
        rows, batch, heads, width: of the output.
        dtype: of the accumulator.
    """

    def __init__(
        self,
        rows: int,
        batch: int,
        heads: int,
        width: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._out_shape = (rows, batch, heads, width)
        self.dtype = dtype
        self._device = device
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._fresh_from = 0  # no block has come for this row or a later one

    def merge(self, block_out: Tensor, block_lse: Tensor, rows: slice = EVERYTHING) -> None:
        """Merges the attention of query ``rows`` to one more key block.

        The tensors are taken over: the caller must not use them afterwards.
        """
        if self._out is None or self._lse is None:
            if block_out.shape == self._out_shape:
                # The first block becomes the accumulator: no copy where the dtype is the same.
                self._out = block_out.to(self.dtype)
                self._lse = block_lse.to(self.dtype)
                self._fresh_from = self._out_shape[0]
                return
            length, batch, heads, _ = self._out_shape
            self._out = torch.zeros(self._out_shape, dtype=self.dtype, device=self._device)
            self._lse = self._out.new_full((batch, heads, length), -torch.inf)
        start, stop, _ = rows.indices(self._out_shape[0])
        if start >= self._fresh_from:
            # Many short documents come in order of rows: nothing is there yet to merge with.
            self._out[rows] = block_out
            self._lse[..., rows] = block_lse
            self._fresh_from = stop
            return
        self._fresh_from = max(self._fresh_from, stop)
        merge_(self._out[rows], self._lse[..., rows], block_out, block_lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """The merged (out, lse)."""
        if self._out is None or self._lse is None:
            raise RuntimeError("the softmax has seen no block")
        return self._out, self._lse
