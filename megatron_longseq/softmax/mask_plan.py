"""Which query rows see which key rows, for every pair of blocks of a ring: a plan of rectangles.

A :class:`Mask` says what a token sees, in words of the sequence; a :class:`MaskPlan` turns it into
calls of a block kernel. No mask of s x s entries is made, nowhere: a block is a few *runs*, rows
that are consecutive tokens of one document, and two runs of one document meet in one rectangle:

    the query run lies behind the key run       all of it
    a run with itself                           a causal square
    a sliding window ends inside                a band, cut to the rows that take part
    different documents, or later keys          nothing

Where little of other ranks' blocks is seen, the rows that are seen travel alone, straight to who
sees them (``sparse``, ``offsets``, ``rows_used``).

Where the document of two runs is the same on both sides of a boundary between runs, rectangles
join: without documents and windows the plan is :meth:`..token_layout.ZigzagGrid.block_mask`.

Bands are cut into tiles for kernels that take a mask as a matrix (:func:`tiles`).
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ..token_layout import Band, Rectangle, ZigzagGrid

# Rows of a tile of a band: enough for a kernel to work at its pace, and a small matrix of a mask.
SMALLEST_TILE, LARGEST_TILE = 64, 512


@dataclass(frozen=True)
class PackedDocuments:
    """The documents of a packed row.

    Attributes:
        boundaries: where each begins in the row, and the row's end.
        lengths: tokens of each; what follows them up to the next boundary is padding, which sees
            nothing and is not seen.
        zigzag: each document is split among the ranks by itself, in Megatron's zigzag (every
            distance between boundaries is then a multiple of twice the ranks); otherwise the row
            is, and documents are cut wherever a chunk ends.
    """

    boundaries: tuple[int, ...]
    lengths: tuple[int, ...]
    zigzag: bool = False

    @classmethod
    def whole_row(cls, boundaries: Sequence[int]) -> "PackedDocuments":
        """PackedDocuments without padding between them, in a row that is split as a whole."""
        inner = tuple(sorted(set(boundaries)))  # without the empty ones
        return cls(inner, tuple(b - a for a, b in pairwise(inner)))


@dataclass(frozen=True)
class Mask:
    """What a token sees.

    Attributes:
        causal: itself and what comes before it; otherwise everything.
        window: of what comes before it, the last ``window`` tokens only.
        prefix: the first ``prefix`` tokens of the sequence, or of each document, are seen by all
            of it, also by tokens before them.
        documents: a token sees nothing of another document; ``None``: one document.
    """

    causal: bool = True
    window: int | None = None
    prefix: int = 0
    documents: PackedDocuments | None = None

    @property
    def plain(self) -> bool:
        """Whether it is the causal or the full mask of one document."""
        return self.window is None and self.documents is None and not (self.prefix and self.causal)


@dataclass(frozen=True)
class Run:
    """Rows of a block that are consecutive tokens of one document.

    Attributes:
        row: the first of them, in the block.
        length: how many.
        document: its number.
        place: the first token's place in the document.
    """

    row: int
    length: int
    document: int
    place: int

    @property
    def rows(self) -> slice:
        """Its rows in the block."""
        return slice(self.row, self.row + self.length)


class MaskPlan:
    """The rectangles of every pair of blocks of a ring.

    Args:
        mask: what a token sees.
        ring: ranks of the ring.
        rows: of a block: its early and its late chunk, or those of each document in turn.
    """

    def __init__(self, mask: Mask, ring: int, rows: int) -> None:
        self.mask = mask
        self.grid = ZigzagGrid(1, ring)
        self.rows = rows
        self._known: dict[tuple[int, int], tuple[Rectangle, ...]] = {}

    def rectangles(self, position: int, owner: int) -> tuple[Rectangle, ...]:
        """What the block of ring ``position`` sees of the block of ring position ``owner``.

        No rectangle is empty, and none holds a row that sees nothing or a key that nobody sees.
        """
        if self.mask.plain:
            return self.grid.block_mask(position, owner, self.rows, causal=self.mask.causal)
        if (position, owner) not in self._known:
            self._known[position, owner] = tuple(self._make(position, owner))
        return self._known[position, owner]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """How many positions away, down the ring, blocks lie that some rank sees, 0 included.

        The same on every rank: what is not named need not travel.
        """
        size = self.grid.ring
        if self.mask.plain:
            return tuple(range(size))
        return tuple(
            offset
            for offset in range(size)
            if offset == 0
            or any(self._sees(place, (place - offset) % size) for place in range(size))
        )

    @cached_property
    def sparse(self) -> bool:
        """Whether the rows that others use are less than half of what the ring would carry.

        They then go straight to who uses them; the same on every rank.
        """
        ring = self.grid.ring
        if self.mask.plain or ring == 1:
            return False
        used = sum(
            rows.stop - rows.start
            for offset in self.offsets[1:]
            for place in range(ring)
            for rows in self.rows_used(place, (place - offset) % ring)
        )
        return 2 * used < ring * (ring - 1) * self.rows

    def rows_used(self, position: int, owner: int) -> tuple[slice, ...]:
        """Key rows of the block of ``owner`` that ring ``position`` uses, ascending, apart."""
        found: list[slice] = []
        rectangles = self.rectangles(position, owner)
        for keys in sorted((part.keys for part in rectangles), key=lambda rows: rows.start):
            if found and keys.start <= found[-1].stop:
                found[-1] = slice(found[-1].start, max(found[-1].stop, keys.stop))
            else:
                found.append(keys)
        return tuple(found)

    def rectangles_of_used_rows(self, position: int, owner: int) -> tuple[Rectangle, ...]:
        """As :meth:`rectangles`, with key rows counted in :meth:`rows_used`, side by side."""
        moved, before = [], 0
        for used in self.rows_used(position, owner):
            for part in self.rectangles(position, owner):
                if used.start <= part.keys.start and part.keys.stop <= used.stop:
                    first = part.keys.start - used.start + before
                    keys = slice(first, first + part.keys.stop - part.keys.start)
                    moved.append(Rectangle(part.queries, keys, part.causal, part.band))
            before += used.stop - used.start
        return tuple(moved)

    def places(self, position: int) -> Tensor:
        """Where the rows of the block of ring ``position`` are in the row: int64 ``[rows]``.

        Differences inside a document are its own; of padding the places are 0.
        """
        documents = self.mask.documents
        found = torch.zeros(self.rows, dtype=torch.int64)
        for number, runs in self._runs[position].items():
            begin = 0 if documents is None else documents.boundaries[number]
            for run in runs:
                found[run.rows] = torch.arange(begin + run.place, begin + run.place + run.length)
        return found

    def pairs(self, position: int | None = None) -> int:
        """Pairs of a query row and a key that it sees, of one ring position or of all."""
        owners = range(self.grid.ring)
        places = owners if position is None else (position,)
        parts = (part for p in places for o in owners for part in self.rectangles(p, o))
        return sum(_pairs(part) for part in parts)

    # --- runs ---------------------------------------------------------------------------------

    @cached_property
    def _runs(self) -> tuple[dict[int, list[Run]], ...]:
        """The runs of each block by document, in order of their places in it."""
        documents = self.mask.documents
        if documents is None:
            total = self.rows * self.grid.ring
            documents = PackedDocuments((0, total), (total,))
        make = self._runs_by_document if documents.zigzag else self._runs_by_row
        blocks = []
        for position in range(self.grid.ring):
            runs: dict[int, list[Run]] = {}
            for run in make(documents, position):
                runs.setdefault(run.document, []).extend(self._without_prefix(run))
            blocks.append(runs)
        return tuple(blocks)

    def _runs_by_row(self, documents: PackedDocuments, position: int) -> Iterator[Run]:
        length, starts = self.rows // 2, documents.boundaries
        for index, chunk in enumerate(self.grid.chunks(position)):
            begin, end = chunk * length, (chunk + 1) * length
            number = bisect_right(starts, begin) - 1
            while number < len(documents.lengths) and starts[number] < end:
                low = max(begin, starts[number])
                high = min(end, starts[number] + documents.lengths[number])
                if low < high:
                    row = index * length + low - begin
                    yield Run(row, high - low, number, low - starts[number])
                number += 1

    def _runs_by_document(self, documents: PackedDocuments, position: int) -> Iterator[Run]:
        ring = self.grid.ring
        padded = zip(pairwise(documents.boundaries), documents.lengths, strict=True)
        for number, ((begin, end), real) in enumerate(padded):
            chunk = (end - begin) // (2 * ring)
            for index, place in enumerate(c * chunk for c in self.grid.chunks(position)):
                length = min(real - place, chunk)
                if length > 0:
                    yield Run(begin // ring + index * chunk, length, number, place)

    def _without_prefix(self, run: Run) -> list[Run]:
        """The run, cut where the prefix of its document ends."""
        before = self.mask.prefix - run.place
        if not 0 < before < run.length:
            return [run]
        return [
            Run(run.row, before, run.document, run.place),
            Run(run.row + before, run.length - before, run.document, run.place + before),
        ]

    # --- rectangles ---------------------------------------------------------------------------

    def _make(self, position: int, owner: int) -> list[Rectangle]:
        ours, theirs = self._runs[position], self._runs[owner]
        return [
            part
            for document, queries in ours.items()
            for part in self._of_document(queries, theirs.get(document, []))
        ]

    def _of_document(self, queries: list[Run], keys: list[Run]) -> list[Rectangle]:
        pairs = (self._pair(query, key) for query in queries for key in keys)
        return _joined([part for part in pairs if part is not None])

    def _pair(self, query: Run, key: Run) -> Rectangle | None:
        everybody = not self.mask.causal or key.place + key.length <= self.mask.prefix
        if everybody:
            return Rectangle(query.rows, key.rows, causal=False)
        ahead = query.place - key.place
        return visible_part(query.rows, key.rows, ahead, self.mask.window)

    def _sees(self, position: int, owner: int) -> bool:
        ours, theirs = self._runs[position], self._runs[owner]
        return any(
            self._pair(query, key) is not None
            for document, queries in ours.items()
            for query in queries
            for key in theirs.get(document, [])
        )


def visible_part(
    queries: slice, keys: slice, ahead: int, window: int | None = None
) -> Rectangle | None:
    """What is visible, causally, of consecutive keys to consecutive queries of one document.

    Query ``i`` sees key ``j`` if ``0 <= ahead + i - j <= window``. Rows that see nothing and keys
    that nobody sees are cut off, so that a band never begins with a negative bound, which
    flash-attention takes for no bound.

    Args:
        ahead: the first query's place in the document less the first key's.
    """
    row, rows = queries.start, queries.stop - queries.start
    key, count = keys.start, keys.stop - keys.start
    early = max(0, -ahead)  # queries before the first key
    row, rows, ahead = row + early, rows - early, ahead + early
    if window is not None:
        old = max(0, ahead - window)  # keys that the first query no longer sees
        key, count, ahead = key + old, count - old, ahead - old
        rows = min(rows, count + window - ahead)
    count = min(count, ahead + rows)
    if rows <= 0 or count <= 0:
        return None
    queries, keys = slice(row, row + rows), slice(key, key + count)
    high = ahead if ahead < count - 1 else None
    low = ahead - window if window is not None and ahead + rows - 1 > window else None
    if high is None and low is None:
        return Rectangle(queries, keys, causal=False)
    if low is None and ahead == 0 and rows == count:
        return Rectangle(queries, keys, causal=True)
    return Rectangle(queries, keys, causal=False, band=(low, high))


def _joined(parts: list[Rectangle]) -> list[Rectangle]:
    """The same rectangles with neighbours joined: fewer and larger calls."""
    joined: list[Rectangle] = []
    for part in parts:
        while joined and (larger := _union(joined[-1], part)) is not None:
            joined.pop()
            part = larger
        joined.append(part)
    return _triangle(joined)


def _union(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """Two full rectangles side by side as one."""
    if one.causal or other.causal or one.band is not None or other.band is not None:
        return None
    if one.queries == other.queries and one.keys.stop == other.keys.start:
        return Rectangle(one.queries, slice(one.keys.start, other.keys.stop), causal=False)
    if one.keys == other.keys and one.queries.stop == other.queries.start:
        return Rectangle(slice(one.queries.start, other.queries.stop), one.keys, causal=False)
    return None


def _triangle(parts: list[Rectangle]) -> list[Rectangle]:
    """Causal square, full rectangle, causal square of a block with itself: one causal square."""
    if len(parts) != 3:
        return parts
    first, full, last = parts
    fits = (
        first.causal
        and last.causal
        and not full.causal
        and full.band is None
        and (first.queries, last.queries) == (first.keys, last.keys)
        and (full.queries, full.keys) == (last.queries, first.keys)
        and first.queries.stop == last.queries.start
    )
    if not fits:
        return parts
    rows = slice(first.queries.start, last.queries.stop)
    return [Rectangle(rows, rows, causal=True)]


def tiles(part: Rectangle) -> list[Rectangle]:
    """A band as full rectangles, causal squares and bands of few rows; anything else as it is.

    For kernels to which a band is a matrix: none of its bands has more than
    :data:`LARGEST_TILE` rows, or more than four times as many keys.
    """
    if part.band is None:
        return [part]
    low, high = part.band
    width = part.keys.stop - part.keys.start
    limit = width if high is None else high  # beyond the last key: no limit
    window = None if low is None else limit - low
    step = min(max((window or width) // 2, SMALLEST_TILE), LARGEST_TILE)
    cut = []
    for start in range(part.queries.start, part.queries.stop, step):
        rows = slice(start, min(start + step, part.queries.stop))
        first, last = rows.start - part.queries.start, rows.stop - 1 - part.queries.start
        # Keys that all of these rows see, in the part's rows; the square of the last ones apart.
        whole = 0 if low is None else max(0, last + low), min(width, first + limit)
        edges = [0, *whole, width] if whole[1] - whole[0] >= step else [0, width]
        for begin, end in pairwise(edges):
            keys = slice(part.keys.start + begin, part.keys.start + end)
            found = visible_part(rows, keys, first + limit - begin, window)
            if found is not None:
                cut.append(found)
    return cut


def band_mask(rows: int, keys: int, band: Band, device: torch.device) -> Tensor:
    """A band as a matrix: boolean ``[rows, keys]``, what sees what."""
    low, high = band
    distance = torch.arange(keys, device=device) - torch.arange(rows, device=device).unsqueeze(1)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if low is not None:
        visible &= distance >= low
    if high is not None:
        visible &= distance <= high
    return visible


def _pairs(part: Rectangle) -> int:
    rows, keys = part.queries.stop - part.queries.start, part.keys.stop - part.keys.start
    if part.causal:
        return rows * (rows + 1) // 2
    if part.band is None:
        return rows * keys
    low, high = part.band
    return sum(
        min(keys, keys if high is None else row + high + 1)
        - max(0, 0 if low is None else row + low)
        for row in range(rows)
    )
