"""O = f(A B) C over a ring equals one process, every gradient on every rank; and what it costs."""

import itertools
import random
import time

import pytest
import torch
import torch.distributed as dist
from grids import refused
from metp_reference import (
    EXACT,
    Chain,
    LargestCreated,
    geglu,
    gelu,
    hold_up_messages,
    leaves,
    log_exchanges,
    normal,
    squared_relu,
    swiglu,
    worst_error,
)

import megatron_longseq
from megatron_longseq.communication import BufferPool
from megatron_longseq.communication.transport import RING_BLOCKS, RING_GRADIENTS
from megatron_longseq.measurement import TrafficCounter, saved_for_backward
from megatron_longseq.metp.matmul_chain import RingMatmulChain
from megatron_longseq.metp.traffic import matmul_chain_traffic

STREAMS = {stream.tag: stream.name for stream in (RING_BLOCKS, RING_GRADIENTS)}
SIZES = [1, 2, 3, 4, 8]


def own_chain(**options):
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    return RingMatmulChain(group, timeout_seconds=20, **options)


def parity(size):
    """Largest relative error by case; each case twice over the same buffers, to the same bit."""
    chain, worst = own_chain(), {}
    rows = [2 + 3 * rank % 5 for rank in range(size)]
    for (f, bias), tiles in zip(
        itertools.product((gelu, squared_relu, swiglu, geglu), (True, False)),
        (1, 3, 2, 100, 1, 2, 3, 1),
        strict=True,
    ):
        case = Chain.random(f, rows=rows, bias=bias, out=7)
        first, again = (case.run(chain, tiles=tiles) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True) if a is not None)
        worst[f.__name__, bias, tiles] = worst_error(first, case.expected())
        assert chain.buffers.leased_bytes == 0
    nobody = Chain.random(swiglu, rows=[0, *rows[1:]] if size > 1 else [3])
    worst["a rank without rows"] = worst_error(nobody.run(chain, tiles=2), nobody.expected())
    worst |= frozen(chain, Chain.random(gelu, rows=rows))
    return worst


def frozen(chain, case):
    """Every choice of leaves that need a gradient."""
    expected, worst = case.expected(), {}
    for choice in itertools.product((True, False), repeat=4):
        leaves = case.shards()
        for leaf, trains in zip(leaves, choice, strict=True):
            leaf.requires_grad_(trains)
        x, w1, bias, w2 = leaves
        y = chain(x, w1, w2, f=case.f, bias=bias)
        if any(choice):
            y.backward(case.mine(case.dy))
        gradients = [
            want if trains else None for want, trains in zip(expected[1:], choice, strict=True)
        ]
        found = [y.detach(), *(leaf.grad for leaf in leaves)]
        worst["trained", *choice] = worst_error(found, [expected[0], *gradients])
    return worst


@pytest.mark.parametrize("size", SIZES)
def test_output_and_every_gradient_equal_one_process(ranks, size):
    results = ranks.run(parity, world_size=size, args=(size,), backend="gloo")
    assert len(results[0]) == 8 + 1 + 16
    for rank, worst in enumerate(results):
        for case, error in worst.items():
            assert error < EXACT, (rank, case, error)


def public_function():
    case = Chain.random(geglu, rows=[3, 2, 4], out=5)
    x, w1, bias, w2 = case.shards()
    b, c = (torch.nn.Parameter(w.detach().t().contiguous()) for w in (w1, w2))
    pool, group = BufferPool(), dist.group.WORLD
    y = megatron_longseq.ring_matmul_chain(
        x, b, c, group=group, f=geglu, bias=bias, tiles=2, buffers=pool
    )
    y.backward(case.mine(case.dy))
    found = [y.detach(), x.grad, b.grad.t(), bias.grad, c.grad.t()]
    alone = Chain.random(gelu, rows=[5])
    x, w1, bias, w2 = alone.shards()
    y = megatron_longseq.ring_matmul_chain(x, w1.t(), w2.t(), group=None, f=gelu, bias=bias)
    return (
        worst_error(found, case.expected()),
        worst_error([y], [alone.f(alone.x @ alone.w1.t() + alone.bias) @ alone.w2.t()]),
        pool.leased_bytes,
    )


def test_the_public_function_takes_columns_of_b_and_rows_of_c(ranks):
    for error, alone, leased in ranks.run(public_function, world_size=3, backend="gloo"):
        assert error < EXACT and alone < EXACT and leased == 0


