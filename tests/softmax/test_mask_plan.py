"""A plan's rectangles add up to the dense mask; none is empty, and none is larger than it says."""

import random
from itertools import pairwise

import pytest
import torch
from masks import dense_mask

from megatron_longseq.softmax import Mask, MaskPlan, PackedDocuments
from megatron_longseq.softmax.flash_kernel import _window
from megatron_longseq.softmax.mask_plan import LARGEST_TILE, band_mask, tiles
from megatron_longseq.token_layout import ZigzagGrid, document_zigzag_tokens

CPU = torch.device("cpu")


def size(rows):
    return rows.stop - rows.start


def matrix(part):
    """What sees what in a rectangle; checks that it is one that a kernel may be given."""
    rows, keys = size(part.queries), size(part.keys)
    assert rows > 0 and keys > 0 and (not part.causal or rows == keys)
    band = (None, 0) if part.causal else part.band or (None, None)
    visible = band_mask(rows, keys, band, CPU)
    assert visible.any(0).all() and visible.any(1).all()
    if part.band is not None:
        assert not part.causal and not visible.all(), "a full rectangle in disguise"
        left, right = _window(part.band, rows, keys)  # none is negative: flash takes that for none
        distance = torch.arange(keys) - torch.arange(rows).unsqueeze(1) - (keys - rows)
        flash = (distance >= -left) if left >= 0 else torch.ones_like(visible)
        assert torch.equal(flash & (distance <= right) if right >= 0 else flash, visible)
    return visible


def tokens(documents, ring, position, total):
    if documents is not None and documents.zigzag:
        return document_zigzag_tokens(position, ring, documents.boundaries)
    return ZigzagGrid(1, ring).block_tokens(position, total)


def painted(plan, total, *, tiled):
    """How often each pair is seen, and the offsets of blocks that anybody sees."""
    ring = plan.grid.ring
    seen, used = torch.zeros(total, total, dtype=torch.int64), {0}
    for position in range(ring):
        for owner in range(ring):
            for whole in plan.rectangles(position, owner):
                used.add((position - owner) % ring)
                for part in tiles(whole) if tiled else [whole]:
                    queries = tokens(plan.mask.documents, ring, position, total)[part.queries]
                    keys = tokens(plan.mask.documents, ring, owner, total)[part.keys]
                    seen[queries.unsqueeze(1), keys] += matrix(part).long()
    return seen, tuple(sorted(used))


def painted_by_used_rows(plan, total):
    """As painted, of blocks of others in the rows that are used, side by side."""
    ring, documents = plan.grid.ring, plan.mask.documents
    seen, rows_sent = torch.zeros(total, total, dtype=torch.int64), 0
    for position in range(ring):
        for owner in range(ring):
            used = plan.rows_used(position, owner)
            assert all(a.stop < b.start for a, b in pairwise(used))
            block = tokens(documents, ring, owner, total)
            arrived = torch.cat([block[:0], *(block[rows] for rows in used)])
            if owner != position:
                rows_sent += len(arrived)
            for part in plan.rectangles_of_used_rows(position, owner):
                queries = tokens(documents, ring, position, total)[part.queries]
                seen[queries.unsqueeze(1), arrived[part.keys]] += matrix(part).long()
    return seen, rows_sent


