"""Windows, prefixes, packed documents and sinks: equal to dense attention on every rank."""

import random

import pytest
import torch
import torch._dynamo  # the first dispatch mode imports it: here, once for all forked ranks
import torch.distributed as dist
from grids import FACTORISATIONS, grid_groups, random_sequence, relative_error
from masks import dense_mask, masked_attention, masked_with_gradients

from megatron_longseq.attention_2d import TwoDAttention, attention_traffic, two_d_attention
from megatron_longseq.communication.transport import RING_BLOCKS, RING_GRADIENTS
from megatron_longseq.measurement import TrafficCounter
from megatron_longseq.memory.keep_attention import Kept
from megatron_longseq.softmax import Mask, MaskPlan, PackedDocuments
from megatron_longseq.token_layout import ZigzagGrid, document_zigzag_tokens

EXACT = 1e-11  # fp64; 1e-10 is asked for
HEADS, GROUPS, WIDTH, VALUE_WIDTH = 12, 4, 8, 4


def sink_of(heads, seed=9):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, generator=generator, dtype=torch.float64)


def errors(operator, tokens, data, visible, *, sink=None, **options):
    """Largest relative error of this rank: out, dQ, dK, dV, and da summed over the ranks."""
    expected = masked_with_gradients(*data, visible, sink)
    leaves = [tensor[tokens].clone().requires_grad_() for tensor in data[:3]]
    if sink is not None:
        sink = sink.clone().requires_grad_()
    out = operator(*leaves, sink=sink, **options)
    out.backward(data[3][tokens])
    found = [out.detach(), *(leaf.grad for leaf in leaves)]
    assert operator.buffers.leased_bytes == 0
    worst = []
    for ours, whole in zip(found, expected, strict=False):
        assert torch.isfinite(ours).all()
        worst.append(((ours - whole[tokens]).abs().max() / whole.abs().max()).item())
    if sink is not None:
        dist.all_reduce(sink.grad)
        worst.append(relative_error(sink.grad, expected[-1]))
    return max(worst)


def all_errors(hp, ring, cases):
    """Errors of this rank, by case: (options, rows, whether there is a sink)."""
    operator, grid = TwoDAttention(*grid_groups(hp, ring), timeout_seconds=30), ZigzagGrid(hp, ring)
    here, found = dist.get_rank(), {}
    for number, (options, per_rank, with_sink) in enumerate(cases):
        total, options = per_rank * grid.ranks, dict(options)
        operator.backward_ring = ("keys", "queries")[number % 2]
        batch = 1 if "cu_seqlens" in options else 2
        tokens, boundaries, lengths = grid.tokens(here, total), options.get("cu_seqlens"), None
        if "cu_seqlens_padded" in options:
            lengths = torch.tensor(boundaries).diff().tolist()
            boundaries = options["cu_seqlens_padded"]
            tokens = document_zigzag_tokens(here, grid.ranks, boundaries)
        visible = dense_mask(
            total,
            boundaries=boundaries,
            lengths=lengths,
            **{k: options[k] for k in ("causal", "window", "prefix") if k in options},
        )
        data = random_sequence(total, batch, HEADS, GROUPS, WIDTH, VALUE_WIDTH, seed=number)
        sink = sink_of(HEADS) if with_sink else None
        if lengths is not None:
            # What padding holds must not matter.
            padding = ~visible.any(0)
            for tensor in data[:3]:
                tensor[padding] = 1e3
        found[number] = errors(operator, tokens, data, visible, sink=sink, **options)
    return found


def assert_exact(results, cases):
    for rank, found in enumerate(results):
        for number, error in found.items():
            assert error < EXACT, (rank, cases[number], error)


