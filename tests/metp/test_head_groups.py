"""Attention by head groups equals dense attention in one process; what it saves and sends."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from grids import refused
from metp_reference import (
    EXACT,
    Attention,
    LargestCreated,
    hold_up_messages,
    log_exchanges,
    worst_error,
)

from megatron_longseq.communication.transport import RING_BLOCKS, RING_GRADIENTS
from megatron_longseq.measurement import TrafficCounter, saved_for_backward
from megatron_longseq.metp.head_groups import HeadGroupAttention
from megatron_longseq.metp.traffic import head_group_traffic
from megatron_longseq.softmax import AtenKernel

STREAMS = {stream.tag: stream.name for stream in (RING_BLOCKS, RING_GRADIENTS)}


def own_operator(**options):
    """An operator whose three streams of data have process groups of their own."""
    if dist.get_world_size() == 1:
        return HeadGroupAttention(None, None, None, timeout_seconds=20, **options)
    groups = [dist.group.WORLD, dist.new_group(), dist.new_group()]
    return HeadGroupAttention(*groups, timeout_seconds=20, **options)


def layers(p):
    """Full and causal; MHA, GQA, MQA; fewer key/value heads than ranks; all that to_heads does."""
    width = 6 if p == 3 else 4
    some = [
        Attention(p, 2 * p, 2 * p, bias=True, rope_share=1.0),
        Attention(p, 2 * p, 2 * p, causal=False, norm=True, scale=0.3),
        Attention(p, 4 * p, p, rope_share=0.5, interleaved=True, kernel="reference"),
        Attention(p, 2 * p, p, per_step=p, bias=True, norm=True, rope_share=0.5, score_range=100.0),
        Attention(p, 2 * p, 1, width=width, per_step=p, bias=True, rope_share=1.0, batch=1),
        Attention(p, 2 * p, 1, width=width, per_step=p, causal=False, score_range=-100.0),
    ]
    if p in (4, 8):
        few = dict(heads=2 * p, groups=p // 2, norm=True, rope_share=1.0, interleaved=True)
        some += [
            Attention(p, per_step=2, bias=True, **few),
            Attention(p, per_step=4, causal=False, **few),
        ]
    return some


def parity(p):
    """Largest relative error by layer."""
    operator, worst = own_operator(), {}
    for index, layer in enumerate(layers(p)):
        worst[index] = worst_error(layer.run(operator), layer.expected())
        assert operator.buffers.leased_bytes == 0
    return worst


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_output_and_every_gradient_equal_dense_attention(ranks, size):
    results = ranks.run(parity, world_size=size, args=(size,), backend="gloo")
    for rank, worst in enumerate(results):
        assert len(worst) == len(layers(size))
        for layer, error in worst.items():
            assert error < EXACT, (rank, layer, error)


def frozen():
    """Largest relative error by which of x, qkv, bias, projection, norms need a gradient."""
    operator, layer, worst = own_operator(), Attention(3, 6, 3, bias=True, norm=True), {}
    names = ("x", "qkv", "bias", "projection", "norm", "norm")
    y, *gradients = layer.expected()
    for choice in ("x", "x qkv", "projection", "bias", "x norm", "norm", ""):
        leaves = layer.shards()
        for leaf, name in zip(leaves, names, strict=True):
            leaf.requires_grad_(name in choice.split())
        x, qkv, bias, projection, *norms = leaves
        out = operator(x, qkv, bias, projection, layer.options(norms))
        if choice:
            out.backward(layer.dy[layer.positions])
        if "norm" in choice:
            for norm in norms:
                dist.all_reduce(norm.grad)
        wanted = [
            whole if name in choice.split() else None
            for whole, name in zip(gradients, names, strict=True)
        ]
        worst[choice] = worst_error([out, *(leaf.grad for leaf in leaves)], [y, *wanted])
    return worst


def test_frozen_leaves_get_no_gradient_and_the_others_theirs(ranks):
    for worst in ranks.run(frozen, world_size=3, backend="gloo"):
        assert len(worst) == 7 and max(worst.values()) < EXACT, worst


def rounding(dtype):
    """Relative error of every result in ``dtype``, of one layer on any number of ranks."""
    size = dist.get_world_size()
    layer = Attention(
        size,
        8,
        8,
        bias=True,
        rope_share=1.0,
        width=8,
        hidden=32,
        tokens_per_rank=64 // size,
        dtype=dtype,
    )
    found = layer.run(own_operator())
    assert all(tensor.dtype == dtype for tensor in found)
    norms = [
        ((ours.double() - whole).norm() ** 2, whole.norm() ** 2)
        for ours, whole in zip(found, layer.expected(), strict=True)
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
    assert max(two[torch.bfloat16] + eight[torch.bfloat16]) < 2e-2
    for few, many in zip(two[torch.bfloat16], eight[torch.bfloat16], strict=True):
        assert many <= 1.5 * few, (two, eight)


class CountingKernel(AtenKernel):
    """Counts its calls, and its work in pairs of a query chunk and a key chunk."""

    def __init__(self, chunk):
        self.chunk, self.calls, self.pairs = chunk, 0, 0.0

    def _count(self, query, key, causal):
        self.calls += 1
        pairs = query.shape[0] * key.shape[0] / self.chunk**2
        self.pairs += pairs / 2 if causal else pairs

    def forward(self, query, key, value, *, causal, **options):
        self._count(query, key, causal)
        return super().forward(query, key, value, causal=causal, **options)

    def backward(self, dout, query, key, *rest, causal, **options):
        self._count(query, key, causal)
        return super().backward(dout, query, key, *rest, causal=causal, **options)


def costs():
    """At p = 8: saved bytes, the largest tensor, work and traffic; parameters stay as they were."""
    size, rows = 8, 8
    results, y = [], None
    for heads, groups, per_step, bias, dtype in (
        (16, 16, 1, True, torch.float64),
        (16, 8, 1, False, torch.bfloat16),
        (16, 2, 4, True, torch.float64),
        (16, 8, 8, True, torch.float64),
    ):
        layer = Attention(
            size,
            heads,
            groups,
            per_step=per_step,
            bias=bias,
            tokens_per_rank=rows,
            hidden=32,
            norm=True,
            rope_share=1.0,
            dtype=dtype,
        )
        # 16 bits on the way home where everything is 16 bits.
        operator, kernel = own_operator(gradient_dtype=dtype), CountingKernel(rows // 2)
        x, qkv, qkv_bias, projection, *norms = layer.shards()
        before = [t.clone() for t in (qkv, projection)]
        x, dy = x.detach().requires_grad_(), layer.dy[layer.positions].to(dtype)
        sent, work = [], []
        with LargestCreated() as largest:
            for backward in (False, True):
                with TrafficCounter(STREAMS) as counter:
                    if backward:
                        y.backward(dy)
                    else:
                        with saved_for_backward() as saved:
                            options = layer.options(norms, kernel=kernel)
                            y = operator(x, qkv, qkv_bias, projection, options)
                formula = head_group_traffic(
                    ranks=size,
                    tokens=rows,
                    batch=2,
                    hidden=32,
                    query_heads=heads,
                    key_heads=groups,
                    width=4,
                    bias=bias,
                    per_step=per_step,
                    element_bytes=dtype.itemsize,
                    gradient_bytes=dtype.itemsize,
                    backward=backward,
                )
                for where, expected in (
                    ({"operation": "broadcast"}, formula.weight_broadcast),
                    ({"operation": "reduce"}, formula.weight_sums),
                    ({"stream": RING_BLOCKS.name, "operation": "send"}, formula.key_value_ring),
                    (
                        {"stream": RING_GRADIENTS.name, "operation": "send"},
                        formula.key_value_gradients,
                    ),
                ):
                    total = counter.traffic.total(**where)
                    sent.append((total.messages, total.bytes_sent))
                    sent.append((expected.messages, expected.bytes))
                work.append((kernel.calls, kernel.pairs))
        assert torch.equal(qkv, before[0]) and torch.equal(projection, before[1])
        whole = rows * size * 2 * 32 * dtype.itemsize
        log_sum_exp = rows * 2 * heads * max(4, dtype.itemsize)
        formula = x.nbytes + rows * 2 * heads * 4 * dtype.itemsize + log_sum_exp
        results.append((saved.bytes, formula, largest.bytes / whole, largest.origin, sent, work))
    return results


def test_eight_ranks_hold_nothing_whole_do_equal_work_and_send_what_the_formulas_say(ranks):
    everyone = ranks.run(costs, world_size=8, backend="gloo")
    for results in everyone:
        for per_step, (saved, formula, share, origin, sent, work) in zip(
            (1, 1, 4, 8), results, strict=True
        ):
            assert saved == formula, "x, and o and lse of every group"
            assert sent[0::2] == sent[1::2]
            steps = 8 // per_step
            assert work == [(8 * steps, 16 * steps), (16 * steps, 32 * steps)], "2 p chunk pairs"
            if per_step < 8:
                assert share < 1, origin


def in_flight():
    """Two layers of other lengths and heads, three micro-batches, evaluation between; one pool."""
    operator, pending, worst = own_operator(), [], 0.0
    for seed in range(3):
        for layer in (
            Attention(2, 4, 2, bias=True, seed=seed),
            Attention(2, 6, 1, per_step=2, causal=False, tokens_per_rank=2, seed=seed, norm=True),
        ):
            leaves = layer.shards()
            x, qkv, bias, projection, *norms = leaves
            y = operator(x, qkv, bias, projection, layer.options(norms))
            pending.append((layer, leaves, y))
            with torch.no_grad():
                operator(x, qkv, bias, projection, layer.options(norms))
    for layer, leaves, y in reversed(pending):
        y.backward(layer.dy[layer.positions])
        for norm in leaves[4:]:
            dist.all_reduce(norm.grad)
        found = [y, *(None if leaf is None else leaf.grad for leaf in leaves)]
        worst = max(worst, worst_error(found, layer.expected()))
    held = []
    for call in range(50):
        layer.run(operator)
        Attention(2, 4, 2, bias=True, tokens_per_rank=2 + 2 * (call % 2)).run(operator)
        held.append((operator.buffers.held_bytes, operator.buffers.leased_bytes))
    return worst, held


def test_calls_in_flight_and_alternating_lengths_keep_memory_flat(ranks):
    for worst, held in ranks.run(in_flight, world_size=2, backend="gloo"):
        assert worst < EXACT
        assert len(set(held[2:])) == 1 and held[-1][1] == 0


def main_gradients():
    layer, operator = Attention(2, 4, 2, bias=True), own_operator()
    _, _, dqkv, dbias, dprojection = layer.expected()
    kept = []
    for zero_out in (False, True):
        x, qkv, bias, projection = layer.shards()
        for weight in (qkv, projection):
            weight.main_grad = torch.zeros_like(weight)
            weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, zero_out
        for _ in range(2):
            options = layer.options([], fused_gradients=True)
            operator(x, qkv, bias, projection, options).backward(layer.dy[layer.positions])
        found = [qkv.main_grad, projection.main_grad, bias.grad]
        assert worst_error(found, [2 * dqkv, 2 * dprojection, 2 * dbias]) < EXACT
        kept.append(
            [w.grad_added_to_main_grad and w.grad.shape == w.shape for w in (qkv, projection)]
        )
    return kept, not qkv.grad.any() and not projection.grad.any()


def test_fused_gradients_add_to_main_grad(ranks):
    for kept, zeros in ranks.run(main_gradients, world_size=2, backend="gloo"):
        assert kept == [[True, True], [True, True]] and zeros


def order_and_delays():
    """(events of a forward and backward, whether random delays leave every bit as it was)."""
    log, sleepy = [], [None]

    class Noting(AtenKernel):
        def forward(self, *args, **options):
            log.append("block")
            self._nap()
            return super().forward(*args, **options)

        def backward(self, *args, **options):
            log.append("block")
            self._nap()
            return super().backward(*args, **options)

        def _nap(self):
            if sleepy[0] is not None:
                time.sleep(sleepy[0].random() * 0.005)

    log_exchanges(log)
    plain_broadcast, plain_reduce = dist.broadcast, dist.reduce

    def broadcast(tensor, src, **options):
        log.append(f"shard {src}")
        return plain_broadcast(tensor, src, **options)

    def reduce(tensor, dst, **options):
        log.append(f"sum {dst}")
        return plain_reduce(tensor, dst, **options)

    dist.broadcast, dist.reduce = broadcast, reduce
    hold_up_messages(sleepy)
    layer, operator = Attention(4, 8, 4, kernel=Noting()), own_operator()
    runs = [layer.run(operator)]
    events = [event for event in log if isinstance(event, str)]
    for seed in (1, 2):
        sleepy[0] = random.Random(100 * seed + dist.get_rank())
        runs.append(layer.run(operator))
    equal = all(
        torch.equal(a, b)
        for other in runs[1:]
        for a, b in zip(runs[0], other, strict=True)
        if a is not None
    )
    return events, equal


def test_the_next_shard_is_on_its_way_before_this_group_and_delays_change_no_bit(ranks):
    def one_pass(sums):
        events = ["shard 0"] * 2
        for group in range(4):
            events += [f"shard {group + 1}"] * 2 if group < 3 else []
            events += ["block"] * 4
            events += [f"sum {group}"] * 2 if sums else []
        return events

    for events, same in ranks.run(order_and_delays, world_size=4, backend="gloo"):
        assert events == one_pass(sums=False) + one_pass(sums=True)
        assert same


def torn_steps():
    layer, operator = Attention(4, 8, 4), own_operator()
    x, qkv, bias, projection = layer.shards()
    error = refused(operator, x, qkv, bias, projection, layer.options([], per_step=3))
    exact = worst_error(layer.run(operator), layer.expected())
    return error, exact, operator.buffers.leased_bytes


def test_shards_per_step_must_divide_the_ranks(ranks):
    for error, exact, leased in ranks.run(torn_steps, world_size=4, backend="gloo"):
        assert error == (
            "UserError: 3 weight shards per step do not divide 4 ranks; nearest that do: [1, 2, 4]"
        )
        assert exact < EXACT and leased == 0


def fails_in_the_middle(where):
    """A kernel that fails at its sixth call, on every rank; then the operator works again."""
    calls = []

    class Failing(AtenKernel):
        def _call(self, name):
            calls.append(name)
            if calls.count(where) == 6 and name == where:
                raise MemoryError("no room")

        def forward(self, *args, **options):
            self._call("forward")
            return super().forward(*args, **options)

        def backward(self, *args, **options):
            self._call("backward")
            return super().backward(*args, **options)

    layer, operator = Attention(4, 8, 4, bias=True), own_operator()
    error = refused(layer.run, operator, kernel=Failing())
    leased = operator.buffers.leased_bytes
    return error, leased, worst_error(layer.run(operator), layer.expected())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_middle_leaves_the_pool_whole(ranks, where):
    for error, leased, exact in ranks.run(
        fails_in_the_middle, world_size=4, args=(where,), backend="gloo"
    ):
        assert error == "MemoryError: no room" and leased == 0 and exact < EXACT
