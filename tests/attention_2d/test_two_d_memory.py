"""What 2D attention holds and keeps: flat in the ring, bounded by the formulas."""

import pytest
import torch
import torch._dynamo  # the first dispatch mode imports it: here, once for all forked ranks
import torch.distributed as dist
from grids import grid_groups

from megatron_longseq.attention_2d import TwoDAttention
from megatron_longseq.measurement import LiveBytes, saved_for_backward

ROWS, BATCH, HEADS, GROUPS, WIDTH = 96, 2, 8, 4, 16
BYTES = {torch.float32: 4, torch.bfloat16: 2}


def peaks(hp, ring, dtype):
    """Peak live bytes beyond inputs and outputs, forward and backward, and bytes saved."""
    operator = TwoDAttention(*grid_groups(hp, ring), timeout_seconds=30)
    leaves = [
        torch.randn(ROWS, BATCH, heads, WIDTH, dtype=dtype, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    gradient = torch.randn(ROWS, BATCH, HEADS, WIDTH, dtype=dtype)
    with LiveBytes().include(leaves, gradient) as live:
        given = live.current()
        with saved_for_backward() as saved:
            out = operator(*leaves)
        forward = live.peak() - given - out.nbytes
        live.reset_peak()
        out.backward(gradient)
        gradients = sum(leaf.grad.nbytes for leaf in leaves)
        backward = live.peak() - given - out.nbytes - gradients
    return forward, backward, saved.bytes, operator.buffers.held_bytes


def worst(ranks, hp, ring, dtype=torch.float32):
    results = ranks.run(peaks, world_size=hp * ring, args=(hp, ring, dtype), backend="gloo")
    return [max(column) for column in zip(*results, strict=True)]


def block_bytes(hp, dtype):
    """(Q or O, K and V, a log-sum-exp) of one ring block on one rank."""
    rows, size = hp * ROWS * BATCH, BYTES[dtype]
    query = rows * HEADS // hp * WIDTH * size
    return query, 2 * rows * GROUPS // hp * WIDTH * size, rows * HEADS // hp * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hp", [1, 2])
def test_peak_memory_is_flat_in_the_ring(ranks, dtype, hp):
    # TransformerEngine's p2p keeps every received block and every partial output instead.
    small, large = (worst(ranks, hp, ring, dtype) for ring in (2, 8 // hp))
    assert large[0] <= 1.05 * small[0], (small, large)
    assert large[1] <= 1.05 * small[1], (small, large)
    assert large[2:] == small[2:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_of_a_ring_is_within_its_formula(ranks, dtype):
    query, blocks, lse = block_bytes(1, dtype)
    wide = 4 // BYTES[dtype]
    forward, backward, _, held = worst(ranks, 1, 4, dtype)
    # Two blocks; one block's output, and in 16 bits the fp32 sum and the block widened to it.
    assert forward <= 2 * blocks + query * (1 if wide == 1 else 1 + 2 * wide) + 8 * lse
    # Two blocks, two sums in fp32, one block's terms; in 16 bits also dQ in fp32.
    terms = query + blocks + (wide * query if wide > 1 else 0)
    assert backward <= 2 * blocks + 2 * wide * blocks + terms + 8 * lse
    assert held == 2 * blocks + 2 * wide * blocks


def test_what_is_kept_for_backward_is_q_k_v_out_and_the_log_sum_exp(ranks):
    for hp, ring in ((1, 2), (2, 1), (2, 2)):
        query, blocks, lse = block_bytes(hp, torch.float32)
        assert worst(ranks, hp, ring)[2] == 2 * query + blocks + lse


def steps_held(steps):
    operator = TwoDAttention(*grid_groups(2, 2), timeout_seconds=30)
    held = []
    with LiveBytes() as live:
        for _ in range(steps):
            leaves = [torch.randn(8, 1, 4, 8, requires_grad=True) for _ in range(3)]
            operator(*leaves).sum().backward()
            del leaves
            held.append(live.current())
    return held, dist.get_rank()


def test_nothing_grows_from_step_to_step(ranks):
    for held, _ in ranks.run(steps_held, world_size=4, args=(20,), backend="gloo"):
        assert len(set(held[1:])) == 1