def rounding(dtype):
    """Relative error of y, dx, dw1, dbias, dw2 in ``dtype``, of one problem on any ranks."""
    size = dist.get_world_size()
    case = Chain.random(
        gelu, rows=[64 // size] * size, hidden=32, out=32, ffn_per_rank=128 // size
    ).rounded(dtype)
    found = case.run(own_chain(), dtype=dtype)
    assert all(tensor.dtype == dtype for tensor in found)
    norms = [
        ((ours.double() - whole).norm() ** 2, whole.norm() ** 2)
        for ours, whole in zip(found, case.expected(), strict=True)
    ]
    sums = torch.tensor(norms, dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums[:, 0] / sums[:, 1]).sqrt().tolist()


def test_errors_of_fp32_and_bf16_do_not_grow_with_the_ring(ranks):
    two, eight = (
        {
            dtype: ranks.run(rounding, world_size=size, args=(dtype,), backend="gloo")[0]
            for dtype in (torch.float32, torch.bfloat16)
        }
        for size in (2, 8)
    )
    assert max(two[torch.float32] + eight[torch.float32]) < 1e-5
    assert max(two[torch.bfloat16] + eight[torch.bfloat16]) < 1e-2
    for few, many in zip(two[torch.bfloat16], eight[torch.bfloat16], strict=True):
        assert many <= 1.5 * few, (two, eight)


def main_gradients():
    """Two micro-batches into main_grad, with DDP's marks and without."""
    case, chain, kept = Chain.random(swiglu, rows=[3, 4]), own_chain(), []
    _, _, d1, db, d2 = case.expected()
    for marks in ({}, {"grad_added_to_main_grad": False}, {"zero_out_wgrad": True}):
        x, w1, bias, w2 = case.shards()
        for weight in (w1, w2):
            weight.main_grad = torch.zeros_like(weight)
            if marks:
                weight.grad_added_to_main_grad = False
            weight.zero_out_wgrad = marks.get("zero_out_wgrad", False)
        for _ in range(2):
            chain(x, w1, w2, f=swiglu, bias=bias, fused_gradients=True).backward(case.mine(case.dy))
        assert (
            worst_error([w1.main_grad, w2.main_grad, bias.grad], [2 * d1, 2 * d2, 2 * db]) < EXACT
        )
        assert [getattr(w, "grad_added_to_main_grad", None) for w in (w1, w2)] == [
            True if marks else None
        ] * 2
        kept.append([None if w.grad is None else w.grad.shape == w.shape for w in (w1, w2)])
    assert not w1.grad.any() and not w2.grad.any(), "zero_out_wgrad asks for zeros"
    x, w1, bias, w2 = case.shards()
    chain(x, w1, w2, f=swiglu, bias=bias, fused_gradients=True).backward(case.mine(case.dy))
    assert worst_error([w1.grad, w2.grad], [d1, d2]) < EXACT, "no main_grad: an ordinary gradient"
    return kept


def test_fused_gradients_add_to_main_grad_and_leave_a_stand_in_for_ddp(ranks):
    for kept in ranks.run(main_gradients, world_size=2, backend="gloo"):
        assert kept == [[None, None], [True, True], [True, True]]


def costs():
    """At p = 8: what is saved, the largest tensor created, what is sent; parameters as before."""
    size, hidden, ffn, rows = 8, 32, 128, 24
    results, y = [], None
    for f, bias, dtype in ((gelu, True, torch.bfloat16), (swiglu, False, torch.float64)):
        case = Chain.random(
            f, rows=[rows] * size, hidden=hidden, out=hidden, ffn_per_rank=ffn // size, bias=bias
        )
        x, w1, b1, w2 = case.shards(dtype)
        before = [t.clone() for t in (w1, w2)]
        x, dy = x.detach().requires_grad_(), case.mine(case.dy).to(dtype).clone()
        # 16 bits on the way home where everything is 16 bits.
        chain = own_chain(gradient_dtype=dtype)
        sent = []
        with LargestCreated() as largest:
            for backward in (False, True):
                with TrafficCounter(STREAMS) as counter:
                    if backward:
                        y.backward(dy)
                    else:
                        with saved_for_backward() as saved:
                            y = chain(x, w1, w2, f=f, bias=b1, tiles=2)
                formula = matmul_chain_traffic(
                    ranks=size,
                    hidden=hidden,
                    ffn=ffn,
                    gated=f is swiglu,
                    bias=bias,
                    element_bytes=dtype.itemsize,
                    gradient_bytes=dtype.itemsize,
                    backward=backward,
                )
                for stream, expected in (
                    (RING_BLOCKS, formula.weight_ring),
                    (RING_GRADIENTS, formula.weight_gradients),
                ):
                    total = counter.traffic.total(stream=stream.name, operation="send")
                    sent.append((total.messages, total.bytes_sent))
                    sent.append((expected.messages, expected.bytes))
        assert torch.equal(w1, before[0]) and torch.equal(w2, before[1])
        whole = rows * size * 2 * hidden * dtype.itemsize
        results.append((saved.bytes, x.nbytes, largest.bytes / whole, largest.origin, sent))
    return results


def test_eight_ranks_save_the_input_alone_and_hold_nothing_of_the_whole_sequence(ranks):
    for results in ranks.run(costs, world_size=8, backend="gloo"):
        for saved, x, share, origin, sent in results:
            assert saved == x
            assert share < 1, origin
            assert sent[0::2] == sent[1::2]
    tensors = 3  # w1, bias, w2
    assert [messages for messages, _ in results[0][4][0::2]] == [
        7 * tensors,
        0,
        7 * tensors,
        8 * tensors,
    ]


def many_calls():
    """100 calls of two lengths, two in flight at a time, over one pool."""
    chain = own_chain()
    cases = [
        Chain.random(swiglu, rows=[5, 5], seed=1),
        Chain.random(gelu, rows=[2, 3], bias=False, seed=2),
    ]
    expected, held, worst = [case.expected() for case in cases], [], 0.0
    for call in range(50):
        pending = []
        for case in cases:
            leaves = case.shards()
            x, w1, bias, w2 = leaves
            pending.append((chain(x, w1, w2, f=case.f, bias=bias), leaves))
        for case, want, (y, leaves) in list(zip(cases, expected, pending, strict=True)):
            y.backward(case.mine(case.dy))
            if call in (0, 49):
                grads = [None if leaf is None else leaf.grad for leaf in leaves]
                worst = max(worst, worst_error([y, *grads], want))
        held.append((chain.buffers.held_bytes, chain.buffers.leased_bytes))
    return worst, held


def test_calls_in_flight_and_alternating_lengths_keep_memory_flat(ranks):
    for worst, held in ranks.run(many_calls, world_size=2, backend="gloo"):
        assert worst < EXACT
        assert len(set(held[1:])) == 1 and held[-1][1] == 0


def order_and_delays():
    """(events of a forward and backward, results undisturbed and with random delays)."""
    log, sleepy, case = [], [None], Chain.random(gelu, rows=[3, 4, 2, 3])

    def noted(z):
        log.append("compute")
        if sleepy[0] is not None:
            time.sleep(sleepy[0].random() * 0.01)
        return gelu(z)

    log_exchanges(log)
    hold_up_messages(sleepy)
    case.f, chain = noted, own_chain()
    runs = [case.run(chain)]
    events = list(log)
    for seed in (1, 2):
        sleepy[0] = random.Random(100 * seed + dist.get_rank())
        runs.append(case.run(chain))
    return events, all(
        torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True)
    )


