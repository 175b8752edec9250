"""Key/value heads that different numbers of query heads share, for kernels that know one number.

A rank of a head group may hold a part of the query heads of one key/value head beside all those of
another: 28 query heads with 4 key/value heads over 8 ranks, or 24 with 6 over 4. A block kernel
wants as many query heads for each key/value head, so it is called once for each stretch of heads
that has one number. Key/value heads are neither repeated nor parted from their query heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .block_kernels import BlockKernel


@dataclass(frozen=True)
class Stretch:
    """Neighbouring heads of which each key/value head serves as many query heads."""

    queries: slice
    keys: slice


def stretches(queries: range, heads: int, kv_heads: int) -> tuple[Stretch, ...]:
    """The stretches of a range of query heads and the key/value heads it needs.

    Args:
        queries: numbers of query heads among all.
        heads, kv_heads: of all ranks; the latter divide the former.

    Returns:
        Slices of the range, and of the key/value heads from the first that it needs.
    """
    served = [head * kv_heads // heads for head in queries]
    counts = [served.count(kv) for kv in range(served[0], served[-1] + 1)]
    found, query, key = [], 0, 0
    for count, same in groupby(counts):
        keys = len(list(same))
        found.append(Stretch(slice(query, query + count * keys), slice(key, key + keys)))
        query, key = query + count * keys, key + keys
    return tuple(found)


class StretchedKernel:
    """A block kernel, called for each stretch; see :mod:`.block_kernels` for the contract."""

    def __init__(self, kernel: BlockKernel, parts: Sequence[Stretch]) -> None:
        self._kernel = kernel
        self._parts = parts
        self.name = kernel.name
        self.skips_outside_bands = kernel.skips_outside_bands

    def unusable(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why this kernel cannot work on such tensors here; ``None`` if it can."""
        return self._kernel.unusable(dtype, device)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, **how: Any
    ) -> tuple[Tensor, Tensor]:
        """Attention of one block."""
        results = [
            self._kernel.forward(
                query[:, :, part.queries], key[:, :, part.keys], value[:, :, part.keys], **how
            )
            for part in self._parts
        ]
        outs, sums = zip(*results, strict=True)
        return torch.cat(outs, 2), torch.cat(sums, 1)

    def backward(
        self,
        out_gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        **how: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This block's terms of the gradients."""
        terms = [
            self._kernel.backward(
                out_gradient[:, :, part.queries],
                query[:, :, part.queries],
                key[:, :, part.keys],
                value[:, :, part.keys],
                out[:, :, part.queries],
                lse[:, part.queries],
                **how,
            )
            for part in self._parts
        ]
        dq, dk, dv = (torch.cat(parts, 2) for parts in zip(*terms, strict=True))
        return dq, dk, dv
