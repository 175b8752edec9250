"""What ``benchmarks/attention_at_scale.py`` runs on the ranks."""

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from attention_contenders import Contender, quiet, sample
from torch import Tensor

from megatron_longseq.attention_2d import TwoDAttention
from megatron_longseq.communication import BufferPool, DoubleRing
from megatron_longseq.measurement import LimitedLinks, LiveBytes
from megatron_longseq.softmax import OnlineSoftmax, choose_kernel
from megatron_longseq.softmax.ring_attention import BackwardRing
from megatron_longseq.token_layout import ZigzagGrid

HEADS, WIDTH, TOKENS = 4, 64, 8192
AGREEMENT = 1e-4
# Of a rank, in the measurement of memory.
MEMORY_TOKENS = 512


@dataclass(frozen=True)
class RingContender:
    """One way to split 8 ranks of two nodes.

    Attributes:
        head_parallel, ring: sizes.
        window: of a double ring; ``None`` for a single one.
        context_first: rings on neighbouring ranks.
        moves: what goes round in the backward.
    """

    name: str
    head_parallel: int
    ring: int
    window: int | None
    context_first: bool = False
    moves: BackwardRing = "keys"

    def rank(self, position: int, place: int) -> int:
        """The physical rank at a ring position and a place in the head group."""
        if self.context_first:
            return place * self.ring + position
        return position * self.head_parallel + place


SINGLE = RingContender("1 x 8, single ring", 1, 8, None)
DOUBLE = RingContender("1 x 8, windows of 4", 1, 8, 4)
HEAD_SINGLE = RingContender("2 x 4 head-first, single ring", 2, 4, None)
HEAD_FIRST = RingContender("2 x 4 head-first, windows of 2", 2, 4, 2)
CONTEXT_FIRST = RingContender("2 x 4 context-first", 2, 4, None, context_first=True)
SINGLE_QUERIES = RingContender("1 x 8, single ring, queries", 1, 8, None, moves="queries")
DOUBLE_QUERIES = RingContender("1 x 8, windows of 4, queries", 1, 8, 4, moves="queries")
RINGS = (
    SINGLE,
    DOUBLE,
    HEAD_SINGLE,
    HEAD_FIRST,
    CONTEXT_FIRST,
    SINGLE_QUERIES,
    DOUBLE_QUERIES,
)


def block_bytes(ring: int, element: int = 4) -> int:
    """K and V of a ring position, per rank, where every head is on it."""
    return 2 * (TOKENS // ring) * HEADS * WIDTH * element


def group_of(lists: list[list[int]]) -> dist.ProcessGroup:
    """The group of this rank among lists of ranks; every rank makes all of them."""
    groups = [(ranks, dist.new_group(ranks)) for ranks in lists]
    return next(group for ranks, group in groups if dist.get_rank() in ranks)


def operator_of(contender: RingContender, buffers: BufferPool) -> TwoDAttention:
    """The operator with all of its groups."""
    head, ring, rank = contender.head_parallel, contender.ring, contender.rank
    rings = [[rank(c, h) for c in range(ring)] for h in range(head)]
    heads = [[rank(c, h) for h in range(head)] for c in range(ring)]
    schedule, lanes = None, {}
    if contender.window is not None:
        schedule = DoubleRing(contender.window)
        for lane, kinds in zip(("inner", "outer"), schedule.groups(ring), strict=True):
            lanes[lane] = group_of([[r[i] for i in places] for r in rings for places in kinds])
    # With ranks out of order groups keep the order given, where a place is more than a number.
    return TwoDAttention(
        _ordered(heads) if head > 1 else None,
        _ordered(rings) if ring > 1 else None,
        gradient_group=_ordered(rings) if ring > 1 else None,
        schedule=schedule,
        lane_groups=lanes,
        buffers=buffers,
        backward_ring=contender.moves,
        check_agreement=False,
    )


def _ordered(lists: list[list[int]]) -> dist.ProcessGroup:
    assert all(ranks == sorted(ranks) for ranks in lists)
    return group_of(lists)


def time_rings(
    only: RingContender | None, rounds: int, links: LimitedLinks | None
) -> dict[str, Any]:
    """Samples by contender, and each one's difference from the first."""
    if links is not None:
        os.environ.update(links.enter(int(os.environ["RANK"])))
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    here, buffers = dist.get_rank(), BufferPool()
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(TOKENS, 1, HEADS, WIDTH, generator=generator) for _ in range(4)]
    contenders = [only] if only is not None else list(RINGS)
    runs: dict[str, Contender] = {}
    grids: dict[str, tuple[ZigzagGrid, int]] = {}
    for contender in contenders:
        grid = ZigzagGrid(contender.head_parallel, contender.ring)
        # Context-first this physical rank has the tokens of its logical place.
        logical = next(
            c * contender.head_parallel + h
            for c in range(contender.ring)
            for h in range(contender.head_parallel)
            if contender.rank(c, h) == here
        )
        data = [grid.split(tensor, logical) for tensor in whole]
        runs[contender.name] = Contender(operator_of(contender, buffers), data)
        grids[contender.name] = grid, logical
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for index in range(3 * rounds + 1):
        for name, run in runs.items():
            if len(quiet(samples[name])) >= rounds:
                continue
            one = sample(run)
            if index:  # the first round connects, allocates and faults pages in
                samples[name].append(one)
    return {"samples": samples, "differences": _differences(runs, grids)}