def test_each_shard_leaves_before_it_is_computed_with_and_delays_change_no_bit(ranks):
    forward = []
    for step in (1, 2, 3):
        forward += [("ring blocks", f"step {step} of 4"), "compute"]
    forward.append("compute")
    backward = []
    for step in (1, 2, 3, 4):
        if step > 1:
            backward.append(("ring gradients", f"step {step - 1} of 4"))
        if step < 4:
            backward.append(("ring blocks", f"step {step} of 4"))
        backward.append("compute")
    backward.append(("ring gradients", "step 4 of 4"))
    for events, same in ranks.run(order_and_delays, world_size=4, backend="gloo"):
        assert events == forward + backward
        assert same


def bad_inputs():
    """The error of each bad call, and how long all of them took."""
    rank, group = dist.get_rank(), dist.group.WORLD
    a, b, c = normal(3, 4), normal(4, 6), normal(6, 5)

    def call(a=a, b=b, c=c, f=gelu, **options):
        return refused(
            megatron_longseq.ring_matmul_chain,
            a,
            b,
            c,
            group=group,
            f=f,
            timeout_seconds=20,
            **options,
        )

    def odd_one(value, other):
        return value if rank == 1 else other

    def chunked(z):
        gate, value = z.chunk(2, -1)
        return gate * value

    started = time.monotonic()
    errors = {
        "columns of a": call(a=normal(3, 5)),
        "columns of a, one rank": call(a=odd_one(normal(3, 5), a)),
        "dtype": call(c=c.float()),
        "dtype, one rank": call(c=odd_one(c.float(), c)),
        "integers": call(a=a.long(), b=b.long(), c=c.long()),
        "b is a vector": call(b=b[:, 0]),
        "f and c": call(f=chunked),
        "width, one rank": call(b=odd_one(normal(4, 7), b), c=odd_one(normal(7, 5), c)),
        "output, one rank": call(c=odd_one(normal(6, 4), c)),
        "bias": call(bias=normal(7)),
        "bias, one rank": call(bias=odd_one(normal(6), None)),
        "f fails": call(f=lambda z: z @ z),
        "f fails, one rank": call(f=odd_one(lambda z: z @ z, gelu)),
        "f fails for the shape of one rank": call(
            b=odd_one(normal(4, 7), b), c=odd_one(normal(3, 5), normal(3, 5)), f=chunked
        ),
        "f returns no tensor": call(f=lambda z: None),
        "f has parameters": call(f=torch.nn.PReLU(dtype=a.dtype)),
        "f draws random numbers": call(f=torch.nn.Dropout(0.5)),
        "f changes its input": call(f=torch.nn.ReLU(inplace=True)),
        "a needs a gradient on one rank": call(a=odd_one(torch.nn.Parameter(a), a)),
        "tiles": call(tiles=0),
        "tiles, one rank": call(tiles=odd_one(0, 1)),
        "trained on one rank": call(b=odd_one(torch.nn.Parameter(b), b)),
    }
    fine = call()
    return errors, fine, time.monotonic() - started


