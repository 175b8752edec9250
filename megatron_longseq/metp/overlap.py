"""When METP's communication hides behind its compute: the conditions, and this machine's numbers.

Each loop of METP has the next message on its way while it computes with the last one. It is hidden
if a step's bytes take no longer than a step's floating-point operations:

    bytes of a step / link bytes per second  <=  FLOPs of a step / FLOP per second

With R = FLOP/s over link bytes/s, n tokens on a rank, p ranks, 16-bit messages and fp32 gradients:

    MLP forward                n >= R            backward      n >= 1.2 R
    K/V ring forward, full     s/p >= (k/h) R    causal        s/p >= 2 (k/h) R
    K/V ring backward, full    s/p >= 1.2 (k/h) R    causal    s/p >= 2.4 (k/h) R

h is the width of all query heads, k of all key heads. Derived in ``docs/metp.md``.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..communication.ring import Ring, accumulation_dtype
from ..softmax.block_kernels import BlockKernel

# What a measurement at start-up may take: operations of one product, bytes of one message.
MOST_OPERATIONS = 4e9
MOST_BYTES = 4 * 2**20
REPEATS = 3


@dataclass(frozen=True)
class LayerShape:
    """One layer as one rank computes it.

    Attributes:
        rows: tokens of a sequence on this rank.
        batch: sequences of a micro-batch.
        hidden, query_width, kv_width, ffn: of the whole layer; ``heads x width`` for the second
            and the third.
        vocabulary: of the whole output layer, padded.
        gated: the MLP's first weight is twice as wide.
        weight_ranks: among which the weights are split.
        token_ranks: among which the tokens are split.
        shards_per_step: of attention's outer loop.
        causal: half of the scores are computed.
        element_bytes, gradient_bytes: per element of weights, K and V, and of their gradients.
    """

    rows: int
    batch: int
    hidden: int
    query_width: int
    kv_width: int
    ffn: int
    vocabulary: int
    gated: bool
    weight_ranks: int
    token_ranks: int
    shards_per_step: int
    causal: bool
    element_bytes: int
    gradient_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch on this rank."""
        return self.rows * self.batch


@dataclass(frozen=True)
class Machine:
    """What one rank achieves.

    Attributes:
        product_flops: FLOP/s in a matrix product of the MLP's shape.
        attention_flops: FLOP/s of the attention kernel.
        link_bytes: bytes/s that a rank sends to its neighbour while another sends to it.
    """

    product_flops: float
    attention_flops: float
    link_bytes: float

    @property
    def ratio(self) -> float:
        """R: FLOP/s in products over link bytes/s, a number of tokens."""
        return self.product_flops / self.link_bytes


@dataclass(frozen=True)
class Loop:
    """One step of a loop: what it computes and what it sends meanwhile.

    Attributes:
        grows_with: which count of tokens the compute grows with faster than the messages:
            ``tokens`` of the micro-batch or ``rows`` of the sequence; empty if both matter.
        has: that count, on this rank.
    """

    name: str
    compute_seconds: float
    communication_seconds: float
    grows_with: str = ""
    has: int = 0

    @property
    def hidden(self) -> bool:
        """Whether the messages take no longer than the compute."""
        return self.communication_seconds <= self.compute_seconds

    @property
    def needs(self) -> int:
        """From how many of ``grows_with`` on the loop is hidden."""
        return round(self.has * self.communication_seconds / self.compute_seconds)