def _differences(runs: dict[str, Contender], grids: dict[str, tuple[ZigzagGrid, int]]) -> dict:
    """Of each contender's results, put together, from the first one's; relative."""
    wholes = {}
    for name, run in runs.items():
        grid, logical = grids[name]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (logical, run.results))
        parts = [results for _, results in sorted(everyone, key=lambda entry: entry[0])]
        wholes[name] = [grid.join(list(tensors)) for tensors in zip(*parts, strict=True)]
    first = next(iter(wholes.values()))
    return {
        name: max(
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(whole, first, strict=True)
        )
        for name, whole in wholes.items()
    }


def predicted(
    contender: RingContender, compute: dict[str, Any], bandwidth: float, *, backward: bool
) -> float:
    """Seconds by the overlap formula: per loop the longer of compute and transfer.

    ``T = n max(w max(T_comp, inner), outer)``, links inside a node free. Backward carries K and V
    as forward does, and the gradients of each block behind it, on the same link between nodes: at
    the end of every window once, and home at the end of all. Or Q, dO and two numbers per row, and
    dQ behind them.

    Args:
        contender: what is predicted.
        compute: medians of the plain ring where nothing waits for a link.
        bandwidth: of a rank's link to other nodes, bytes/s.
    """
    ring, head = contender.ring, contender.head_parallel
    step = compute["backward" if backward else "forward"] / ring
    # Heads are split over the head group: a ring position has as many bytes on each of its ranks.
    hop = block_bytes(ring) / head / bandwidth
    exchange = 0.0
    if contender.context_first:
        # The ring stays inside a node; four tensors, half of each, cross once.
        exchange = 4 * (TOKENS // 8) * HEADS * WIDTH * 4 * (head - 1) / head / bandwidth
        return ring * step + exchange
    window = contender.window or 1
    windows = ring // window
    if not backward:
        last = window * step  # nothing leaves in the last window
        return (windows - 1) * max(window * step, hop) + last
    home = hop
    if contender.moves == "queries":
        hop += 2 * (TOKENS // ring) * HEADS * 4 / bandwidth
        home /= 2
    # Blocks leave at a window's first step, their gradients after the last one.
    through = max(window * step, hop) if window > 1 else max(step, hop + home)
    return (windows - 1) * through + window * step + home


# --- memory -----------------------------------------------------------------------------------


def peak_bytes(window: int) -> dict[str, int]:
    """Peak live bytes of forward and of backward on this rank, buffers included."""
    ranks = dist.get_world_size()
    contender = RingContender("memory", 1, ranks, window if ranks > 1 else None)
    operator = operator_of(contender, BufferPool())
    rows, generator = MEMORY_TOKENS, torch.Generator().manual_seed(dist.get_rank())
    data = [torch.randn(rows, 1, HEADS, WIDTH, generator=generator) for _ in range(4)]
    leaves = [tensor.requires_grad_() for tensor in data[:3]]
    with LiveBytes() as live:
        live.include(leaves, data[3])
        out = operator(*leaves)
        forward = live.peak()
        live.reset_peak()
        out.backward(data[3])
        backward = live.peak()
    return {"forward": forward, "backward": backward, "block_bytes": 2 * rows * HEADS * WIDTH * 4}


# --- kept attention ---------------------------------------------------------------------------

KEEP_TOKENS, KEEP_HIDDEN, KEEP_HEADS, KEEP_LAYERS, KEEP_VOCABULARY = 32768, 512, 8, 2, 257


def kept_formula() -> int:
    """Bytes that both layers keep of attention: output in bf16, log-sum-exp in fp32."""
    tokens = KEEP_TOKENS // 2
    return KEEP_LAYERS * tokens * (2 * KEEP_HIDDEN + 4 * KEEP_HEADS)


def time_recompute(rounds: int, most_rounds: int) -> dict[str, Any]:
    """Samples of a step by what is recomputed; attention's passes; bytes that are kept."""
    from recompute_models import Training, start

    start(dist.get_world_size())
    steps = {
        name: _Step(Training(keep=keep))
        for name, keep in (("full recompute", False), ("attention kept", True))
    }
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    for step in steps.values():
        step.run()
    for _ in range(most_rounds):
        for name, step in steps.items():
            if len(quiet(samples[name])) < rounds:
                samples[name].append(sample(step))  # type: ignore[arg-type]
    losses = [step.loss for step in steps.values()]
    counted = {name: step.training.counted() for name, step in steps.items()}
    return {
        "samples": samples,
        "forwards": {name: forwards for name, (forwards, _) in counted.items()},
        "kept_bytes": {name: held for name, (_, held) in counted.items()},
        "loss_difference": abs(losses[0] - losses[1]) / losses[0],
    }


class _Step:
    """A training step as :func:`attention_contenders.sample` times it."""

    def __init__(self, training: Any) -> None:
        self.training = training
        self.loss = 0.0

    def run(self) -> tuple[float, float, float]:
        processors, started = time.process_time(), time.perf_counter()
        self.loss = self.training.step(KEEP_TOKENS)
        return time.perf_counter() - started, 0.0, time.process_time() - processors


# --- rounding ---------------------------------------------------------------------------------

ROUNDING_TOKENS, ROUNDING_HEADS, ROUNDING_WIDTH = 1024, 2, 64


def errors_by_ring(rings: tuple[int, ...]) -> dict[int, list[float]]:
    """Errors of out, dQ, dK and dV in bf16 against fp64, as a ring of so many ranks computes them.

    In the Euclidean norm, relative.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (ROUNDING_TOKENS, 1, ROUNDING_HEADS, ROUNDING_WIDTH)
    data = [torch.randn(shape, generator=generator).bfloat16() for _ in range(4)]
    exact = _dense(*(tensor.double() for tensor in data))
    return {
        ring: [
            float((ours.double() - right).norm() / right.norm())
            for ours, right in zip(_simulated_ring(data, ring), exact, strict=True)
        ]
        for ring in rings
    }


def _dense(query: Tensor, key: Tensor, value: Tensor, out_gradient: Tensor) -> list[Tensor]:
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * query.shape[-1] ** -0.5
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    out = torch.einsum("bhqk,kbhd->qbhd", weights, value)
    return [out.detach(), *torch.autograd.grad(out, leaves, out_gradient)]


def _simulated_ring(data: list[Tensor], ring: int) -> list[Tensor]:
    """(out, dQ, dK, dV) of the whole sequence, in the order of sums of ``ring`` ranks."""
    grid, rows, cpu = ZigzagGrid(1, ring), ROUNDING_TOKENS // ring, torch.device("cpu")
    scale, kernel = ROUNDING_WIDTH**-0.5, choose_kernel("aten", data[0].dtype, cpu)
    q, k, v, dout = ([grid.split(tensor, rank) for rank in range(ring)] for tensor in data)
    outs, dqs = [], []
    sums = [[torch.zeros_like(t, dtype=torch.float32) for t in part] for part in (k, v)]
    for here in range(ring):
        softmax = OnlineSoftmax(
            rows, 1, ROUNDING_HEADS, ROUNDING_WIDTH, dtype=torch.float32, device=cpu
        )
        plan = [
            (owner, part)
            for owner in ((here - step) % ring for step in range(ring))
            for part in grid.block_mask(here, owner, rows)
        ]
        for owner, part in plan:
            out, lse = kernel.forward(
                q[here][part.queries],
                k[owner][part.keys],
                v[owner][part.keys],
                causal=part.causal,
                scale=scale,
            )
            softmax.merge(out, lse, part.queries)
        merged, lse = softmax.result()
        outs.append(merged.to(data[0].dtype))
        dq = torch.zeros_like(merged)
        for owner, part in plan:
            terms = kernel.backward(
                dout[here][part.queries],
                q[here][part.queries],
                k[owner][part.keys],
                v[owner][part.keys],
                outs[here][part.queries],
                lse[..., part.queries],
                causal=part.causal,
                scale=scale,
            )
            dq[part.queries] += terms[0]
            for index in (0, 1):
                sums[index][owner][part.keys] += terms[1 + index]
        dqs.append(dq.to(data[0].dtype))
    columns = [outs, dqs, *([t.to(data[0].dtype) for t in part] for part in sums)]
    return [grid.join(parts) for parts in columns]
