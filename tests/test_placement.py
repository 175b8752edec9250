"""Placement: which rank a process takes, and whether close groups lie close."""

import pytest

from megatron_longseq.errors import UserError
from megatron_longseq.placement import (
    PHYSICAL_RANK,
    Grid,
    check_nodes,
    permute_rank,
    placement_lines,
)


def physical_groups(grid, count):
    """Physical ranks of head groups and rings, context-first, of tensor-parallel rank 0."""
    physical = {grid.logical(place): place for place in range(count)}
    tensor = grid.tensor
    heads = [
        [physical[(c * grid.head + h) * tensor] for h in range(grid.head)] for c in range(grid.ring)
    ]
    rings = [
        [physical[(c * grid.head + h) * tensor] for c in range(grid.ring)] for h in range(grid.head)
    ]
    return heads, rings


def test_context_first_lays_rings_on_neighbouring_ranks():
    heads, rings = physical_groups(Grid(1, 2, 4), 8)
    assert heads == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert rings == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # In blocks of the tensor-parallel size, and in each block of context-parallel ranks.
    heads, rings = physical_groups(Grid(2, 2, 2), 8)
    assert heads == [[0, 4], [2, 6]] and rings == [[0, 2], [4, 6]]
    grid = Grid(1, 2, 2)
    assert [grid.logical(rank) for rank in range(8)] == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_rank_is_permuted_once(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv(PHYSICAL_RANK, raising=False)
    import os

    permute_rank("head-first", Grid(1, 2, 2))
    assert os.environ["RANK"] == "1" and PHYSICAL_RANK not in os.environ
    monkeypatch.setenv(PHYSICAL_RANK, "")
    monkeypatch.delenv(PHYSICAL_RANK)
    for _ in range(2):
        permute_rank("context-first", Grid(1, 2, 2))
        assert (os.environ["RANK"], os.environ[PHYSICAL_RANK]) == ("2", "1:2")
    monkeypatch.setenv("RANK", "1")  # a process that inherited the variable, and has another rank
    permute_rank("context-first", Grid(1, 2, 2))
    assert os.environ["RANK"] == "2"
    monkeypatch.delenv(PHYSICAL_RANK)


def test_ranks_that_are_not_numbered_node_by_node_stop_the_run():
    in_blocks = ["a"] * 4 + ["b"] * 4
    cyclic = ["a", "b"] * 4
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    check_nodes(in_blocks, pairs, "head-first")
    check_nodes(in_blocks, [list(range(8))], "context-first")  # no node holds so many
    with pytest.raises(UserError) as error:
        check_nodes(cyclic, pairs, "head-first")
    assert "head group of ranks 0 1 lies on 2 nodes (a, b) and fits on 1" in str(error.value)
    assert "--distribution=block" in str(error.value)
    with pytest.raises(UserError, match="the ring of ranks"):
        check_nodes(cyclic, [[0, 1, 2, 3], [4, 5, 6, 7]], "context-first")


def test_the_table_says_who_sits_where():
    lines = placement_lines(
        ["0"] * 4 + ["1"] * 4,
        [(0, 1), (2, 3), (4, 5), (6, 7)],
        [(0, 2, 4, 6), (1, 3, 5, 7)],
        [(0, 1), (2, 3)],
        shown=2,
    )
    assert lines == [
        "head group 0: 0 on 0, 1 on 0",
        "head group 1: 2 on 0, 3 on 0",
        "and 2 more head groups",
        "ring 0: 0 on 0, 2 on 0, 4 on 1, 6 on 1; windows [0 2] [4 6]",
        "ring 1: 1 on 0, 3 on 0, 5 on 1, 7 on 1; windows [1 3] [5 7]",
    ]
