"""What 2D attention sends equals its formulas, byte for byte and message for message."""

import time

import pytest
import torch
import torch._dynamo  # the first dispatch mode imports it: here, once for all forked ranks
import torch.distributed as dist
from grids import FACTORISATIONS, grid_groups

from megatron_longseq.attention_2d import TwoDAttention, attention_traffic
from megatron_longseq.communication.transport import HEAD_EXCHANGE, RING_BLOCKS, RING_GRADIENTS
from megatron_longseq.measurement import MeasuredTransport, TrafficCounter

STREAMS = {stream.tag: stream.name for stream in (HEAD_EXCHANGE, RING_BLOCKS, RING_GRADIENTS)}


def counted(hp, ring, heads, groups, moves, width, value_width, dtype):
    """((counted, formula) of each stream) for forward and backward."""
    operator = TwoDAttention(*grid_groups(hp, ring), timeout_seconds=30, backward_ring=moves)
    rows, batch = 6, 2
    leaves = [
        torch.randn(rows, batch, *shape, dtype=dtype, requires_grad=True)
        for shape in ((heads, width), (groups, width), (groups, value_width))
    ]
    pairs = []
    with TrafficCounter(STREAMS) as counter:
        out = operator(*leaves)
        for backward in (False, True):
            if backward:
                counter.reset()
                out.backward(torch.ones_like(out))
            formula = attention_traffic(
                tokens=rows,
                batch=batch,
                query_heads=heads,
                key_heads=groups,
                width=width,
                value_width=value_width,
                head_parallel=hp,
                ring=ring,
                element_bytes=dtype.itemsize,
                gradient_bytes=8 if dtype == torch.float64 else 4,
                backward=backward,
                moves=moves,
                place=operator.heads.place.position,
            )
            for stream, expected in (
                (HEAD_EXCHANGE, formula.head_exchange),
                (RING_BLOCKS, formula.ring_blocks),
                (RING_GRADIENTS, formula.ring_gradients),
            ):
                sent = counter.traffic.total(stream=stream.name, operation="send")
                pairs.append(
                    ((sent.messages, sent.bytes_sent), (expected.messages, expected.bytes))
                )
    return pairs


def counted_cases(cases):
    return {case: counted(*case, 8, 4, torch.bfloat16) for case in cases}


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_bytes_and_messages_equal_the_formulas(ranks, size):
    head_counts = [(12, 12), (12, 4), (12, 1)]
    cases = [(*grid, *heads, "auto") for grid in FACTORISATIONS[size] for heads in head_counts]
    # 20 heads divide no group of 3 or 6; of 10 key/value heads, some are on two ranks.
    cases += [(*grid, 20, 10, way) for grid in FACTORISATIONS[size] for way in ("keys", "queries")]
    for results in ranks.run(counted_cases, world_size=size, args=(cases,), backend="gloo"):
        for case, pairs in results.items():
            for sent, expected in pairs:
                assert sent == expected, case


def test_a_key_head_is_on_as_many_ranks_as_need_it_not_repeated_for_each_query_head():
    # MindSpeed repeats key/value heads to all query heads: 64 / 8 = 8 times the bytes.
    sizes = dict(tokens=2, batch=1, query_heads=64, width=1, value_width=1, ring=2)
    sizes |= dict(element_bytes=1, gradient_bytes=1, backward=False)
    for groups, hp, on_a_rank in ((8, 4, 2), (8, 8, 1), (8, 16, 1), (4, 8, 1)):
        traffic = attention_traffic(key_heads=groups, head_parallel=hp, **sizes)
        assert traffic.ring_blocks.bytes == 2 * 2 * hp * on_a_rank


def test_what_goes_round_backward_is_the_smaller_side():
    sizes = dict(tokens=2, batch=1, query_heads=64, width=64, value_width=64, head_parallel=1)
    sizes |= dict(ring=8, element_bytes=2, gradient_bytes=4, backward=True)

    def bytes_of(key_heads, moves):
        traffic = attention_traffic(key_heads=key_heads, moves=moves, **sizes)
        return traffic.ring_blocks.bytes + traffic.ring_gradients.bytes

    for key_heads in (64, 32, 8, 1):
        least = min(bytes_of(key_heads, "keys"), bytes_of(key_heads, "queries"))
        assert bytes_of(key_heads, "auto") == least
    assert bytes_of(64, "auto") == pytest.approx(2 / 3 * bytes_of(64, "keys"), rel=0.03)
    assert bytes_of(8, "auto") == bytes_of(8, "keys")


def waits_over_slow_links(latency, compute):
    """Seconds spent waiting for blocks in one forward with ``compute`` seconds per kernel call."""
    from megatron_longseq.softmax import AtenKernel

    transport = MeasuredTransport(streams=STREAMS, latency_seconds=latency)
    group = dist.new_group(list(range(dist.get_world_size())), backend=transport.register())
    operator = TwoDAttention(None, group, timeout_seconds=30, check_agreement=False)

    class Slow(AtenKernel):
        def forward(self, *args, **kwargs):
            time.sleep(compute)
            return super().forward(*args, **kwargs)

    operator._prepare = lambda *_: Slow()
    x = torch.randn(6, 1, 2, 8)
    operator(x, x, x)
    dist.barrier()
    before = transport.traffic.total(stream=RING_BLOCKS.name).wait_seconds
    operator(x, x, x)
    return transport.traffic.total(stream=RING_BLOCKS.name).wait_seconds - before


def test_hops_hide_behind_the_kernels(ranks):
    # Two hops of 0.2 s; posted after the kernels they would be waited for in full, 0.4 s.
    waits = ranks.run(waits_over_slow_links, world_size=3, args=(0.2, 0.4), backend="gloo")
    assert max(waits) < 0.2
