"""ALiBi and attention dropout: what changes scores and weights by where query and key are.

    ALiBi     score - slope_h |i - j|                        (arXiv 2108.12409)
    dropout   weight keep(seed, h, b, i, j) / (1 - p), keep being 0 or 1

i and j are places in the sequence, h the head among those of the whole model: neither depends on
how the sequence is split, so that every layout computes the same. Whether a weight is kept is a
function of these numbers, not of a generator's state: backward asks again and gets the same answer,
and nothing is stored. The log-sum-exp is that of the weights before dropout, so blocks merge as
ever, and ``Delta = rowsum(dO o O)`` holds with the output after it.

Block kernels know neither; :class:`EditedKernel` is plain torch, in tiles, so that its scores need
little memory. It is several times slower than a flash kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..token_layout import Rectangle
from .mask_plan import tiles
from .reference_kernel import ReferenceKernel

# Of a tile whose scores are a matrix.
TILE_ROWS, TILE_KEYS = 256, 1024

_STEPS = (-7046029254386353131, -4417276706812531889, -8796714831421723037)
_FACTORS = (-4658895280553007687, -7723592293110705685)
_BITS = 24


@dataclass(frozen=True)
class ScoreEdits:
    """What is done to the scores of one rank's query heads.

    Attributes:
        heads: their numbers among those of the whole model: int64 ``[a]``.
        serving: for each, the key/value head of this rank that serves it: int64 ``[a]``.
        slopes: of ALiBi, ``[a]``; ``None`` without.
        dropout: share of the weights that are dropped.
        seed: of one call; the same in its backward.
        first_row: number, in the micro-batch, of the first row that is given.
    """

    heads: Tensor
    serving: Tensor
    slopes: Tensor | None
    dropout: float
    seed: int
    first_row: int = 0

    def kernel(self, queries: Tensor, keys: Tensor) -> "EditedKernel":
        """The kernel of a block.

        Args:
            queries, keys: places of its rows in the sequence: int64 ``[rows]``, ``[keys]``.
        """
        return EditedKernel(self, queries, keys)


class EditedKernel(ReferenceKernel):
    """Attention of one block at known places; see :mod:`.block_kernels` for the contract."""

    name = "edited"

    def __init__(self, edits: ScoreEdits, queries: Tensor, keys: Tensor) -> None:
        self._edits = edits
        self._queries = queries
        self._keys = keys

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, **how: Any
    ) -> tuple[Tensor, Tensor]:
        """Attention of the block, in fp32 (fp64 for fp64)."""
        return super().forward(query, self._served(key), self._served(value), **how)

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
        """The block's terms: ``dS = P (keep dO V^T / (1 - p) - Delta)``, the rest as ever."""
        k, v = self._served(key), self._served(value)
        dq, dk, dv = super().backward(out_gradient, query, k, v, out, lse, **how)
        return dq, self._gathered(dk, key), self._gathered(dv, value)

    def _served(self, tensor: Tensor) -> Tensor:
        """Key/value heads, one for each query head."""
        return tensor.index_select(2, self._edits.serving)

    def _scored(self, scores: Tensor) -> Tensor:
        slopes = self._edits.slopes
        if slopes is None:
            return scores
        distance = (self._queries[:, None] - self._keys).abs().to(scores.dtype)
        return scores - slopes.to(scores.dtype)[:, None, None, None] * distance

    def _weighted(self, weights: Tensor) -> Tensor:
        """Weights ``[b, a, 1, rows, keys]``, or their gradients, after dropout."""
        edits = self._edits
        if edits.dropout == 0:
            return weights
        keep = kept_weights(
            edits.seed,
            edits.dropout,
            heads=edits.heads,
            batch=range(edits.first_row, edits.first_row + weights.shape[0]),
            queries=self._queries,
            keys=self._keys,
        )
        return weights * keep.unsqueeze(2) / (1 - edits.dropout)

    def _gathered(self, gradient: Tensor, like: Tensor) -> Tensor:
        """Gradients of key/value heads from those at their query heads."""
        total = gradient.new_zeros(like.shape)
        return total.index_add_(2, self._edits.serving, gradient)


def kept_weights(
    seed: int, probability: float, *, heads: Tensor, batch: range, queries: Tensor, keys: Tensor
) -> Tensor:
    """Which attention weights dropout keeps, for a seed: boolean ``[b, a, rows, keys]``.

    Args:
        probability: that one is dropped.
        heads: numbers of heads ``[a]``; with ``queries`` and ``keys``, places, int64.
        batch: numbers of the rows in the micro-batch.
    """
    rows = torch.tensor(batch, device=heads.device)[:, None] * _STEPS[0] + heads * _STEPS[1]
    rows = _mixed(_mixed(rows + seed)[:, :, None] + queries * _STEPS[2])
    cells = _mixed(rows[..., None] ^ _mixed(keys * _STEPS[0] + seed))
    return _shifted(cells, 64 - _BITS) >= round(probability * 2**_BITS)


def _mixed(values: Tensor) -> Tensor:
    """A permutation of 64-bit numbers without visible order (splitmix64's finalizer)."""
    values = (values ^ _shifted(values, 30)) * _FACTORS[0]
    values = (values ^ _shifted(values, 27)) * _FACTORS[1]
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, by: int) -> Tensor:
    """Shifted right as unsigned numbers."""
    return (values >> by) & (2 ** (64 - by) - 1)


def small_parts(part: Rectangle) -> list[Rectangle]:
    """A rectangle in tiles whose scores may be a matrix."""
    if part.band is not None:
        return [small for tile in tiles(part) for small in _cut(tile)]
    return _cut(part)


def _cut(part: Rectangle) -> list[Rectangle]:
    if part.band is not None:  # small, and bound to its rows
        return [part]
    found = []
    first = part.keys.start - part.queries.start  # of a causal square, both start together
    for start in range(part.queries.start, part.queries.stop, TILE_ROWS):
        rows = slice(start, min(start + TILE_ROWS, part.queries.stop))
        seen = rows.start + first if part.causal else part.keys.stop
        found += [Rectangle(rows, keys, causal=False) for keys in _columns(part.keys.start, seen)]
        if part.causal:
            square = slice(rows.start + first, rows.stop + first)
            found.append(Rectangle(rows, square, causal=True))
    return found


def _columns(start: int, stop: int) -> Sequence[slice]:
    return [slice(at, min(at + TILE_KEYS, stop)) for at in range(start, stop, TILE_KEYS)]
