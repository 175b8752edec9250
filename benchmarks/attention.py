"""2D attention against one process, DeepSpeed-Ulysses, and a ring that keeps everything.

    make bench-attention              the full run: 16K tokens, 8 heads of 64, fp32, causal
    python benchmarks/attention.py --tokens 4096 --rounds 3

Prints a table and writes ``benchmarks/results/attention.json``: ``rows`` (raw times, counted bytes,
shapes) and ``figures``. What is compared runs in the same two processes, one after the other in
every round. Rounds go on until each contender has had enough of them while others used hardly any
of the machine; figures are ratios of medians over those. A row that could not be run says why and
has no figure.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first dispatch mode imports it: here, once for all forked ranks
import torch.distributed as dist
from attention_contenders import (
    HEADS,
    ONE_PROCESS,
    OURS,
    ULYSSES,
    WIDTH,
    grid_groups,
    quiet,
    timings,
)
from torch import Tensor
from written_results import write_results

from megatron_longseq.attention_2d import TwoDAttention, attention_traffic
from megatron_longseq.communication import BufferPool, Ring
from megatron_longseq.communication.transport import HEAD_EXCHANGE, RING_BLOCKS, RING_GRADIENTS
from megatron_longseq.launch import RankPool
from megatron_longseq.measurement import LiveBytes, TrafficCounter
from megatron_longseq.softmax import AtenKernel, OnlineSoftmax
from megatron_longseq.token_layout import ZigzagGrid

RESULTS = Path(__file__).parent / "results" / "attention.json"
STREAMS = (HEAD_EXCHANGE, RING_BLOCKS, RING_GRADIENTS)
# A contender whose output or gradients differ by more from one process in fp32 is void.
AGREEMENT = 1e-4


def keep_everything(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
    """A ring forward that keeps every received block and every partial output until the end.

    An emulation, in our engine, of how TransformerEngine's p2p forward holds memory.
    """
    layout, kernel, rows = ZigzagGrid(1, ring.size), AtenKernel(), query.shape[0]
    kept, partials = [], []
    for owner, (k, v) in ring.circulate(key, value):
        kept.append((k.clone(), v.clone()) if owner != ring.position else (k, v))
        for part in layout.block_mask(ring.position, owner, rows):
            block = kernel.forward(
                query[part.queries],
                kept[-1][0][part.keys],
                kept[-1][1][part.keys],
                causal=part.causal,
                scale=WIDTH**-0.5,
            )
            partials.append((*block, part.queries))
    softmax = OnlineSoftmax(
        rows, query.shape[1], HEADS, WIDTH, dtype=torch.float32, device=query.device
    )
    for out, lse, queries in partials:
        softmax.merge(out.clone(), lse.clone(), queries)
    return softmax.result()[0]


def memory(tokens_per_rank: int) -> dict[str, int]:
    """Peak live bytes of this rank beyond inputs and outputs, on a ring of all ranks."""
    shape = (tokens_per_rank, 1, HEADS, WIDTH)
    leaves = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    out_gradient = torch.randn(shape)
    operator = TwoDAttention(None, dist.group.WORLD)
    with LiveBytes().include(leaves, out_gradient) as live:
        given = live.current()
        out = operator(*leaves)
        forward = live.peak() - given - out.nbytes
        live.reset_peak()
        out.backward(out_gradient)
        gradients = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
        backward = live.peak() - given - out.nbytes - gradients
    ring = Ring(dist.group.WORLD, BufferPool())
    query, key, value = inputs = [leaf.detach() for leaf in leaves]
    with LiveBytes().include(inputs) as live:
        given = live.current()
        out = keep_everything(query, key, value, ring)
        emulated = live.peak() - given - out.nbytes
    return {"forward": forward, "backward": backward, "emulated_forward": emulated}


def traffic(grids: list[tuple[int, int]], tokens_per_rank: int) -> list[dict[str, Any]]:
    """Counted messages and bytes of this rank beside the formulas, for MHA, GQA and MQA."""
    rows = []
    for head_parallel, ring in grids:
        operator = TwoDAttention(*grid_groups(head_parallel, ring))
        for groups in (HEADS, 2, 1):
            leaves = [
                torch.randn(tokens_per_rank, 1, heads, WIDTH, requires_grad=True)
                for heads in (HEADS, groups, groups)
            ]
            with TrafficCounter({stream.tag: stream.name for stream in STREAMS}) as counter:
                out = operator(*leaves)
                for direction in ("forward", "backward"):
                    if direction == "backward":
                        counter.reset()
                        out.backward(torch.ones_like(out))
                    formula = attention_traffic(
                        tokens=tokens_per_rank,
                        batch=1,
                        query_heads=HEADS,
                        key_heads=groups,
                        width=WIDTH,
                        value_width=WIDTH,
                        head_parallel=head_parallel,
                        ring=ring,
                        element_bytes=4,
                        gradient_bytes=4,
                        backward=direction == "backward",
                    )
                    expected = (
                        formula.head_exchange,
                        formula.ring_blocks,
                        formula.ring_gradients,
                    )
                    for stream, count in zip(STREAMS, expected, strict=True):
                        sent = counter.traffic.total(stream=stream.name, operation="send")
                        rows.append(
                            {
                                "grid": f"{head_parallel} x {ring}",
                                "key_heads": groups,
                                "direction": direction,
                                "stream": stream.name,
                                "messages": sent.messages,
                                "bytes": sent.bytes_sent,
                                "formula_messages": count.messages,
                                "formula_bytes": count.bytes,
                            }
                        )
    return rows


def same_on_ranks(counted: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The traffic rows of all ranks; those that are equal once, with the ranks they hold for."""
    holders: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for rank, own in enumerate(counted):
        for row in own:
            holders.setdefault(json.dumps(row), (row, []))[1].append(rank)
    return [{"kind": "traffic", "ranks": ranks} | row for row, ranks in holders.values()]


