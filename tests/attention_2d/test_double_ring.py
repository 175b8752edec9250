"""Double-Ring-Attention: exact, as many bytes as one ring, and where it is used."""

import pytest
import torch
import torch._dynamo  # the first dispatch mode imports it: here, once for all forked ranks
import torch.distributed as dist
from grids import dense_with_gradients, grid_groups, random_sequence, relative_error

from megatron_longseq import two_d_attention
from megatron_longseq.attention_2d import TwoDAttention
from megatron_longseq.attention_2d.windows import choose_windows
from megatron_longseq.communication import DoubleRing
from megatron_longseq.communication.schedule import interleaved
from megatron_longseq.communication.transport import RING_BLOCKS, RING_GRADIENTS
from megatron_longseq.errors import UserError
from megatron_longseq.measurement import TrafficCounter
from megatron_longseq.token_layout import ZigzagGrid

STREAMS = {stream.tag: stream.name for stream in (RING_BLOCKS, RING_GRADIENTS)}


def lane_groups(schedule, ring_ranks):
    """Groups of this rank's lanes; made by every rank for all of its world's rings."""
    mine = {}
    for lane, kinds in zip(("inner", "outer"), schedule.groups(len(ring_ranks[0])), strict=True):
        for ranks in ring_ranks:
            for places in kinds:
                members = [ranks[place] for place in places]
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    mine[lane] = group
    return mine


def parity(cases):
    """Largest relative error of this rank per case, and what it has sent round the ring."""
    found = {}
    for hp, ring, window, causal, moves in cases:
        grid = ZigzagGrid(hp, ring)
        head_group, ring_group = grid_groups(hp, ring)
        order = interleaved(ring, ring // 2, window)
        schedule = DoubleRing(window, order)
        rings = [[grid.rank(c, h) for c in range(ring)] for h in range(hp)]
        operator = TwoDAttention(
            head_group,
            ring_group,
            schedule=schedule,
            lane_groups=lane_groups(schedule, rings),
            backward_ring=moves,
            timeout_seconds=30,
        )
        data = random_sequence(2 * grid.ranks * 3, 2, 24, 8, 8, 6)
        results = []
        for _ in range(2):
            *inputs, out_gradient = (grid.split(tensor, dist.get_rank()) for tensor in data)
            leaves = [tensor.clone().requires_grad_() for tensor in inputs]
            with TrafficCounter(STREAMS) as counter:
                out = operator(*leaves, causal=causal)
                out.backward(out_gradient)
            results.append([out.detach(), *(leaf.grad for leaf in leaves)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), "other bits"
        assert operator.buffers.leased_bytes == 0
        expected = dense_with_gradients(*data, causal)
        worst = max(
            relative_error(ours, grid.split(whole, dist.get_rank()))
            for ours, whole in zip(results[0], expected, strict=True)
        )
        messages = [
            counter.traffic.total(stream=name, operation="send").messages
            for name in STREAMS.values()
        ]
        found[hp, ring, window, causal, moves] = worst, *messages
    return found


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (4, [(2, True), (2, False), (1, True), (4, True)]),
        (6, [(3, True), (2, True)]),
        (8, [(4, True), (2, True)]),
    ],
)
def test_every_window_equals_dense_attention_and_sends_no_more(ranks, size, cases):
    cases = [(1, size, *case, moves) for case in cases for moves in ("keys", "queries")]
    cases += [(2, 4, 2, True, "keys")] if size == 8 else []
    for found in ranks.run(parity, world_size=size, args=(cases,), backend="gloo"):
        for (_, ring, _, _, moves), (worst, blocks, gradients) in found.items():
            assert worst < 1e-12
            # K and V forward; backward they and dK and dV, or Q, dO, two numbers a row, and dQ.
            back, home = (2, 2) if moves == "keys" else (4, 1)
            assert (blocks, gradients) == ((2 + back) * (ring - 1), home * ring)


def refused_window():
    data = torch.randn(8, 1, 2, 4)
    try:
        two_d_attention(
            data, data, data, head_group=None, ring_group=dist.group.WORLD, window_size=3
        )
    except UserError as error:
        return str(error)
    return None


def test_a_window_that_does_not_divide_the_ring_is_refused(ranks):
    for text in ranks.run(refused_window, world_size=2, backend="gloo"):
        assert text == "window_size=3: must divide the ring's size 2; nearest: [1, 2]"


def windows(**changes):
    usual = {
        "ring": 16,
        "head_parallel": 2,
        "tensor_parallel": 1,
        "ranks_per_node": 8,
        "context_first": False,
    }
    return choose_windows(**(usual | changes))


def test_the_window_is_the_rings_members_on_a_node():
    chosen = windows()
    assert chosen.schedule == DoubleRing(4)
    assert "members on a node" in chosen.reason
    assert windows(tensor_parallel=2).schedule == DoubleRing(2)
    assert windows(context_first=True).schedule == DoubleRing(8)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head_parallel": 8}, "the head group fills the node"),
        ({"head_parallel": 1, "tensor_parallel": 8}, "neighbours in the ring are on other nodes"),
        ({"ring": 4}, "a node holds the whole ring"),
        ({"ring": 6}, "4 members on a node do not divide a ring of 6"),
        ({"ring": 1}, "no ring"),
        ({"window": 1}, "as given"),
        ({"window": 16}, "as given"),
    ],
)
def test_a_single_ring_says_why(changes, why):
    chosen = windows(**changes)
    assert chosen.schedule is None and why in chosen.reason


def test_windows_are_interleaved_where_ranks_share_network_cards():
    chosen = windows(window=2, cards_per_node=4)
    assert chosen.schedule is not None
    assert chosen.schedule.order is not None and chosen.schedule.order[:4] == (0, 2, 1, 3)
    assert "interleaved for 4 network cards" in chosen.reason
    assert windows(cards_per_node=4).schedule == DoubleRing(4), "a window fills the node"
    assert windows(window=2, cards_per_node=8).schedule == DoubleRing(2)


def test_a_given_window_that_does_not_divide_the_ring_names_those_that_do():
    with pytest.raises(UserError, match=r"--longseq-ring-window-size 3: must divide .* 1, 2, 4, 8"):
        windows(window=3)
