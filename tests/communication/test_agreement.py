"""All ranks find a difference together and say the same."""

import pytest
import torch.distributed as dist
from grids import grid_groups, refused

from megatron_longseq.communication import GridAgreement, GroupPlace


def compare(head_parallel, ring, odd_rank):
    groups = grid_groups(head_parallel, ring)
    agreement = GridAgreement(*map(GroupPlace.of, groups), timeout_seconds=10)
    agreement.verify_grid()
    agreement.verify({"tokens": 96, "kernel": "aten"})
    tokens = 100 if dist.get_rank() == odd_rank else 96
    return refused(agreement.verify, {"tokens": tokens, "kernel": "aten"})


@pytest.mark.parametrize("grid", [(1, 3), (3, 1), (2, 2), (3, 2)])
def test_a_rank_that_differs_is_named_in_the_same_words_everywhere(ranks, grid):
    size = grid[0] * grid[1]
    for odd in (0, size - 1):
        texts = ranks.run(compare, world_size=size, args=(*grid, odd), backend="gloo")
        assert len(set(texts)) == 1 and texts[0].startswith("UserError: ")
        assert f"100 on rank {odd}" in texts[0] and "96 on rank" in texts[0]
        assert "kernel" not in texts[0]


def wrong_grid(head_lists, ring_lists):
    rank, mine = dist.get_rank(), []
    for lists in (head_lists, ring_lists):
        groups = [(members, dist.new_group(members)) for members in lists]
        mine.append(GroupPlace.of(next(group for members, group in groups if rank in members)))
    return refused(GridAgreement(*mine, timeout_seconds=10).verify_grid)


@pytest.mark.parametrize(
    "head_lists, ring_lists",
    [
        pytest.param([[0, 1], [2, 3]], [[0, 1], [2, 3]], id="the same group twice"),
        pytest.param([[0, 1], [2, 3]], [[0, 3], [1, 2]], id="columns cross"),
        pytest.param([[0, 1, 2], [3]], [[0, 3], [1], [2]], id="head groups of unequal size"),
        pytest.param([[0, 1], [2], [3]], [[0, 2, 3], [1]], id="rings of unequal size"),
        pytest.param([[0, 1, 2, 3]], [[0, 1, 2, 3]], id="everything twice"),
        pytest.param(
            [[0, 1], [2, 3], [4, 5], [6, 7]],
            [[0, 2], [1, 7], [4, 6], [3, 5]],
            id="two grids with rings swapped",
        ),
    ],
)
def test_groups_that_are_no_grid_are_refused_on_every_rank(ranks, head_lists, ring_lists):
    size = sum(map(len, head_lists))
    texts = ranks.run(wrong_grid, world_size=size, args=(head_lists, ring_lists), backend="gloo")
    for rank, text in enumerate(texts):
        assert text and "UserError: the process groups do not form a grid" in text, (rank, texts)


def outsider():
    group = dist.new_group([0])
    return refused(GroupPlace.of, group)


def test_a_group_that_does_not_contain_the_rank_is_refused(ranks):
    inside, outside = ranks.run(outsider, world_size=2, backend="gloo")
    assert inside is None
    assert "rank 1 was given a process group it is not a member of" in outside