def loops(shape: LayerShape, machine: Machine) -> list[Loop]:
    """The loops of METP, each with the times of one of its steps."""
    part = shape.hidden / shape.weight_ranks
    step = shape.shards_per_step / shape.weight_ranks
    tokens, both = shape.tokens, shape.element_bytes + shape.gradient_bytes
    mlp = (3 if shape.gated else 2) * part * shape.ffn
    # Scores and their sum over values: two products of rows x rows x width.
    scores = 4 * shape.rows**2 * shape.batch * shape.query_width * step
    scores *= 0.5 if shape.causal else 1.0
    block = 2 * tokens * shape.kv_width * step
    mixed = shape.hidden * (shape.query_width + 2 * shape.kv_width) * step
    projection = shape.hidden * shape.query_width * step
    vocabulary = part * shape.vocabulary

    def seconds(products: float, attention: float = 0.0) -> float:
        return products / machine.product_flops + attention / machine.attention_flops

    def link(byte_count: float) -> float:
        return byte_count / machine.link_bytes

    # First weight recomputed, both input gradients, both weight gradients.
    mlp_back = (16 if shape.gated else 10) * tokens * part * shape.ffn
    # All blocks of the inner ring, then the products around it.
    group = seconds(2 * tokens * (mixed + projection), shape.token_ranks * scores)
    group_back = seconds(
        2 * tokens * (3 * mixed + 2 * projection), 2.5 * shape.token_ranks * scores
    )
    inner = (shape.token_ranks - 1) * block * shape.element_bytes
    inner_back = inner + shape.token_ranks * block * shape.gradient_bytes
    shard = mixed + projection
    return [
        Loop(
            "MLP forward",
            seconds(2 * tokens * mlp),
            link(mlp * shape.element_bytes),
            "tokens",
            tokens,
        ),
        Loop("MLP backward", seconds(mlp_back), link(mlp * both), "tokens", tokens),
        Loop(
            "K/V ring forward",
            seconds(0, scores),
            link(block * shape.element_bytes),
            "rows",
            shape.rows,
        ),
        Loop("K/V ring backward", seconds(0, 2.5 * scores), link(block * both), "rows", shape.rows),
        Loop(
            "attention forward (weights and K/V on one link)",
            group,
            link(shard * shape.element_bytes + inner),
        ),
        Loop(
            "attention backward (weights, K/V and gradients on one link)",
            group_back,
            link(shard * both + inner_back),
        ),
        Loop(
            "vocabulary loss forward",
            seconds(2 * tokens * vocabulary),
            link(vocabulary * shape.element_bytes),
            "tokens",
            tokens,
        ),
        Loop(
            "vocabulary loss backward",
            seconds(6 * tokens * vocabulary),
            link(vocabulary * both),
            "tokens",
            tokens,
        ),
    ]


def describe(shape: LayerShape, machine: Machine) -> list[str]:
    """The start-up lines: which loops are hidden, and from how many tokens the others would be."""
    hidden, shown = [], []
    for loop in loops(shape, machine):
        if loop.hidden:
            hidden.append(loop.name)
            continue
        what = {"tokens": "tokens per rank", "rows": "tokens of a sequence per rank"}
        needs = (
            f"hidden from {loop.needs} {what[loop.grows_with]}, here {loop.has}"
            if loop.grows_with
            else "hidden at longer sequences"
        )
        shown.append(
            f"METP shows {loop.name}: per step {_ms(loop.communication_seconds)} of messages "
            f"behind {_ms(loop.compute_seconds)} of compute; {needs}"
        )
    return [
        f"METP measured {machine.product_flops / 1e9:.4g} GFLOP/s in products, "
        f"{machine.attention_flops / 1e9:.4g} in attention, {machine.link_bytes / 1e9:.3g} GB/s "
        f"to a neighbour; R = {machine.ratio:.0f} tokens",
        "METP hides " + (", ".join(hidden) or "none of its loops"),
        *shown,
    ]


def measure(
    shape: LayerShape,
    *,
    ring: Ring,
    kernel: BlockKernel,
    head_width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Machine:
    """Times one product, one block of attention and one neighbour exchange. Collective.

    Returns:
        The slowest of the ring's ranks in each; medians of a few runs of bounded size.
    """
    width = max(1, shape.ffn // shape.weight_ranks)
    rows = _at_most(shape.tokens, MOST_OPERATIONS / (2 * shape.hidden * width))
    left = torch.randn(rows, shape.hidden, dtype=dtype, device=device)
    right = torch.randn(shape.hidden, width, dtype=dtype, device=device)
    product = _median(lambda: left @ right, device)

    heads = max(1, shape.query_width * shape.shards_per_step // shape.weight_ranks // head_width)
    length = _at_most(shape.rows, (MOST_OPERATIONS / (4 * heads * head_width)) ** 0.5)
    query = torch.randn(length, 1, heads, head_width, dtype=dtype, device=device)
    attention = _median(
        lambda: kernel.forward(query, query, query, causal=False, scale=head_width**-0.5), device
    )

    elements = int(min(MOST_BYTES, shape.element_bytes * 2 * shape.hidden * width))
    message = torch.zeros(elements // dtype.itemsize, dtype=dtype, device=device)

    def exchange() -> None:
        for _ in ring.circulate(message):
            pass

    sent = max(1, ring.size - 1) * message.nbytes
    slowest = torch.tensor([product, attention, _median(exchange, device)], device=device)
    if ring.place.group is not None:
        dist.all_reduce(slowest, dist.ReduceOp.MAX, ring.place.group)
    product, attention, exchanged = slowest.tolist()
    return Machine(
        2 * rows * shape.hidden * width / product,
        4 * length * length * heads * head_width / attention,
        sent / exchanged,
    )


def gradient_bytes(dtype: torch.dtype) -> int:
    """Per element of a gradient on its way."""
    return accumulation_dtype(dtype).itemsize


def _at_most(count: int, most: float) -> int:
    return max(1, min(count, int(most)))


def _median(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of ``work``, after one run that is not counted."""
    seconds = []
    for _ in range(REPEATS + 1):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