def random_case(rng):
    ring, documents = rng.randint(1, 5), None
    total = 2 * ring * rng.randint(1, 9)
    kind = rng.choice(("one document", "whole row", "by document"))
    if kind == "whole row":
        cuts = sorted(rng.sample(range(1, total), min(total - 1, rng.randint(1, 6))))
        documents = PackedDocuments.whole_row([0, *cuts, total])
    elif kind == "by document":
        padded = [2 * ring * rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
        boundaries = [sum(padded[:count]) for count in range(len(padded) + 1)]
        real = tuple(rng.randint(0, length) for length in padded)
        documents, total = PackedDocuments(tuple(boundaries), real, zigzag=True), boundaries[-1]
    causal = rng.random() < 0.8
    window = rng.choice((None, None, 0, 1, 2, 5, total // 2, total)) if causal else None
    prefix = rng.choice((0, 0, 1, 3, 7)) if causal else 0
    return ring, total, Mask(causal, window, prefix, documents)


def as_dense(mask, total):
    documents = mask.documents
    return dense_mask(
        total,
        causal=mask.causal,
        window=mask.window,
        prefix=mask.prefix,
        boundaries=documents and documents.boundaries,
        lengths=documents and documents.lengths,
    )


@pytest.mark.parametrize("tiled", [False, True])
def test_rectangles_of_any_mask_add_up_to_the_dense_one(tiled, monkeypatch):
    rng = random.Random(7)
    for _ in range(250):
        for name in ("SMALLEST_TILE", "LARGEST_TILE"):
            monkeypatch.setattr(
                f"megatron_longseq.softmax.mask_plan.{name}", rng.choice((1, 3, 6)), raising=True
            )
        ring, total, mask = random_case(rng)
        plan = MaskPlan(mask, ring, total // ring)
        seen, used = painted(plan, total, tiled=tiled)
        assert torch.equal(seen, as_dense(mask, total).long()), (mask, ring, total)
        assert used == plan.offsets
        assert plan.pairs() == seen.sum()
        again, rows_sent = painted_by_used_rows(plan, total)
        assert torch.equal(again, seen)
        if plan.sparse:
            assert 2 * rows_sent < (ring - 1) * total


def test_one_long_document_costs_no_more_calls_than_none():
    for ring in range(1, 9):
        row = PackedDocuments.whole_row([0, ring * 12])
        plan, grid = MaskPlan(Mask(documents=row), ring, 12), ZigzagGrid(1, ring)
        for position in range(ring):
            for owner in range(ring):
                assert plan.rectangles(position, owner) == grid.block_mask(position, owner, 12)


def test_a_pair_of_chunks_is_empty_or_one_rectangle_whatever_documents_are_cut():
    # Whole-row packing: at most one document reaches from an earlier chunk into a later one.
    rng = random.Random(3)
    for _ in range(100):
        ring = rng.randint(2, 6)
        total = 2 * ring * rng.randint(2, 9)
        cuts = sorted(rng.sample(range(1, total), rng.randint(1, min(9, total - 1))))
        plan = MaskPlan(
            Mask(documents=PackedDocuments.whole_row([0, *cuts, total])), ring, total // ring
        )
        for position in range(ring):
            for owner in range(ring):
                if owner != position:
                    assert len(plan.rectangles(position, owner)) <= 2  # early, late
                    assert not any(p.causal or p.band for p in plan.rectangles(position, owner))


def test_masks_of_bands_stay_small_whatever_the_window():
    # A band as one matrix would be a chunk x a chunk: 8192 x 8192 here.
    for window in (16, 100, 1000, 5000):
        plan = MaskPlan(Mask(window=window), 2, 16384)
        for owner in (0, 1):
            for whole in plan.rectangles(0, owner):
                for part in tiles(whole):
                    if part.band is not None:
                        assert size(part.queries) <= LARGEST_TILE
                        assert size(part.keys) <= 4 * LARGEST_TILE


def test_a_window_costs_its_own_size_not_the_sequence():
    window, total = 1000, 32768
    computed = 0
    plan = MaskPlan(Mask(window=window), 1, total)
    for whole in plan.rectangles(0, 0):
        for part in tiles(whole):
            half = 2 if part.causal else 1
            computed += size(part.queries) * size(part.keys) // half
    assert computed < 1.5 * plan.pairs()
    assert plan.pairs() < total * (window + 1)


def test_only_the_neighbours_of_a_short_window_are_needed():
    # Chunk k needs chunk k - 1: at ring position c - 1 for an early one, c + 1 for a late one.
    assert MaskPlan(Mask(window=8), 8, 32).offsets == (0, 1, 7)
    assert MaskPlan(Mask(window=17), 8, 32).offsets == (0, 1, 2, 6, 7)
    assert MaskPlan(Mask(window=10**6), 8, 32).offsets == tuple(range(8))
    assert MaskPlan(Mask(), 8, 32).offsets == tuple(range(8))
    alone = PackedDocuments.whole_row(range(0, 257, 16))  # no document crosses a chunk's end
    assert MaskPlan(Mask(documents=alone), 8, 32).offsets == (0,)
