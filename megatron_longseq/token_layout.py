"""Which global tokens a rank holds, in which order, and what follows from it.

The layout is Megatron's own zigzag: the sequence is cut into ``2 N`` pieces and rank ``i`` of
``N`` holds pieces ``i`` and ``2 N - 1 - i``, in that order. Under a causal mask an early piece sees
little and a late piece much, so every rank has the same work.

With ``N = hp x ring`` ranks, rank ``i = c * hp + h`` has place ``h`` in its head group and position
``c`` in its ring. When the head group of position ``c`` has exchanged heads for tokens, each of its
ranks holds *chunks* ``c`` and ``2 ring - 1 - c`` of ``2 ring``: the zigzag of the ring, for every
factorisation, odd ones included. A chunk is the ``hp`` pieces of the head group side by side; the
late chunk gets its pieces in reverse order of the places.

    N = 4, hp = 2, ring = 2         pieces of the ranks     (0 7) (1 6) (2 5) (3 4)
                                    position 0 after the exchange: 0 1 | 6 7 = chunks 0 and 3
                                    position 1 after the exchange: 2 3 | 4 5 = chunks 1 and 2

A recurrence runs along the sequence instead, so it sees the same pieces as a *chain of segments*,
runs of consecutive tokens in order of time (``SegmentChain``): ``2 N`` of them on the zigzag, two
on each rank, or ``N`` if every rank holds one contiguous part.

Data, RoPE, loss, attention and tests ask this module and no other place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from .errors import UserError, nearest_values

Layout = Literal["zigzag", "contiguous"]


# From which to which key row, counted from its own row, a query row sees; None: without a limit.
Band = tuple[int | None, int | None]


@dataclass(frozen=True)
class Rectangle:
    """One call of a block kernel: these query rows see these key rows.

    Attributes:
        queries: rows of the rank's own block.
        keys: rows of the owner's block, possibly the same block.
        causal: query row ``i`` of the rectangle sees its key rows ``0 .. i`` only (a square
            rectangle); otherwise it sees all of them.
        band: ``(low, high)``: query row ``i`` sees the key rows ``i + low .. i + high`` only, as
            far as the rectangle has them; never with ``causal``. Every row has one, and every key
            row is seen by one.
    """

    queries: slice
    keys: slice
    causal: bool
    band: Band | None = None

    def up_to(self, rows: int) -> "Rectangle | None":
        """The part of it in the first ``rows`` query rows; ``None`` if there is none."""
        left = min(self.queries.stop, rows) - self.queries.start
        if left <= 0:
            return None
        queries = slice(self.queries.start, self.queries.start + left)
        # Query row i of a causal square sees its keys 0 .. i.
        high = 0 if self.causal else self.band[1] if self.band is not None else None
        stop = self.keys.stop
        if high is not None:
            stop = min(stop, self.keys.start + left + high)
        return Rectangle(queries, slice(self.keys.start, stop), self.causal, self.band)


def zigzag_tokens(rank: int, ranks: int, total: int) -> Tensor:
    """Global indices of the tokens of ``rank``, in its local order: int64 ``[total / ranks]``.

    Raises:
        UserError: ``2 * ranks`` does not divide ``total``.
    """
    piece = _piece_length(ranks, total)
    early = torch.arange(rank * piece, (rank + 1) * piece)
    late = torch.arange((2 * ranks - 1 - rank) * piece, (2 * ranks - rank) * piece)
    return torch.cat((early, late))


def contiguous_tokens(rank: int, ranks: int, total: int) -> Tensor:
    """Global indices of the tokens of ``rank`` if each rank holds one contiguous part.

    Raises:
        UserError: ``ranks`` does not divide ``total``.
    """
    if total % ranks:
        raise UserError(
            f"a sequence of {total} tokens does not split evenly over {ranks} ranks; "
            f"nearest lengths that do: {_nearest_multiples(total, ranks)}"
        )
    return torch.arange(rank * (total // ranks), (rank + 1) * (total // ranks))


def document_zigzag_tokens(rank: int, ranks: int, boundaries: Sequence[int]) -> Tensor:
    """Global indices of the tokens of ``rank`` where each document is a zigzag by itself.

    Megatron's order of packed rows by default.

    Args:
        boundaries: where each document begins in the row, and the row's end.

    Raises:
        UserError: the distance between two boundaries is no multiple of ``2 * ranks``.
    """
    parts = [begin + zigzag_tokens(rank, ranks, end - begin) for begin, end in pairwise(boundaries)]
    return torch.cat(parts)


@dataclass(frozen=True)
class ZigzagGrid:
    """The zigzag of ``head_parallel x ring`` ranks; rank ``c * head_parallel + h``.

    A ring alone (context parallelism, or METP inside a tensor-parallel group) is
    ``ZigzagGrid(1, ring)``.
    """

    head_parallel: int
    ring: int

    @property
    def ranks(self) -> int:
        """All ranks that share the sequence."""
        return self.head_parallel * self.ring

    def rank(self, position: int, place: int) -> int:
        """The rank at ring ``position`` with ``place`` in its head group."""
        return position * self.head_parallel + place

    def tokens(self, rank: int, total: int) -> Tensor:
        """Global indices of the tokens ``rank`` holds, in its local order."""
        return zigzag_tokens(rank, self.ranks, total)

    def block_tokens(self, position: int, total: int) -> Tensor:
        """Global indices of the tokens of the block of ring ``position``, in block order."""
        return zigzag_tokens(position, self.ring, total)

    def pieces(self, rank: int) -> tuple[int, int]:
        """The early and the late piece, of ``2 * ranks``, that ``rank`` holds."""
        return rank, 2 * self.ranks - 1 - rank

    def chunks(self, position: int) -> tuple[int, int]:
        """The early and the late chunk, of ``2 * ring``, in the block of ring ``position``."""
        return position, 2 * self.ring - 1 - position

    def piece_rows(self, place: int, rows: int) -> tuple[tuple[slice, slice], ...]:
        """Where the pieces of a rank lie in its ring block.

        Args:
            place: the rank's place in its head group.
            rows: tokens on that rank; the block has ``head_parallel * rows``.

        Returns:
            For the early and the late piece: (rows of the rank, rows of the block).
        """
        piece = rows // 2
        late = (2 * self.head_parallel - 1 - place) * piece
        return (
            (slice(0, piece), slice(place * piece, (place + 1) * piece)),
            (slice(piece, rows), slice(late, late + piece)),
        )

    def block_mask(
        self, position: int, owner: int, rows: int, *, causal: bool = True
    ) -> tuple[Rectangle, ...]:
        """What the block of ring ``position`` sees of the block of ring position ``owner``.

        Both blocks have ``rows`` rows: the early chunk, then the late one. Each causal case is 2 of
        4 pairs of chunks, so every rank is equally busy at every step. No rectangle is empty or
        holds a query row that sees no key.
        """
        everything, early, late = slice(0, rows), slice(0, rows // 2), slice(rows // 2, rows)
        if not causal:
            return (Rectangle(everything, everything, causal=False),)
        if owner == position:
            # Early before late in the block and in the sequence: one plain lower triangle.
            return (Rectangle(everything, everything, causal=True),)
        if owner < position:
            return (Rectangle(everything, early, causal=False),)
        return (Rectangle(late, everything, causal=False),)

    def documents_in_turn(self, boundaries: Sequence[int]) -> Tensor | None:
        """How to put the rows of a block in order where each document is a zigzag by itself.

        A rank then holds the early and the late piece of each document in turn, and the exchange of
        heads, which knows one early and one late half, mixes them. With the order that is returned,
        ``block[order]``, the block holds the early and the late chunk of each document in turn.

        Args:
            boundaries: where each document begins in the row, and the row's end; distances are
                multiples of ``2 * ranks``.

        Returns:
            int64 ``[tokens / ring]``; ``None`` where nothing has to move.
        """
        if self.head_parallel == 1 or len(boundaries) == 2:
            return None
        places, half = self.head_parallel, boundaries[-1] // self.ranks // 2
        order = []
        for begin, end in pairwise(boundaries):
            piece, first = (end - begin) // (2 * self.ranks), begin // self.ranks
            rows = torch.arange(first, first + 2 * piece).view(2, piece)
            for late, starts in enumerate((range(places), range(places - 1, -1, -1))):
                for place in starts:
                    # Where the exchange puts a rank's first and second half of rows.
                    second = half * (2 * places - 2 - place)
                    moved = torch.where(rows[late] < half, half * place, second)
                    order.append(rows[late] + moved)
        return torch.cat(order)

    def split(self, whole: Tensor, rank: int, dim: int = 0) -> Tensor:
        """The part of ``whole`` (the full sequence along ``dim``) that ``rank`` holds."""
        return whole.index_select(dim, self.tokens(rank, whole.shape[dim]).to(whole.device))

    def join(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        """The full sequence from the parts of all ranks, in order of rank."""
        total = sum(part.shape[dim] for part in parts)
        order = torch.cat([self.tokens(rank, total) for rank in range(self.ranks)])
        return torch.cat(list(parts), dim).index_select(dim, order.argsort().to(parts[0].device))


@dataclass(frozen=True)
class SegmentChain:
    """The segments of a sequence in order of time, and which rank holds which.

    Attributes:
        ranks: that share the sequence.
        layout: ``"zigzag"``: rank ``r`` holds the segments at positions ``r`` and
            ``2 ranks - 1 - r`` of the chain; ``"contiguous"``: that at position ``r``.

    Raises:
        UserError: the layout is neither.
    """

    ranks: int
    layout: Layout = "zigzag"

    def __post_init__(self) -> None:
        if self.layout not in get_args(Layout):
            raise UserError(
                f"layout {self.layout!r}: must be one of {', '.join(map(repr, get_args(Layout)))}"
            )

    @property
    def segments_per_rank(self) -> int:
        """Segments on each rank."""
        return 2 if self.layout == "zigzag" else 1

    @property
    def length(self) -> int:
        """Segments in the chain."""
        return self.segments_per_rank * self.ranks

    def positions(self, rank: int) -> tuple[int, ...]:
        """Chain positions of the segments of ``rank``, in its local order, which is theirs too."""
        if self.layout == "zigzag":
            return rank, 2 * self.ranks - 1 - rank
        return (rank,)

    def holder(self, position: int) -> tuple[int, int]:
        """(rank, index among its segments) of the segment at ``position``."""
        if position < self.ranks:
            return position, 0
        return 2 * self.ranks - 1 - position, 1

    def ranges(self, rank: int, total: int) -> tuple[range, ...]:
        """Global tokens of each segment of ``rank``, in a sequence of ``total``.

        Raises:
            UserError: ``total`` does not split evenly over the chain.
        """
        if self.layout == "zigzag":
            length = _piece_length(self.ranks, total)
        else:
            length = len(contiguous_tokens(0, self.ranks, total))
        return tuple(range(p * length, (p + 1) * length) for p in self.positions(rank))

    def tokens(self, rank: int, total: int) -> Tensor:
        """Global indices of the tokens of ``rank`` in its local order: int64 ``[total / ranks]``.

        Raises:
            UserError: ``total`` does not split evenly over the chain.
        """
        if self.layout == "zigzag":
            return zigzag_tokens(rank, self.ranks, total)
        return contiguous_tokens(rank, self.ranks, total)


def _piece_length(ranks: int, total: int) -> int:
    if total % (2 * ranks):
        raise UserError(
            f"a sequence of {total} tokens over {ranks} ranks: its length must be a multiple of "
            f"2 x {ranks} = {2 * ranks}; nearest: {_nearest_multiples(total, 2 * ranks)}"
        )
    return total // (2 * ranks)


def _nearest_multiples(value: int, of: int) -> list[int]:
    below = value // of
    return nearest_values(value, [k * of for k in (below, below + 1) if k > 0], 2)