def windows(per_rank, ranks):
    """Windows below, at and above a piece and a chunk, none, and as long as the sequence."""
    total = per_rank * ranks
    return [0, 1, per_rank // 2 - 1, per_rank // 2, per_rank + 1, total // 2, total - 2, total]


@pytest.mark.parametrize("size", [1, 2, 4, pytest.param(6, marks=pytest.mark.thorough)])
def test_windows_and_sinks_equal_dense_attention(ranks, size):
    for hp, ring in FACTORISATIONS[size]:
        cases = [
            ({"window": window, "kernel": kernel}, 6, sink)
            for index, window in enumerate(windows(6, size))
            for kernel, sink in ((("aten", True), ("reference", False))[index % 2],)
        ]
        cases += [({"window": None}, 6, True), ({"causal": False}, 6, True)]
        cases += [({"prefix": 5}, 6, False), ({"prefix": 5, "window": 3}, 6, True)]
        results = ranks.run(all_errors, world_size=size, args=(hp, ring, cases), backend="gloo")
        assert_exact(results, cases)


def test_long_windows_run_in_tiles(ranks):
    cases = [({"window": window}, 400, True) for window in (90, 300, 700)]
    assert_exact(ranks.run(all_errors, world_size=2, args=(1, 2, cases), backend="gloo"), cases)


def packed_rows(total, seed):
    """Documents cut anywhere: one token, one document, empty ones, borders on chunks' ends."""
    rng = random.Random(seed)
    anywhere = sorted(rng.sample(range(1, total), min(6, total - 1)))
    return [
        [0, *anywhere, total],
        [0, 1, total - 1, total],
        [0, total],
        [0, total // 2, total // 2, total],
        list(range(total + 1)),
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.thorough)])
def test_documents_cut_anywhere_equal_dense_attention(ranks, size):
    for hp, ring in FACTORISATIONS[size]:
        if HEADS % hp:
            continue
        cases = [
            ({"cu_seqlens": row, **more}, 10, sink)
            for index, row in enumerate(packed_rows(10 * size, hp))
            for more, sink in (({}, bool(index % 2)),)
        ]
        row = packed_rows(10 * size, 5)[0]
        cases += [
            ({"cu_seqlens": row, "window": 3}, 10, True),
            ({"cu_seqlens": row, "causal": False}, 10, False),
            ({"cu_seqlens": row, "prefix": 2}, 10, False),
            ({"cu_seqlens": row, "kernel": "reference"}, 10, True),
        ]
        results = ranks.run(all_errors, world_size=size, args=(hp, ring, cases), backend="gloo")
        assert_exact(results, cases)


