"""Ring cross entropy and ring lookup equal one process and Megatron's own, on every rank."""

import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from metp_reference import (
    EXACT,
    LargestCreated,
    hold_up_messages,
    leaves,
    log_exchanges,
    normal,
    stock_cross_entropy,
    worst_error,
)

from megatron_longseq.communication import BufferPool, Ring
from megatron_longseq.communication.transport import RING_BLOCKS, RING_GRADIENTS
from megatron_longseq.measurement import TrafficCounter, saved_for_backward
from megatron_longseq.metp.embedding import ring_embedding
from megatron_longseq.metp.traffic import embedding_traffic, vocabulary_loss_traffic
from megatron_longseq.metp.vocab_loss import ring_cross_entropy
from megatron_longseq.token_layout import zigzag_tokens

STREAMS = {stream.tag: stream.name for stream in (RING_BLOCKS, RING_GRADIENTS)}
SIZES = [1, 2, 3, 4, 8]


def own_ring(**options):
    """A ring whose gradients have a process group of their own."""
    if dist.get_world_size() == 1:
        return Ring(None, BufferPool(), timeout_seconds=20)
    lanes = {"gradients": dist.new_group()}
    return Ring(dist.group.WORLD, BufferPool(), lane_groups=lanes, timeout_seconds=20, **options)


