"""Speed of METP and of TP+SP: a training step over loopback and over a limited link; traffic.

Step times are compared only where results agree, in rounds of which the quiet ones count.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from attention_contenders import quiet, sample
from metp_models import (
    FFN,
    HEADS,
    HIDDEN,
    METP,
    TP_SP,
    VOCABULARY,
    Training,
    start,
    total_difference,
)
from torch import Tensor
from torch.nn.functional import gelu, linear

from megatron_longseq.communication.transport import RING_BLOCKS, RING_GRADIENTS
from megatron_longseq.measurement import LimitedLinks, TrafficCounter
from megatron_longseq.metp.head_groups import HeadGroupAttention, HeadGroups
from megatron_longseq.metp.matmul_chain import RingMatmulChain
from megatron_longseq.metp.traffic import (
    PassTraffic,
    embedding_traffic,
    head_group_traffic,
    matmul_chain_traffic,
    vocabulary_loss_traffic,
)
from megatron_longseq.softmax import AtenKernel

LAYERS = 2
# FLOP/s over bytes/s of an A100 (312 TFLOP/s in bf16) behind 200 Gb/s.
A100_OVER_200_GBIT = 12_500
WEIGHTS, GRADIENTS, KV, KV_GRADIENTS = (
    f"LONGSEQ_METP_{name}_GROUP" for name in ("WEIGHTS", "GRADIENTS", "KV", "KV_GRADIENTS")
)


# --- time of a step ---------------------------------------------------------------------------


class Step:
    """A training step as :func:`attention_contenders.sample` times it."""

    def __init__(self, training: Training, sequence: int) -> None:
        self.training = training
        self.sequence = sequence
        self.loss = 0.0

    def run(self) -> tuple[float, float, float]:
        """Seconds of the step, none of a second part, and of all processors."""
        processors, started = time.process_time(), time.perf_counter()
        self.loss = self.training.step(self.sequence)
        return time.perf_counter() - started, 0.0, time.process_time() - processors


def step_times(
    ranks: int, sequences: list[int], rounds: int, most_rounds: int, links: LimitedLinks | None
) -> dict[str, Any]:
    """Samples of a step of METP and of TP+SP by sequence, their difference, and rates.

    By turns, until each has ``rounds`` samples in which others left the machine alone, or
    ``most_rounds`` are over.
    """
    if links is not None:
        os.environ.update(links.enter(int(os.environ["RANK"])))
        dist.init_process_group("gloo")
    found: dict[str, Any] = {"rates": rates(), "samples": {}, "difference": {}}
    start(ranks)
    steps = [
        Step(Training(contender, layers=LAYERS, sequence=max(sequences)), 0)
        for contender in (TP_SP, METP)
    ]
    for step in steps:
        step.training.step(1024)  # connects, and makes the optimizer's state
    for sequence in sequences:
        samples: dict[str, list[dict[str, float]]] = {}
        losses, gradients = [], []
        for index in range(most_rounds):
            for step in steps:
                own = samples.setdefault(step.training.contender.name, [])
                if len(quiet(own)) >= rounds:
                    continue
                step.sequence = sequence
                own.append(sample(step))  # type: ignore[arg-type]
                if index == 0:
                    losses.append(step.loss)
                    gradients.append(step.training.gradients())
        found["samples"][sequence] = samples
        found["difference"][sequence] = max(
            abs(losses[1] - losses[0]) / losses[0], total_difference(gradients[1], gradients[0])
        )
    return found


def rates() -> dict[str, float]:
    """FLOP/s of products and of attention while all ranks compute, bytes/s to the next rank."""
    x, w = torch.randn(4096, HIDDEN).bfloat16(), torch.randn(1024, HIDDEN).bfloat16()
    q = torch.randn(2048, 1, HEADS // 2, 64).bfloat16()
    message = torch.zeros(1 << 20, dtype=torch.uint8)

    def exchange() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        works = [
            dist.irecv(torch.empty_like(message), (rank - 1) % size),
            dist.isend(message, (rank + 1) % size),
        ]
        for work in works:
            work.wait()

    def attention() -> None:
        AtenKernel().forward(q, q, q, causal=False, scale=0.1)

    return {
        "product": _per_second(lambda: linear(x, w), 2 * x.numel() * w.shape[0]),
        "attention": _per_second(attention, 4 * 2048**2 * HIDDEN // 2),
        "link": _per_second(exchange, message.numel()),
    }


def _per_second(call: Callable[[], Any], work: int) -> float:
    """The best of some tries: what disturbs a rate makes it smaller."""
    best, calls = 0.0, 4
    for _ in range(8):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        best = max(best, calls * work / (time.perf_counter() - started))
    return best


def predicted_seconds(contender: str, ranks: int, sequence: int, rate: dict[str, float]) -> float:
    """Seconds of a step, causal, MHA, from the rates; per loop the longer of work and transfer.

    What TP+SP sends is taken as exposed, all of it. METP's is hidden as far as the work of a step
    lasts, but for the last hop home of every gradient, which nothing hides.
    """
    n, h, f, p = sequence // ranks, HIDDEN, FFN, ranks
    gemm, attention, link = rate["product"], rate["attention"], rate["link"]
    scores = 4 * sequence * n * h / 2 / attention  # of one layer forward: causal, half of all
    if contender != "METP":
        work = 3 * (2 * n * (4 * h * h + 2 * h * f)) / gemm + 3.5 * scores
        transfer = 2 * 10 * sequence * h * (p - 1) / p / link
        vocabulary = 3 * 2 * n * h * VOCABULARY / gemm
        return LAYERS * (work + transfer) + vocabulary
    mlp = p * max(4 * n * h * f / p / gemm, 4 * h * f / p / link)
    mlp += p * max(10 * n * h * f / p / gemm, 12 * h * f / p / link)
    ring = p * p * max(scores / p / p, 4 * n * h / p / link)
    ring += p * p * max(2.5 * scores / p / p, 12 * n * h / p / link)
    home = (8 * n * h + 8 * h * f / p) / link
    projections = (3 * 8 + 6) * n * h * h / gemm  # and query, key and value once more
    loss = p * max(2 * n * h * VOCABULARY / p / gemm, 2 * VOCABULARY * h / p / link)
    loss += p * max(6 * n * h * VOCABULARY / p / gemm, 6 * VOCABULARY * h / p / link)
    return LAYERS * (mlp + ring + home + projections) + loss


# --- traffic ----------------------------------------------------------------------------------


def traffic(ranks: int, sequence: int) -> list[dict[str, Any]]:
    """Counted messages and bytes of this rank beside the formulas: METP's and TP+SP's layers."""
    rows = []
    tokens = sequence // ranks
    start(ranks)
    training = Training(METP, layers=LAYERS, sequence=sequence, optimizer=False)
    layer = training.inner.decoder.layers[0]
    x = torch.randn(tokens, 1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    names = {stream.tag: stream.name for stream in (RING_BLOCKS, RING_GRADIENTS)}
    with TrafficCounter(names) as counter:
        out, _ = layer(x, attention_mask=None)
        rows += _metp_rows("layer, forward", counter, _metp_layer(ranks, tokens, False))
        out.sum().backward()
        rows += _metp_rows("layer, backward", counter, _metp_layer(ranks, tokens, True))
        training.step(sequence)
        model = _metp_model(ranks, tokens, False) + _metp_model(ranks, tokens, True)
        rows += _metp_rows("model, a step", counter, model)
    training = Training(TP_SP, layers=1, sequence=sequence, optimizer=False)
    layer = training.inner.decoder.layers[0]
    gathered = sequence * HIDDEN * 2 * (ranks - 1) // ranks
    with TrafficCounter() as counter:
        for what, gathers, scatters in (("forward", 2, 2), ("backward", 4, 2)):
            if what == "forward":
                out, _ = layer(x, attention_mask=None)
            else:
                out.sum().backward()
            for operation, count in (("all_gather", gathers), ("reduce_scatter", scatters)):
                sent = counter.traffic.total(operation=operation)
                rows.append(
                    {"method": "TP+SP", "what": f"layer, {what}", "stream": operation}
                    | {"messages": sent.messages, "bytes": sent.bytes_sent}
                    | {"formula_messages": count * (ranks - 1), "formula_bytes": count * gathered}
                )
            counter.reset()
    return rows


def _metp_layer(ranks: int, tokens: int, backward: bool) -> PassTraffic:
    how = {"ranks": ranks, "hidden": HIDDEN, "element_bytes": 2, "gradient_bytes": 4}
    return matmul_chain_traffic(ffn=FFN, bias=True, backward=backward, **how) + head_group_traffic(
        tokens=tokens,
        batch=1,
        query_heads=HEADS,
        key_heads=HEADS,
        width=HIDDEN // HEADS,
        bias=True,
        backward=backward,
        **how,
    )


def _metp_model(ranks: int, tokens: int, backward: bool) -> PassTraffic:
    how = {"ranks": ranks, "hidden": HIDDEN, "vocabulary": VOCABULARY}
    how |= {"element_bytes": 2, "gradient_bytes": 4}
    total = embedding_traffic(backward=backward, **how)
    total += vocabulary_loss_traffic(tokens=tokens, batch=1, backward=backward, **how)
    for _ in range(LAYERS):
        total += _metp_layer(ranks, tokens, backward)
    return total


def _metp_rows(what: str, counter: TrafficCounter, formula: PassTraffic) -> list[dict[str, Any]]:
    """One row per stream; the counter starts anew."""
    streams = (
        ("weight ring", WEIGHTS, "send", formula.weight_ring),
        ("weight gradients", GRADIENTS, "send", formula.weight_gradients),
        ("weight broadcast", WEIGHTS, "broadcast", formula.weight_broadcast),
        ("weight sums", GRADIENTS, "reduce", formula.weight_sums),
        ("losses", WEIGHTS, "all_gather", formula.losses),
        ("K and V", KV, "send", formula.key_value_ring),
        ("dK and dV", KV_GRADIENTS, "send", formula.key_value_gradients),
    )
    counts = [
        (name, counter.traffic.total(group=group, operation=operation), expected)
        for name, group, operation, expected in streams
    ]
    counter.reset()
    return [
        {"method": "METP", "what": what, "stream": name, "messages": sent.messages}
        | {"bytes": sent.bytes_sent, "formula_messages": expected.messages}
        | {"formula_bytes": expected.bytes}
        for name, sent, expected in counts
    ]


# --- error of weight gradients ----------------------------------------------------------------


def gradient_errors(ranks: int, sequence: int) -> dict[str, float]:
    """Relative errors of METP's weight gradients in bf16 against fp64 in one process.

    As they have added up, in fp32, before they are rounded to bf16. Not causal, so that tokens
    need no zigzag.
    """
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    x, dy = draw(sequence, HIDDEN), draw(sequence, HIDDEN)
    w1, w2 = draw(FFN, HIDDEN, scale=0.04), draw(HIDDEN, FFN, scale=0.02)
    qkv, proj = draw(HEADS, 192, HIDDEN, scale=0.04), draw(HIDDEN, HIDDEN, scale=0.04)
    expected = _expected_gradients(x, dy, w1, w2, qkv, proj)
    rows = slice(rank * sequence // ranks, (rank + 1) * sequence // ranks)
    own = [
        w1.chunk(ranks)[rank].clone(),
        w2.chunk(ranks, 1)[rank].clone(),
        qkv.flatten(0, 1).chunk(ranks)[rank].clone(),
        proj.chunk(ranks, 1)[rank].clone(),
    ]
    for weight in own:
        weight.requires_grad_()
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    part = x[rows].unsqueeze(1).clone().requires_grad_()
    given = dy[rows].unsqueeze(1)
    chain = RingMatmulChain(dist.group.WORLD)
    chain(part, own[0], own[1], f=gelu, fused_gradients=True).backward(given)
    heads = HeadGroups(
        to_heads=lambda mixed: mixed.unflatten(2, (-1, 192)).split(64, 3),  # type: ignore[arg-type]
        kernel=AtenKernel(),
        causal=False,
        scale=0.125,
        fused_gradients=True,
    )
    world = dist.group.WORLD
    HeadGroupAttention(world, world, world)(part, own[2], None, own[3], heads).backward(given)
    shards = (
        expected[0].chunk(ranks)[rank],
        expected[1].chunk(ranks, 1)[rank],
        expected[2].flatten(0, 1).chunk(ranks)[rank],
        expected[3].chunk(ranks, 1)[rank],
    )
    errors = {}
    for name, weight, right in zip(("W1", "W2", "Wqkv", "Wproj"), own, shards, strict=True):
        wrong = weight.main_grad.double() - right  # type: ignore[attr-defined]
        sums = torch.stack([wrong.square().sum(), right.square().sum()])
        dist.all_reduce(sums)
        errors[name] = float((sums[0] / sums[1]).sqrt())
    return errors


def _expected_gradients(
    x: Tensor, dy: Tensor, w1: Tensor, w2: Tensor, qkv: Tensor, proj: Tensor
) -> tuple[Tensor, ...]:
    x, dy = x.double(), dy.double()
    w1, w2, qkv, proj = (w.double().requires_grad_() for w in (w1, w2, qkv, proj))
    gelu(x @ w1.t()).matmul(w2.t()).backward(dy)
    q, k, v = torch.einsum("sh,aoh->aso", x, qkv).split(64, 2)
    out = torch.softmax(q @ k.transpose(1, 2) * 0.125, -1) @ v
    out.transpose(0, 1).flatten(1).matmul(proj.t()).backward(dy)
    return tuple(w.grad for w in (w1, w2, qkv, proj))  # type: ignore[misc]