def padded_row(lengths, ranks):
    """(cu_seqlens, cu_seqlens_padded): each document padded to a multiple of twice the ranks."""
    real, padded = [0], [0]
    for length in lengths:
        real.append(real[-1] + length)
        padded.append(padded[-1] - (-length // (2 * ranks)) * 2 * ranks)
    return {"cu_seqlens": real, "cu_seqlens_padded": padded}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_documents_that_are_zigzags_by_themselves_equal_dense_attention(ranks, size):
    # TransformerEngine #3331, #1930: with 7 of 8 tokens real, or 698 of 704, keys were dropped and
    # rows of zeros came out.
    for hp, ring in FACTORISATIONS[size]:
        cases = []
        for lengths, more, sink in (
            ((7, 698 if (hp, ring) == (2, 2) else 90, 1, 30), {}, True),
            ((16, 8), {"window": 4}, False),
            ((1, 1, 2), {"causal": False}, False),
            ((5, 17), {"prefix": 3}, True),
        ):
            options = padded_row(lengths, size)
            cases.append((options | more, options["cu_seqlens_padded"][-1] // size, sink))
        results = ranks.run(all_errors, world_size=size, args=(hp, ring, cases), backend="gloo")
        assert_exact(results, cases)


def padding_everywhere():
    """A rank that has nothing but padding; another that has one token."""
    operator = TwoDAttention(*grid_groups(1, 2), timeout_seconds=30)
    grid, boundaries = ZigzagGrid(1, 2), [0, 4]
    data = random_sequence(4, 1, 4, 4, 8, 8)
    leaves = [grid.split(t, dist.get_rank()).clone().requires_grad_() for t in data[:3]]
    out = operator(*leaves, cu_seqlens=[0, 1], cu_seqlens_padded=boundaries)
    out.backward(grid.split(data[3], dist.get_rank()))
    empty = operator(*leaves, cu_seqlens=[0, 0], cu_seqlens_padded=boundaries, sink=torch.zeros(4))
    zero = [out.detach().abs().sum(), *(leaf.grad.abs().sum() for leaf in leaves)]
    return [bool(x == 0) for x in zero], bool((empty == 0).all())


def test_padding_has_output_and_gradient_zero_even_on_a_rank_of_its_own(ranks):
    first, second = ranks.run(padding_everywhere, world_size=2, backend="gloo")
    assert first == ([False, True, True, False], True)  # one key: no gradient of a score
    assert second == ([True] * 4, True)


def sums_of_a_ring(options):
    """Whether the log-sum-exp is that of the whole row, sink included."""
    from megatron_longseq.communication import BufferPool, Ring
    from megatron_longseq.softmax import choose_kernel, ring_attention_forward

    grid = ZigzagGrid(1, dist.get_world_size())
    q, k, v, _ = random_sequence(48, 1, 6, 2, 8, 8)
    sink, boundaries = sink_of(6), [0, 5, 29, 48]
    mask = Mask(window=7, documents=PackedDocuments.whole_row(boundaries))
    ring = Ring(dist.group.WORLD, BufferPool(), timeout_seconds=30)
    _, lse = ring_attention_forward(
        *(grid.split(tensor, dist.get_rank()) for tensor in (q, k, v)),
        ring=ring,
        kernel=choose_kernel("aten", torch.float64, torch.device("cpu")),
        plan=MaskPlan(mask, ring.size, 48 // ring.size),
        scale=0.3,
        sink=sink,
    )
    visible = dense_mask(48, window=7, boundaries=boundaries)
    _, expected = masked_attention(q, k, v, visible, sink, 0.3)
    return relative_error(lse, grid.split(expected, dist.get_rank(), 2))


def test_the_log_sum_exp_counts_the_sink_and_what_is_visible(ranks):
    assert max(ranks.run(sums_of_a_ring, world_size=3, args=({},), backend="gloo")) < EXACT


# --- mistakes of others -----------------------------------------------------------------------


def differences():
    """How far each option takes the output from plain attention, on two grids."""
    found = {}
    for hp, ring in ((1, 4), (2, 2)):
        operator = TwoDAttention(*grid_groups(hp, ring), timeout_seconds=30)
        grid = ZigzagGrid(hp, ring)
        data = [grid.split(t, dist.get_rank()) for t in random_sequence(48, 1, 4, 4, 8, 8)[:3]]
        plain = operator(*data)
        for name, options in {
            "window": {"window": 5},
            "sink": {"sink": torch.zeros(4, dtype=torch.float64)},
            "documents": {"cu_seqlens": [0, 11, 48]},
            "prefix": {"prefix": 20},
        }.items():
            found[hp, name] = (operator(*data, **options) - plain).abs().max().item()
    return found


def test_no_option_is_silently_dropped(ranks):
    # prime-rl #3397 (sinks), prime-rl PR #2828 and InternEvo (windows): accepted and ignored.
    for found in ranks.run(differences, world_size=4, backend="gloo"):
        for name, difference in found.items():
            assert difference > 0.01, name


def test_a_window_passed_unchanged_to_each_block_is_another_mask():
    # yunchang/USP: each block pair gets the window as if its rows stood side by side.
    window, ring, total = 5, 2, 32
    correct = MaskPlan(Mask(window=window), ring, total // ring)
    block = ZigzagGrid(1, ring).block_tokens(0, total)
    unchanged = torch.zeros(total, total, dtype=torch.bool)
    rows = torch.arange(len(block))
    local = (rows.unsqueeze(1) >= rows) & (rows.unsqueeze(1) - rows <= window)
    unchanged[block.unsqueeze(1), block] = local
    seen = torch.zeros(total, total, dtype=torch.bool)
    for part in correct.rectangles(0, 0):
        shape = torch.ones(len(block[part.queries]), len(block[part.keys]), dtype=torch.bool)
        low, high = (None, 0) if part.causal else part.band or (None, None)
        shape = shape.triu(low) if low is not None else shape
        shape = shape.tril(high) if high is not None else shape
        seen[block[part.queries].unsqueeze(1), block[part.keys]] |= shape
    truth = torch.zeros(total, total, dtype=torch.bool)
    truth[block.unsqueeze(1), block] = dense_mask(total, window=window)[block.unsqueeze(1), block]
    assert torch.equal(seen, truth) and not torch.equal(unchanged, truth)


# --- what travels -----------------------------------------------------------------------------

STREAMS = {stream.tag: stream.name for stream in (RING_BLOCKS, RING_GRADIENTS)}


def counted(options):
    """Messages and bytes of blocks and gradients that this rank sends, forward and backward."""
    operator = TwoDAttention(*grid_groups(1, 4), timeout_seconds=30)
    leaves = [torch.randn(16, 1, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    found = []
    with TrafficCounter(STREAMS) as counter:
        out = operator(*leaves, **options)
        for backward in (False, True):
            if backward:
                counter.reset()
                out.backward(torch.ones_like(out))
            for stream in (RING_BLOCKS, RING_GRADIENTS):
                sent = counter.traffic.total(stream=stream.name, operation="send")
                found.append((sent.messages, sent.bytes_sent))
    return found


def plan_of(options):
    documents = options.get("cu_seqlens")
    documents = documents and PackedDocuments.whole_row(documents)
    return MaskPlan(Mask(window=options.get("window"), documents=documents), 4, 16)


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"cu_seqlens": [0, 60, 64]}])
def test_blocks_that_are_seen_go_round_the_ring(ranks, options):
    assert not plan_of(options).sparse
    sizes = dict(tokens=16, batch=1, query_heads=4, key_heads=2, width=8, value_width=8)
    sizes |= dict(head_parallel=1, ring=4, element_bytes=4, gradient_bytes=4)
    expected = []
    for backward in (False, True):
        formula = attention_traffic(**sizes, backward=backward)
        for stream in (formula.ring_blocks, formula.ring_gradients):
            expected.append((stream.messages, stream.bytes))
    for found in ranks.run(counted, world_size=4, args=(options,), backend="gloo"):
        assert found == expected


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"window": 0}, 0),
        ({"window": 3}, 3 + 3),  # the tails of both chunks
        ({"cu_seqlens": [0, 8, 16, 24, 32, 40, 48, 56, 64]}, 0),  # no document leaves its chunk
        ({"cu_seqlens": [0, 7, 15, 25, 31, 39, 47, 57, 64]}, 12),
        ({"cu_seqlens": [0, 16, 48, 64]}, 16),
    ],
)
def test_of_blocks_little_seen_the_seen_rows_alone_travel(ranks, options, most):
    plan = plan_of(options)
    assert plan.sparse
    results = ranks.run(counted, world_size=4, args=(options,), backend="gloo")
    for rank, found in enumerate(results):
        used = [plan.rows_used(user, rank) for user in range(4) if user != rank]
        sizes = [sum(rows.stop - rows.start for rows in one) for one in used]
        here = [plan.rows_used(rank, owner) for owner in range(4) if owner != rank]
        back = [sum(rows.stop - rows.start for rows in one) for one in here]
        assert sum(sizes) <= most
        row = 2 * 2 * 8 * 4  # K and V, heads, width, bytes
        keys = (2 * sum(map(bool, sizes)), row * sum(sizes))
        gradients = (2 * sum(map(bool, back)), row * sum(back))
        assert found == [keys, (0, 0), keys, gradients]


def fails_in_the_middle(where):
    """A kernel that fails in every rank's own block, with rows on their way; then all works."""
    from megatron_longseq.softmax import AtenKernel

    operator, grid = TwoDAttention(*grid_groups(1, 4), timeout_seconds=30), ZigzagGrid(1, 4)
    calls = {"forward": 0, "backward": 0}

    class Failing(AtenKernel):
        def forward(self, *args, **kwargs):
            return self.count("forward", super().forward, args, kwargs)

        def backward(self, *args, **kwargs):
            return self.count("backward", super().backward, args, kwargs)

        def count(self, name, function, args, kwargs):
            calls[name] += 1
            if name == where and calls[name] == 2:
                raise MemoryError("no room")
            return function(*args, **kwargs)

    data = random_sequence(64, 1, 4, 4, 8, 8)
    visible, tokens = dense_mask(64, window=5), grid.tokens(dist.get_rank(), 64)
    prepare, operator._prepare = operator._prepare, lambda *_: Failing()
    with pytest.raises(MemoryError, match="no room"):
        errors(operator, tokens, data, visible, window=5)
    leased, operator._prepare = operator.buffers.leased_bytes, prepare
    return leased, errors(operator, tokens, data, visible, window=5)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_between_rows_on_their_way_leaves_the_pool_whole(ranks, where):
    for leased, error in ranks.run(
        fails_in_the_middle, world_size=4, args=(where,), backend="gloo"
    ):
        assert leased == 0 and error < EXACT


def double_ring_of_documents():
    """A double ring, and documents short enough to leave it; by turns."""
    _, ring = grid_groups(1, 4)
    grid, found = ZigzagGrid(1, 4), []
    for boundaries in ([0, 4, 12, 20, 28, 36, 44, 52, 60, 64], [0, 64]):
        data = random_sequence(64, 1, 4, 2, 8, 8)
        expected = masked_with_gradients(*data, dense_mask(64, boundaries=boundaries))
        leaves = [grid.split(t, dist.get_rank()).requires_grad_() for t in data[:3]]
        out = two_d_attention(
            *leaves, head_group=None, ring_group=ring, window_size=2, cu_seqlens=boundaries
        )
        out.backward(grid.split(data[3], dist.get_rank()))
        for ours, whole in zip((out, *(x.grad for x in leaves)), expected, strict=True):
            found.append(relative_error(ours.detach(), grid.split(whole, dist.get_rank())))
    return max(found)


def test_documents_on_a_double_ring(ranks):
    assert max(ranks.run(double_ring_of_documents, world_size=4, backend="gloo")) < EXACT


# --- together with the rest -------------------------------------------------------------------


def kept(share):
    """Gradients with attention kept, and again with a plain recompute."""
    from torch.utils.checkpoint import checkpoint

    operator, grid = TwoDAttention(*grid_groups(2, 2), timeout_seconds=30), ZigzagGrid(2, 2)
    data, results = random_sequence(64, 1, 4, 2, 8, 8), []
    options = {"cu_seqlens": [0, 9, 41, 64], "window": 6}
    for wrap in (lambda f: f, lambda f: Kept(f, share)):
        leaves = [grid.split(t, dist.get_rank()).clone().requires_grad_() for t in data[:3]]
        sink = sink_of(4).requires_grad_()

        def layer(q, k, v, a):
            return operator(q, k, v, sink=a, **options)

        out = checkpoint(wrap(layer), *leaves, sink, use_reentrant=False)
        out.backward(grid.split(data[3], dist.get_rank()))
        results.append([out.detach(), *(x.grad for x in leaves), sink.grad])
    return max(relative_error(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_kept_attention_has_the_sink_in_it(ranks, share):
    assert max(ranks.run(kept, world_size=4, args=(share,), backend="gloo")) < EXACT


def plans_of(steps):
    operator = TwoDAttention(*grid_groups(1, 2), timeout_seconds=30)
    x = torch.randn(16, 1, 2, 8)
    for step in range(steps):
        operator(x, x, x, cu_seqlens=[0, step % 30 + 1, 32])
    return len(operator._plans)


def test_plans_of_past_batches_are_let_go(ranks):
    assert max(ranks.run(plans_of, world_size=2, args=(40,), backend="gloo")) <= 16


def test_low_precision_with_everything_on():
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        data = [t.to(dtype) for t in random_sequence(96, 1, 4, 2, 16, 16)]
        sink = sink_of(4).to(dtype).requires_grad_()
        boundaries = [0, 30, 31, 96]
        leaves = [tensor.clone().requires_grad_() for tensor in data[:3]]
        out = two_d_attention(
            *leaves,
            head_group=None,
            ring_group=None,
            window=20,
            cu_seqlens=boundaries,
            sink=sink,
        )
        out.backward(data[3])
        expected = masked_with_gradients(
            *(t.double() for t in data),
            dense_mask(96, window=20, boundaries=boundaries),
            sink.detach().double(),
        )
        found = [out.detach(), *(leaf.grad for leaf in leaves), sink.grad]
        assert all(tensor.dtype == dtype for tensor in found)
        for ours, exact in zip(found, expected, strict=True):
            assert relative_error(ours, exact) < tolerance
