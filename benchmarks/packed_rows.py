"""Packed documents against a dense row: useful attention FLOP/s on the same ranks.

    python benchmarks/packed_rows.py --tokens 16384 --ranks 4

A packed row of at least 30 documents, lengths log-uniform from 64 to a quarter of the row, is
attended to document by document (whole-row zigzag, documents cut anywhere); the dense row is one
causal document. FLOPs that count are those of pairs that see each other, 4 d forward and 10 d
backward per pair and head; a rate is that over the time of the slowest rank, forward and backward.
Both run by turns in every round, and the rates are of the fastest rounds. On a machine that others
use too, compare the rates over processor time, which leave out how the work is shared among ranks.
"""

import argparse
import math
import random
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from megatron_longseq.attention_2d import TwoDAttention
from megatron_longseq.launch import RankPool
from megatron_longseq.softmax import Mask, MaskPlan, PackedDocuments

LEAST_DOCUMENTS, SHORTEST = 30, 64
HEADS, WIDTH = 8, 64
# Two products forward, five backward; a multiplication and an addition each.
FLOPS_PER_PAIR = 14


def documents(tokens: int, seed: int = 0) -> list[int]:
    """Boundaries of a row of at least 30 documents; the last one ends with the row.

    Rows are drawn until one has as many: short of 64K tokens most have fewer.
    """
    draw = random.Random(seed)
    low, high = math.log(SHORTEST), math.log(tokens / 4)
    while True:
        ends = [0]
        while tokens - ends[-1] > SHORTEST:
            ends.append(ends[-1] + round(math.exp(draw.uniform(low, high))))
        ends[-1] = tokens
        if len(ends) > LEAST_DOCUMENTS and ends[-2] < tokens:
            return ends


def pairs_of(boundaries: list[int]) -> int:
    """Pairs of tokens that see each other, causally, inside documents."""
    return sum(n * (n + 1) // 2 for n in (high - low for low, high in pairwise(boundaries)))


def seconds(tokens: int, boundaries: list[int], rounds: int) -> dict[str, list[list[float]]]:
    """Of the packed and of the dense row, per round: seconds of the slowest rank, and processor
    seconds of all ranks."""
    operator = TwoDAttention(None, dist.group.WORLD)
    here = tokens // dist.get_world_size()
    leaves = [torch.randn(here, 1, HEADS, WIDTH, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(here, 1, HEADS, WIDTH)
    found: dict[str, list[list[float]]] = {"packed": [], "dense": []}
    for number in range(rounds + 1):
        for name, options in (("packed", {"cu_seqlens": boundaries}), ("dense", {})):
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            operator(*leaves, **options).backward(gradient)
            took = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            processor = torch.tensor(time.process_time() - used, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            dist.all_reduce(processor)
            if number > 0:  # the first round warms up
                found[name].append([took.item(), processor.item()])
    return found


def packed_over_dense(
    run: Callable[..., list[Any]],
    *,
    tokens: int = 16384,
    ranks: int = 4,
    rounds: int = 5,
    seed: int = 0,
) -> dict[str, Any]:
    """The row of this comparison: documents, times, and ``packed_over_dense_rate``.

    Args:
        run: ``run(function, ranks, *args, backend=..)`` returns the results of the ranks.
    """
    boundaries = documents(tokens, seed)
    per_rank = run(seconds, ranks, tokens, boundaries, rounds, backend="gloo")
    times = per_rank[0]
    useful = {"packed": pairs_of(boundaries), "dense": pairs_of([0, tokens])}
    rates, over_processors = (
        {
            name: FLOPS_PER_PAIR * HEADS * WIDTH * useful[name] / min(t[which] for t in times[name])
            for name in useful
        }
        for which in (0, 1)
    )
    plan = MaskPlan(Mask(documents=PackedDocuments.whole_row(boundaries)), ranks, tokens // ranks)
    return {
        "kind": "packed",
        "tokens": tokens,
        "ranks": ranks,
        "documents": len(boundaries) - 1,
        "boundaries": boundaries,
        "blocks_seen": len(plan.offsets),
        "largest_share_of_a_rank": _largest_share(plan),
        "seconds_and_processor_seconds": times,
        "useful_flops_per_second": rates,
        "packed_over_dense_rate": rates["packed"] / rates["dense"],
        "packed_over_dense_per_processor_second": over_processors["packed"]
        / over_processors["dense"],
    }


def _largest_share(plan: MaskPlan) -> float:
    """Work of the busiest rank over the mean: what the documents leave unbalanced."""
    ring = plan.grid.ring
    work = [plan.pairs(position) for position in range(ring)]
    return max(work) * ring / sum(work)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with RankPool() as pool:

        def run(function: Callable[..., Any], ranks: int, *args: Any, backend: str) -> list[Any]:
            return pool.run(
                function, world_size=ranks, args=args, backend=backend, timeout_seconds=3600
            )

        row = packed_over_dense(run, **vars(options))
    for name, value in row.items():
        print(f"{name:40} {value}")


if __name__ == "__main__":
    main()
