"""2D attention at scale: double rings over slow links, memory, kept attention, packed rows.

    make bench-attention-at-scale                              all parts; needs root for the links
    python benchmarks/attention_at_scale.py --only ring keep

Prints tables and writes ``benchmarks/results/attention_at_scale.json``: ``rows`` (raw times,
counted bytes) and ``figures``; parts left out keep the rows they had. What is compared runs in the
same processes, in turn in every round; figures are ratios of medians over the rounds during which
others left the machine alone, or over all and said so.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import at_scale_parts as parts
from attention_contenders import quiet
from written_results import write_results

from megatron_longseq.launch import RankPool
from megatron_longseq.launch.training import PRELOAD, preload
from megatron_longseq.measurement import LimitedLinks, links_available

RESULTS = Path(__file__).parent / "results" / "attention_at_scale.json"
RANKS, NODES = 8, [[0, 1, 2, 3], [4, 5, 6, 7]]
# Communication over compute of a plain ring on 64 GPUs, as LoongTrain (arXiv 2406.18485) reports.
RING_COMMUNICATION = 1.8
# Of a bf16 result's error against fp64 rings of 64 and of 1.
RINGS = (1, 2, 4, 8, 16, 32, 64)
# Of packed rows.
PACKED_TOKENS = (16384, 32768)
Row = dict[str, Any]
Run = Callable[..., list[Any]]


def medians(samples: list[dict[str, float]]) -> Row:
    """The samples of one contender as a row: medians of those that count."""
    taken = quiet(samples) or samples
    row: Row = {
        "samples": samples,
        "counted_samples": len(taken),
        "quiet_machine": bool(quiet(samples)),
    }
    for key in ("forward", "backward", "seconds"):
        row[key] = statistics.median(one[key] for one in taken)
    return row


def ring_rows(run: Run) -> list[Row]:
    """Single and double rings over two nodes, with links that a plain ring waits for."""
    available, why = links_available()
    if not available:
        return [{"kind": "rings", "not_run": why}]
    free = run(parts.time_rings, RANKS, parts.SINGLE, 5, None, backend="gloo")[0]
    compute = medians(free["samples"][parts.SINGLE.name])
    # The one link out of a node carries a block at every hop of a plain ring.
    block = parts.block_bytes(RANKS)
    bandwidth = (RANKS - 1) * block / (RING_COMMUNICATION * compute["forward"])
    rows = [{"kind": "compute", "name": "single ring, no limit"} | compute]
    with LimitedLinks(NODES, bandwidth_bytes_per_second=bandwidth) as links:
        found = run(parts.time_rings, RANKS, None, 5, links, backend=None)
    for contender in parts.RINGS:
        row = {
            "kind": "rings",
            "name": contender.name,
            "bandwidth_bytes_per_second": bandwidth,
            "difference": max(rank["differences"][contender.name] for rank in found),
            "predicted_forward": parts.predicted(contender, compute, bandwidth, backward=False),
            "predicted_backward": parts.predicted(contender, compute, bandwidth, backward=True),
        }
        rows.append(row | medians(found[0]["samples"][contender.name]))
    return rows


def memory_rows(run: Run) -> list[Row]:
    """Peak live bytes of double rings of several sizes, at fixed tokens per rank."""
    rows = []
    for ranks, window in ((1, 1), (2, 1), (4, 2), (8, 2), (8, 4)):
        held = run(parts.peak_bytes, ranks, window, backend="gloo")
        rows.append(
            {
                "kind": "memory",
                "ring": ranks,
                "window": window,
                "forward": max(one["forward"] for one in held),
                "backward": max(one["backward"] for one in held),
                "block_bytes": held[0]["block_bytes"],
            }
        )
    return rows


def keep_rows(run: Run) -> list[Row]:
    """Steps of a training run: full recompute, and with attention kept."""
    found = run(parts.time_recompute, 2, 2, 4, backend="gloo")
    rows = []
    for name, samples in found[0]["samples"].items():
        row = {"kind": "keep", "name": name, "ranks": 2, "tokens": parts.KEEP_TOKENS}
        row["attention_forwards"] = found[0]["forwards"][name]
        row["kept_bytes"] = found[0]["kept_bytes"][name]
        row["loss_difference"] = found[0]["loss_difference"]
        rows.append(row | medians(samples))
    return rows


def packed_rows(run: Run) -> list[Row]:
    """Useful FLOP/s of packed rows and of dense ones."""
    import packed_rows as packed

    return [packed.packed_over_dense(run, tokens=tokens) for tokens in PACKED_TOKENS]


def rounding_rows(_run: Run) -> list[Row]:
    """Errors of bf16 results against fp64, by ring, simulated in one process."""
    errors = parts.errors_by_ring(RINGS)
    return [
        {"kind": "rounding", "ring": ring}
        | dict(zip(("out", "dq", "dk", "dv"), found, strict=True))
        for ring, found in errors.items()
    ]


def figures_of(rows: list[Row]) -> Row:
    """The figures that the rows give."""
    figures: Row = {}
    rings = {row["name"]: row for row in rows if row.get("kind") == "rings" and "seconds" in row}
    if rings and all(row["difference"] < parts.AGREEMENT for row in rings.values()):
        single, double = rings[parts.SINGLE.name], rings[parts.DOUBLE.name]
        figures["double_over_single_ring_p8"] = single["seconds"] / double["seconds"]
        predicted = double["predicted_forward"] + double["predicted_backward"]
        figures["double_ring_predicted_over_measured"] = predicted / double["seconds"]
        head, context = rings[parts.HEAD_FIRST.name], rings[parts.CONTEXT_FIRST.name]
        figures["single_ring_over_head_first_double"] = single["seconds"] / head["seconds"]
        figures["single_ring_over_context_first"] = single["seconds"] / context["seconds"]
        for name, keys, queries in (
            ("single", parts.SINGLE, parts.SINGLE_QUERIES),
            ("double", parts.DOUBLE, parts.DOUBLE_QUERIES),
        ):
            figures[f"keys_over_queries_backward_{name}_ring"] = (
                rings[keys.name]["backward"] / rings[queries.name]["backward"]
            )
    memory = [row for row in rows if row.get("kind") == "memory"]
    for way in ("forward", "backward"):
        held = {(row["ring"], row["window"]): row[way] for row in memory}
        if held:
            large = max(held[8, 2], held[8, 4])
            figures[f"live_bytes_growth_{way}"] = large / held[2, 1]
            figures[f"live_bytes_growth_{way}_4_to_8"] = large / held[4, 2]
    keep = {row["name"]: row for row in rows if row.get("kind") == "keep"}
    if keep:
        full, kept = keep["full recompute"], keep["attention kept"]
        figures["keep_attention_over_full_recompute_32k"] = full["seconds"] / kept["seconds"]
        figures["attention_forwards_per_layer_and_micro_batch"] = kept["attention_forwards"]
        figures["kept_bytes_over_formula"] = kept["kept_bytes"] / parts.kept_formula()
    for row in rows:
        if row.get("kind") == "packed":
            thousands = row["tokens"] // 1024
            figures[f"packed_over_dense_rate_{thousands}k"] = row["packed_over_dense_rate"]
    rounding = {row["ring"]: row for row in rows if row.get("kind") == "rounding"}
    if rounding:
        figures["error_ring64_over_ring1"] = max(
            rounding[64][name] / rounding[1][name] for name in ("out", "dq", "dk", "dv")
        )
    return figures


def print_table(rows: list[Row], figures: Row) -> None:
    """The rows a person reads, then the figures."""
    for row in rows:
        label = f"{row['part']}: {row.get('name', '')}"
        if "not_run" in row:
            print(f"{label:44} not run: {row['not_run']}")
        elif "seconds" in row:
            busy = "" if row["quiet_machine"] else "  (others used the machine)"
            predicted = ""
            if "predicted_forward" in row:
                both = row["predicted_forward"], row["predicted_backward"]
                predicted = f", predicted {both[0]:6.3f} + {both[1]:6.3f}"
            times = f"{row['forward']:7.3f} s + {row['backward']:7.3f} s"
            print(f"{label:44} {times}{predicted}{busy}")
        elif row.get("kind") == "memory":
            print(
                f"{label} ring {row['ring']}, windows of {row['window']}: forward "
                f"{row['forward'] / 1e6:.2f} MB, backward {row['backward'] / 1e6:.2f} MB; "
                f"K and V {row['block_bytes'] / 1e6:.2f} MB"
            )
        elif row.get("kind") == "rounding":
            shown = ", ".join(f"{name} {row[name]:.2e}" for name in ("out", "dq", "dk", "dv"))
            print(f"{label} ring {row['ring']:2}: {shown}")
        else:
            print(label, {k: v for k, v in row.items() if k not in ("part", "kind", "name")})
    print()
    for name, value in figures.items():
        print(f"{name:44} {format(value, '.3f') if isinstance(value, float) else value}")


PARTS: dict[str, Callable[[Run], list[Row]]] = {
    "ring": ring_rows,
    "memory": memory_rows,
    "keep": keep_rows,
    "packed": packed_rows,
    "rounding": rounding_rows,
}


def main() -> None:
    """Runs the parts asked for and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    known = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
    by_part = {name: [row for row in known if row["part"] == name] for name in PARTS}
    with RankPool(preload=PRELOAD) as pool:

        def run(
            function: Callable[..., Any], ranks: int, *args: Any, backend: str | None
        ) -> list[Any]:
            return pool.run(
                function, world_size=ranks, args=args, backend=backend, timeout_seconds=1800
            )

        for name in options.only:
            by_part[name] = [{"part": name} | row for row in PARTS[name](run)]
            rows = [row for part in by_part.values() for row in part]
            write_results(options.output, figures_of(rows), rows)
    print_table(rows, figures_of(rows))


if __name__ == "__main__":
    preload()  # this process imports the same modules as the ranks
    main()
