"""Token layout: Megatron's zigzag, the ring's zigzag, and masks that add up to the dense one."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longseq.errors import UserError
from megatron_longseq.token_layout import SegmentChain, ZigzagGrid, contiguous_tokens, zigzag_tokens

GRIDS = [(hp, ring) for hp in range(1, 25) for ring in range(1, 25) if hp * ring <= 24]
# A shared machine may stall in any example.
unhurried = settings(deadline=None, max_examples=40)
small_grids = st.sampled_from(GRIDS).map(lambda pair: ZigzagGrid(*pair))
piece_lengths = st.integers(1, 4)


@unhurried
@given(small_grids, piece_lengths)
def test_every_token_is_on_exactly_one_rank(grid, piece):
    total = 2 * grid.ranks * piece
    held = torch.cat([grid.tokens(rank, total) for rank in range(grid.ranks)])
    assert held.sort().values.tolist() == list(range(total))


@unhurried
@given(small_grids, piece_lengths)
def test_local_order_is_increasing_and_made_of_an_early_and_a_late_piece(grid, piece):
    total = 2 * grid.ranks * piece
    for rank in range(grid.ranks):
        tokens = grid.tokens(rank, total)
        assert (tokens.diff() > 0).all()
        assert tuple(tokens[::piece].div(piece, rounding_mode="floor").tolist()) == grid.pieces(
            rank
        )


@unhurried
@given(small_grids, piece_lengths)
def test_pieces_gathered_in_a_head_group_are_the_zigzag_of_the_ring(grid, piece):
    total, rows = 2 * grid.ranks * piece, 2 * piece
    for position in range(grid.ring):
        block = torch.full((grid.head_parallel * rows,), -1)
        for place in range(grid.head_parallel):
            tokens = grid.tokens(grid.rank(position, place), total)
            for local, in_block in grid.piece_rows(place, rows):
                assert (block[in_block] == -1).all(), "two pieces on the same rows"
                block[in_block] = tokens[local]
        assert block.tolist() == grid.block_tokens(position, total).tolist()


@unhurried
@given(st.integers(1, 24), piece_lengths, st.booleans())
def test_rectangles_of_all_owners_add_up_to_the_dense_mask(ring, piece, causal):
    grid, total, rows = ZigzagGrid(1, ring), 2 * ring * piece, 2 * piece
    dense = torch.ones(total, total, dtype=torch.bool)
    seen = torch.zeros(total, total, dtype=torch.int64)
    for position in range(ring):
        for owner in range(ring):
            for part in grid.block_mask(position, owner, rows, causal=causal):
                queries = grid.block_tokens(position, total)[part.queries]
                keys = grid.block_tokens(owner, total)[part.keys]
                shape = torch.ones(len(queries), len(keys), dtype=torch.int64)
                seen[queries.unsqueeze(1), keys] += shape.tril() if part.causal else shape
    assert torch.equal(seen, (dense.tril() if causal else dense).long())


@unhurried
@given(st.integers(1, 24), piece_lengths)
def test_every_causal_step_costs_two_of_four_chunk_pairs_and_no_row_sees_nothing(ring, piece):
    grid, rows = ZigzagGrid(1, ring), 2 * piece
    for position in range(ring):
        for owner in range(ring):
            cost = 0
            for part in grid.block_mask(position, owner, rows):
                queries, keys = (len(range(rows)[s]) for s in (part.queries, part.keys))
                assert queries and keys
                assert not part.causal or queries == keys
                cost += queries * keys // (2 if part.causal else 1)
            assert cost == rows * rows // 2


def test_split_then_join_is_the_identity():
    whole = torch.arange(48.0).view(2, 24)
    for hp, ring in ((1, 1), (3, 1), (2, 3), (6, 2)):
        grid = ZigzagGrid(hp, ring)
        parts = [grid.split(whole, rank, 1) for rank in range(grid.ranks)]
        assert torch.equal(grid.join(parts, 1), whole)


def test_lengths_that_do_not_split_are_refused_with_the_nearest_that_do():
    with pytest.raises(UserError, match=r"multiple of 2 x 4 = 8; nearest: \[8, 16\]"):
        zigzag_tokens(0, 4, 12)
    with pytest.raises(UserError, match=r"10 tokens .* 4 ranks; .*\[8, 12\]"):
        contiguous_tokens(0, 4, 10)


def test_contiguous_parts_follow_one_another():
    parts = [contiguous_tokens(rank, 3, 12) for rank in range(3)]
    assert torch.cat(parts).tolist() == list(range(12))


@unhurried
@given(st.integers(1, 12), piece_lengths, st.sampled_from(["zigzag", "contiguous"]))
def test_segments_follow_one_another_and_each_has_one_holder(ranks, length, layout):
    chain = SegmentChain(ranks, layout)
    total, order = chain.length * length, []
    for position in range(chain.length):
        rank, index = chain.holder(position)
        assert chain.positions(rank)[index] == position
        order += chain.ranges(rank, total)[index]
    assert order == list(range(total))
    for rank in range(ranks):
        assert len(chain.positions(rank)) == chain.segments_per_rank
        held = [token for segment in chain.ranges(rank, total) for token in segment]
        assert held == chain.tokens(rank, total).tolist()


def test_a_layout_or_length_that_is_no_chain_is_refused():
    with pytest.raises(UserError, match="layout 'striped': must be one of 'zigzag', 'contiguous'"):
        SegmentChain(2, "striped")
    with pytest.raises(UserError, match=r"multiple of 2 x 4 = 8; nearest: \[8, 16\]"):
        SegmentChain(4).ranges(0, 12)
    with pytest.raises(UserError, match=r"10 tokens .* 4 ranks; .*\[8, 12\]"):
        SegmentChain(4, "contiguous").ranges(0, 10)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_layout_equals_megatrons_slicing_of_batch_and_rope(ranks, monkeypatch):
    utils = pytest.importorskip("megatron.core.utils")
    from megatron.core.models.common.embeddings import rope_utils

    # Megatron moves its indices to the GPU.
    plain = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *a, pin_memory=False, **k: plain(*a, **k))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *a, **k: self)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank())
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size())
    total = 2 * ranks * 3
    rope = torch.randn(total, 1, 1, 4)
    for rank in range(ranks):
        group = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        batch = {"tokens": torch.arange(total).expand(2, total), "cu_seqlens": None}
        sliced = utils.get_batch_on_this_cp_rank(batch, False, cp_group=group)["tokens"]
        assert sliced[1].tolist() == zigzag_tokens(rank, ranks, total).tolist()
        rotary = rope_utils.get_pos_emb_on_this_cp_rank(rope, 0, group)
        assert torch.equal(rotary, ZigzagGrid(1, ranks).split(rope, rank))