def test_bad_inputs_raise_the_same_clear_error_on_every_rank(ranks):
    results = ranks.run(bad_inputs, world_size=2, backend="gloo")
    errors, fine, seconds = results[0]
    assert fine is None and seconds < 10
    assert results[1][0] == errors
    for case, error in errors.items():
        assert error is not None and error.startswith("UserError"), (case, error)
    for case, words in {
        "columns of a": "a has 5 columns and b 4 rows; they must be equal",
        "columns of a, one rank": "a has 5 columns and b 4 rows",
        "dtype": "a, b, c and bias must have one dtype and device",
        "integers": "must be floating point, not torch.int64",
        "b is a vector": "must be matrices; their shapes are (4,) and (6, 5)",
        "f and c": "f maps [1, 6] to [1, 3]; it must be [1, 6], since c has 6 rows",
        "width, one rank": "(4, 7)",
        "output, one rank": "torch.float64) on rank 0, ((6, 4), torch.float64) on rank 1",
        "bias": "bias has shape (7,); b has 6 columns",
        "bias, one rank": "bias: None on rank 0",
        "f fails": "f cannot be applied to [1, 6]",
        "f fails, one rank": "f cannot be applied to [1, 6]",
        "f returns no tensor": "f must return a tensor",
        "f has parameters": "f has parameters that need gradients",
        "f draws random numbers": "f gives two results for one input",
        "f changes its input": "f cannot be applied to [1, 6]: RuntimeError",
        "a needs a gradient on one rank": "some of a, b, c and bias needs a gradient",
        "tiles": "tiles 0: must be at least 1",
        "tiles, one rank": "tiles 0: must be at least 1",
        "trained on one rank": "need gradients",
    }.items():
        assert words in errors[case], (case, errors[case])


def under_autocast():
    """Largest differences of the output and the gradients with autocast switched on in forward."""
    a, b, c = normal(3, 4).float(), normal(4, 6, seed=1).float(), normal(6, 5, seed=2).float()
    results = []
    for enabled in (False, True):
        tensors = leaves(a, b, c)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = megatron_longseq.ring_matmul_chain(
                *tensors, group=dist.group.WORLD, f=gelu, timeout_seconds=20
            )
        out.sum().backward()
        results.append([out.detach(), *(t.grad for t in tensors)])
    return all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_autocast_changes_nothing_forward_or_backward(ranks):
    assert all(ranks.run(under_autocast, world_size=2, backend="gloo"))