class Problem:
    """Tokens, hidden states and a table of the whole sequence, and this rank's part of them."""

    def __init__(self, p, *, per_rank=4, batch=2, hidden=6, rows=5, scale=1.0, dtype=torch.float64):
        total, self.vocabulary = per_rank * p, rows * p
        self.p, self.rank, self.dtype = p, dist.get_rank() if p > 1 else 0, dtype
        self.order = torch.cat([zigzag_tokens(rank, p, total) for rank in range(p)])
        self.positions = self.order.chunk(p)[self.rank]
        self.x = normal(total, batch, hidden, scale=scale, dtype=dtype).double()
        self.weight = normal(rows * p, hidden, seed=1, dtype=dtype).double()
        self.dy = normal(total, batch, hidden, seed=2, dtype=dtype).double()
        self.dloss = normal(batch, total, seed=3)
        generator = torch.Generator().manual_seed(4)
        self.labels = torch.randint(0, rows * p, (batch, total), generator=generator)
        for index, outside in enumerate((-1, -100, rows * p, rows * p + 7)):
            self.labels[index % batch, index * total // 4] = outside

    def shards(self):
        """This rank's hidden states and rows of the table."""
        return leaves(
            self.x[self.positions].to(self.dtype),
            self.weight.chunk(self.p)[self.rank].to(self.dtype),
        )

    def expected_loss(self):
        """The losses of all tokens, and this rank's part of the gradients."""
        x, weight = leaves(self.x, self.weight)
        loss = stock_cross_entropy(x @ weight.t(), self.labels.t()).t()
        loss.backward(self.dloss)
        return [
            loss.detach(),
            x.grad[self.positions],
            weight.grad.chunk(self.p)[self.rank],
        ]

    def loss(self, ring, **options):
        x, weight = self.shards()
        loss = ring_cross_entropy(x, weight, self.labels, self.order, ring=ring, **options)
        loss.backward(self.dloss.to(loss.dtype))
        return [loss.detach(), x.grad, weight.grad]

    def expected_rows(self):
        (weight,) = leaves(self.weight)
        tokens = self.labels.t()
        inside = (tokens >= 0) & (tokens < self.vocabulary)
        rows = F.embedding(tokens.masked_fill(~inside, 0), weight) * inside.unsqueeze(-1)
        rows.backward(self.dy)
        return [rows.detach()[self.positions], weight.grad.chunk(self.p)[self.rank]]

    def rows(self, ring, **options):
        _, weight = self.shards()
        tokens = self.labels.t()[self.positions]
        rows = ring_embedding(tokens, weight, ring=ring, **options)
        rows.backward(self.dy[self.positions].to(rows.dtype))
        return [rows.detach(), weight.grad]


def parity(p):
    ring, worst = own_ring(), {}
    problem, steep = Problem(p), Problem(p, scale=60.0)
    assert (steep.x @ steep.weight.t()).abs().max() > 100
    for columns in (1, 3, 1024):
        worst["loss", columns] = worst_error(
            problem.loss(ring, tile_columns=columns), problem.expected_loss()
        )
    worst["steep loss"] = worst_error(steep.loss(ring, tile_columns=4), steep.expected_loss())
    worst["lookup"] = worst_error(problem.rows(ring), problem.expected_rows())
    worst |= frozen(ring, problem)
    assert ring.pool.leased_bytes == 0
    problem.labels.clamp_(0, problem.vocabulary - 1)
    logits = (problem.x @ problem.weight.t()).movedim(-1, 1)
    plain = F.cross_entropy(logits, problem.labels.t(), reduction="none").t()
    worst["PyTorch's"] = worst_error(problem.loss(ring)[:1], [plain])
    return worst


def frozen(ring, problem):
    loss, dx, dweight = problem.expected_loss()
    worst = {}
    for trains in ((True, False), (False, True)):
        x, weight = problem.shards()
        x.requires_grad_(trains[0]), weight.requires_grad_(trains[1])
        ours = ring_cross_entropy(
            x, weight, problem.labels, problem.order, ring=ring, tile_columns=2
        )
        ours.backward(problem.dloss)
        wanted = [dx if trains[0] else None, dweight if trains[1] else None]
        worst[trains] = worst_error([ours, x.grad, weight.grad], [loss, *wanted])
    _, weight = problem.shards()
    rows = ring_embedding(
        problem.labels.t()[problem.positions], weight.requires_grad_(False), ring=ring
    )
    assert not rows.requires_grad
    return worst


@pytest.mark.parametrize("size", SIZES)
def test_loss_and_lookup_equal_one_process_and_so_does_every_gradient(ranks, size):
    for rank, worst in enumerate(ranks.run(parity, world_size=size, args=(size,), backend="gloo")):
        assert len(worst) == 8
        for case, error in worst.items():
            assert error < EXACT, (rank, case, error)


def against_megatron():
    """Largest differences to Megatron's loss over split logits, and of the gradients, in fp32."""
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    p = dist.get_world_size()
    problem = Problem(p, dtype=torch.float32)
    x, weight = leaves(problem.x.float(), problem.weight.chunk(p)[problem.rank].float())
    logits = x @ weight.t()
    loss = vocab_parallel_cross_entropy(
        logits.clone(), problem.labels.t().contiguous(), tp_group=dist.group.WORLD
    ).t()
    loss.backward(problem.dloss.float())
    dist.all_reduce(x.grad)
    stock = [loss.detach().double(), x.grad[problem.positions].double(), weight.grad.double()]
    ours = problem.loss(own_ring(), tile_columns=3)
    assert all(tensor.dtype == torch.float32 for tensor in ours)
    return worst_error(ours, stock)


def test_the_loss_is_megatrons_labels_outside_the_vocabulary_included(megatron_ranks):
    assert max(megatron_ranks.run(against_megatron, world_size=4, backend="gloo")) < 1e-5


def low_precision():
    """Relative error in bf16, of one problem on any number of ranks."""
    p = dist.get_world_size()
    problem = Problem(p, per_rank=64 // p, rows=64 // p, hidden=32, dtype=torch.bfloat16)
    loss, ring = problem.loss(own_ring()), own_ring()
    assert [t.dtype for t in loss] == [torch.float32, torch.bfloat16, torch.bfloat16]
    rows = problem.rows(ring)
    assert all(t.dtype == torch.bfloat16 for t in rows)
    pairs = zip([*loss, *rows], [*problem.expected_loss(), *problem.expected_rows()], strict=True)
    sums = torch.stack(
        [torch.stack([(a.double() - b).norm() ** 2, b.norm() ** 2]) for a, b in pairs]
    )
    dist.all_reduce(sums)
    return (sums[:, 0] / sums[:, 1]).sqrt().tolist()


def test_errors_of_bf16_do_not_grow_with_the_ring(ranks):
    two, eight = (ranks.run(low_precision, world_size=size, backend="gloo")[0] for size in (2, 8))
    assert max(two + eight) < 1e-2, (two, eight)
    for few, many in zip(two, eight, strict=True):
        assert many <= 1.5 * few, (two, eight)


def tied():
    """One table for both, its gradients added into one main_grad, over two micro-batches."""
    problem, ring = Problem(2), own_ring()
    x, weight = problem.shards()
    weight.main_grad = torch.zeros_like(weight)
    weight.grad_added_to_main_grad = False
    for _ in range(2):
        rows = ring_embedding(
            problem.labels.t()[problem.positions], weight, ring=ring, fused_gradients=True
        )
        loss = ring_cross_entropy(
            x, weight, problem.labels, problem.order, ring=ring, fused_gradients=True
        )
        torch.autograd.backward([rows, loss], [problem.dy[problem.positions], problem.dloss])
    expected = 2 * (problem.expected_loss()[2] + problem.expected_rows()[1])
    return worst_error([weight.main_grad], [expected]), weight.grad_added_to_main_grad


def test_a_tied_table_collects_both_gradients_in_its_main_grad(ranks):
    for error, added in ranks.run(tied, world_size=2, backend="gloo"):
        assert error < EXACT and added


def costs():
    """At p = 8: saved bytes, the largest tensor, traffic; the table stays as it was."""
    p, per_rank, hidden, rows = 8, 8, 32, 12
    ring, results, out = own_ring(), [], None
    problem = Problem(p, per_rank=per_rank, hidden=hidden, rows=rows, dtype=torch.bfloat16)
    tokens = problem.labels.t()[problem.positions].contiguous()
    local = per_rank * 2
    for what, formula, expected_saved in (
        ("loss", vocabulary_loss_traffic, local * (2 * hidden + 8 + 4) + per_rank * 8),
        ("lookup", embedding_traffic, local * (8 + 8)),
    ):
        x, weight = problem.shards()
        x, before = x.detach().requires_grad_(), weight.detach().clone()
        sizes = {"tokens": per_rank, "batch": 2} if what == "loss" else {}
        sent = []
        dy = problem.dy[problem.positions].bfloat16()
        with LargestCreated() as largest:
            for backward in (False, True):
                with TrafficCounter(STREAMS) as counter:
                    if backward:
                        out.backward(problem.dloss.float() if what == "loss" else dy)
                    else:
                        with saved_for_backward() as saved:
                            if what == "loss":
                                out = ring_cross_entropy(
                                    x,
                                    weight,
                                    problem.labels,
                                    problem.order,
                                    ring=ring,
                                    tile_columns=5,
                                )
                            else:
                                out = ring_embedding(tokens, weight, ring=ring)
                traffic = formula(
                    ranks=p,
                    hidden=hidden,
                    vocabulary=rows * p,
                    element_bytes=2,
                    gradient_bytes=4,
                    backward=backward,
                    **sizes,
                )
                for where, expected in (
                    ({"stream": RING_BLOCKS.name, "operation": "send"}, traffic.weight_ring),
                    (
                        {"stream": RING_GRADIENTS.name, "operation": "send"},
                        traffic.weight_gradients,
                    ),
                    ({"operation": "all_gather"}, traffic.losses),
                ):
                    total = counter.traffic.total(**where)
                    sent.append((total.messages, total.bytes_sent))
                    sent.append((expected.messages, expected.bytes))
        assert torch.equal(weight, before)
        whole = p * local * hidden * 2
        results.append((saved.bytes, expected_saved, largest.bytes / whole, largest.origin, sent))
    return results


def test_eight_ranks_save_little_hold_nothing_whole_and_send_what_the_formulas_say(ranks):
    for results in ranks.run(costs, world_size=8, backend="gloo"):
        for saved, formula, share, origin, sent in results:
            assert saved == formula
            assert share < 1, origin
            assert sent[0::2] == sent[1::2]
        assert [messages for messages, _ in results[1][4][0::2]] == [7, 0, 0, 0, 8, 0], (
            "the lookup's backward moves gradients alone"
        )


def many_calls():
    """Two lengths in turn, two calls in flight, over one pool; then order and random delays."""
    ring, held, sleepy, log = own_ring(), [], [None], []
    lengths = [Problem(2, per_rank=4), Problem(2, per_rank=2, batch=1, rows=3)]
    expected = [problem.expected_loss()[2] + problem.expected_rows()[1] for problem in lengths]
    for _ in range(50):
        pending = []
        for problem in lengths:
            x, weight = problem.shards()
            tokens = problem.labels.t()[problem.positions]
            loss = ring_cross_entropy(x, weight, problem.labels, problem.order, ring=ring)
            pending.append((problem, weight, loss, ring_embedding(tokens, weight, ring=ring)))
        for problem, _, loss, rows in pending:
            loss.backward(problem.dloss)
            rows.backward(problem.dy[problem.positions])
        held.append((ring.pool.held_bytes, ring.pool.leased_bytes))
    worst = worst_error([weight.grad for _, weight, _, _ in pending], expected)
    log_exchanges(log)
    hold_up_messages(sleepy)
    runs = []
    for seed in (0, 1, 2):
        sleepy[0] = random.Random(100 * seed + dist.get_rank()) if seed else None
        runs.append([*lengths[0].loss(ring), *lengths[0].rows(ring)])
    same = all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
    return worst, held, same, log[: len(log) // 3]


def test_calls_in_flight_keep_memory_flat_and_delays_change_no_bit(ranks):
    for worst, held, same, log in ranks.run(many_calls, world_size=2, backend="gloo"):
        assert worst < EXACT and same
        assert len(set(held[1:])) == 1 and held[-1][1] == 0
        block, home = "ring blocks", "ring gradients"
        loss, lookup = [block, block, home, home], [block, home, home]
        assert [stream for stream, _ in log] == loss + lookup