def timing_rows(per_rank: list[dict[str, Any]], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """One row per contender, with the times of every round and medians."""
    measured = per_rank[0]
    enough = all(len(quiet(samples)) >= rounds for samples in measured["samples"].values())
    rows = []
    for name in (ONE_PROCESS, *OURS, ULYSSES):
        row: dict[str, Any] = {"kind": "time", "name": name, "tokens": tokens}
        row |= {"heads": HEADS, "width": WIDTH, "dtype": "float32", "causal": True}
        if name in measured["not_run"]:
            rows.append(row | {"not_run": measured["not_run"][name]})
            continue
        samples = measured["samples"][name]
        counted = quiet(samples) if enough else samples
        row |= {"samples": samples, "counted_samples": len(counted), "quiet_machine": enough}
        for key in ("forward", "backward", "seconds", "processors"):
            row[f"median_{key}"] = statistics.median(one[key] for one in counted)
        row["difference"] = max(rank["differences"][name] for rank in per_rank)
        if row["difference"] > AGREEMENT:
            row["not_run"] = f"void: results differ from one process by {row['difference']:.1e}"
        rows.append(row)
    return rows


def make_figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures, from the rows that have been run."""
    medians = {
        row["name"]: row["median_seconds"]
        for row in rows
        if row["kind"] == "time" and "not_run" not in row
    }
    figures: dict[str, Any] = {}
    ours = [medians[name] for name in OURS if name in medians]
    if len(ours) == len(OURS):
        figures["over_one_process_min"] = medians[ONE_PROCESS] / max(ours)
        if ULYSSES in medians:
            figures["over_deepspeed_ulysses_min"] = medians[ULYSSES] / max(ours)
            figures["over_deepspeed_ulysses_best"] = medians[ULYSSES] / min(ours)
    held = {row["ring"]: row for row in rows if row["kind"] == "memory"}
    for phase in ("forward", "backward", "emulated_forward"):
        figures[f"{phase}_bytes_ring8_over_ring2"] = held[8][phase] / held[2][phase]
    counts = [row for row in rows if row["kind"] == "traffic"]
    figures["traffic_equals_formula"] = all(
        (row["messages"], row["bytes"]) == (row["formula_messages"], row["formula_bytes"])
        for row in counts
    )
    return figures


def print_table(rows: list[dict[str, Any]], figures: dict[str, Any]) -> None:
    """The rows a person reads, then the figures."""
    print(f"\n{'':30} {'forward':>9} {'backward':>9} {'together':>9} {'processors':>11} rounds")
    for row in (row for row in rows if row["kind"] == "time"):
        if "samples" not in row:
            print(f"{row['name']:30} not run: {row['not_run']}")
            continue
        columns = (row[f"median_{key}"] for key in ("forward", "backward", "seconds"))
        print(
            f"{row['name']:30} {' '.join(f'{column:8.3f}s' for column in columns)}"
            f" {row['median_processors']:10.3f}s {row['counted_samples']:6}"
            f"{'' if row['quiet_machine'] else ' (others used the machine)'}"
            f"{'  ' + row['not_run'] if 'not_run' in row else ''}"
        )
    print(
        f"\n{'peak MB beyond inputs, outputs':30} {'forward':>9} {'backward':>9}   keep everything"
    )
    for row in (row for row in rows if row["kind"] == "memory"):
        print(
            f"{'ring of ' + str(row['ring']):30} {row['forward'] / 1e6:9.2f} "
            f"{row['backward'] / 1e6:9.2f} {row['emulated_forward'] / 1e6:9.2f} (emulation)"
        )
    print()
    for name, value in figures.items():
        print(f"{name:42} {value if isinstance(value, bool) else format(value, '.3f')}")


def main() -> None:
    """Runs everything and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384, help="of the whole sequence")
    parser.add_argument("--rounds", type=int, default=5, help="quiet rounds wanted, after a first")
    parser.add_argument("--most-rounds", type=int, default=20, help="rounds after which to give up")
    parser.add_argument("--memory-tokens", type=int, default=512, help="per rank")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with RankPool() as pool:

        def run(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
            return pool.run(
                function, world_size=ranks, args=args, backend="gloo", timeout_seconds=3600
            )

        per_rank = run(timings, 2, options.tokens, options.rounds, options.most_rounds)
        rows = timing_rows(per_rank, options.tokens, options.rounds)
        for ring in (2, 4, 8):
            peaks = run(memory, ring, options.memory_tokens)
            worst = {key: max(peak[key] for peak in peaks) for key in peaks[0]}
            rows.append(
                {"kind": "memory", "ring": ring, "tokens_per_rank": options.memory_tokens} | worst
            )
        for grids in ([(1, 2), (2, 1)], [(1, 4), (2, 2), (4, 1)], [(1, 8), (2, 4), (8, 1)]):
            counted = run(traffic, grids[0][0] * grids[0][1], grids, 64)
            rows += same_on_ranks(counted)
    figures = make_figures(rows)
    print_table(rows, figures)
    write_results(options.output, figures, rows)


if __name__ == "__main__":
    main()
