"""Linear attention over ranks against Ulysses, LASP's order of operations, and ring attention.

    make bench-lasp                                   all parts
    python benchmarks/lasp.py --only schedules memory

What is run is in ``configs/compare/lasp.yaml``: forward and backward of one layer, 8 heads of 64,
fp32, a constant decay per head. Prints a table and writes ``benchmarks/results/lasp.json``:
``rows`` (raw times, counted bytes, shapes) and ``figures``; parts left out keep the rows they had.
What is compared runs in the same processes, in turn in every round; figures are ratios of medians
over the rounds during which others left the machine alone, or over all and said so.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lasp_parts as parts
import yaml
from attention import same_on_ranks
from lasp_contenders import FLAT, HEADS, WIDTH, counted
from lasp_parts import Row
from written_results import write_results

from megatron_longseq.launch import RankPool
from megatron_longseq.measurement import LimitedLinks, links_available

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "lasp.json"
SHAPES = ROOT / "configs" / "compare" / "lasp.yaml"
# Contenders whose results are further apart are void.
AGREEMENT = 1e-4
GIB, MIB = 1 << 30, 1 << 20

Run = Callable[..., list[Any]]


def medians(samples: list[dict[str, float]]) -> Row:
    """The samples of one contender as a row: medians of those that count."""
    taken, quiet = counted(samples)
    row: Row = {"samples": samples, "counted_samples": len(taken), "quiet_machine": quiet}
    for key in ("forward", "backward", "seconds", "processors"):
        row[f"median_{key}"] = statistics.median(one[key] for one in taken)
    return row


def kernel_rows(run: Run, shapes: Row) -> list[Row]:
    """The kernel's FLOP/s beside those of a plain product."""
    return run(parts.kernel, 1, shapes["tokens"])


def scaling_rows(run: Run, shapes: Row) -> list[Row]:
    """Time and bytes by length, and bytes by schedule."""
    ranks, lengths = shapes["ranks"], shapes["tokens"]
    rows = [{"kind": "traffic"} | row for row in same_on_ranks(run(parts.traffic, ranks, 256))]
    if free_bytes() < shapes["needs_gib"] * GIB:
        reason = f"{lengths[-1]} tokens need {shapes['needs_gib']} GiB of free memory"
        rows.append({"kind": "time", "ranks": ranks, "tokens": lengths[-1], "not_run": reason})
        lengths = lengths[:-1]
    per_rank = run(parts.scaling, ranks, lengths, shapes["rounds"])
    for length in lengths:
        row = {"kind": "time", "ranks": ranks, "tokens": length}
        row |= {"bytes_by_rank": [rank["bytes"][length] for rank in per_rank]}
        rows.append(row | medians(per_rank[0]["samples"][str(length)]))
    return rows


def ulysses_rows(run: Run, shapes: Row) -> list[Row]:
    """Ours and DeepSpeed-Ulysses over loopback, and over a link as slow as a GPU's is."""
    ranks = shapes["ranks"]
    fast = run(parts.ulysses, ranks, shapes["tokens"], shapes["rounds"], None)
    rows = _ulysses_network(fast, {"network": "loopback", "tokens": shapes["tokens"]})
    if "not_run" in fast[0]:
        return rows
    slow = {"network": "limited", "tokens": shapes["slow_tokens"]}
    available, reason = links_available()
    if not available:
        return [*rows, slow | {"not_run": reason}]
    rate = min(rank["product_flops"] for rank in fast)
    limit = rate / shapes["flops_per_byte"]
    slow |= {"product_flops": rate, "bytes_per_second": limit}
    with LimitedLinks([[rank] for rank in range(ranks)], bandwidth_bytes_per_second=limit) as links:
        limited = run(
            parts.ulysses, ranks, shapes["slow_tokens"], shapes["slow_rounds"], links, backend=None
        )
    return rows + _ulysses_network(limited, slow)


def _ulysses_network(per_rank: list[Row], row: Row) -> list[Row]:
    if "not_run" in per_rank[0]:
        return [row | {"not_run": per_rank[0]["not_run"]}]
    row = row | {"difference": max(rank["difference"] for rank in per_rank)}
    if row["difference"] > AGREEMENT:
        row["not_run"] = f"void: results differ by {row['difference']:.1e}"
    samples = per_rank[0]["samples"]
    return [row | {"name": name} | medians(samples[name]) for name in samples]


def schedule_rows(run: Run, shapes: Row) -> list[Row]:
    """Each schedule and LASP's order, by ranks and delay of the links."""
    return [
        row
        for tokens in shapes["tokens_per_rank"]
        for ranks in shapes["ranks"]
        for row in schedules_of(run, ranks, tokens, shapes)
    ]


def schedules_of(run: Run, ranks: int, tokens: int, shapes: Row) -> list[Row]:
    """The rows of so many ranks, of so many tokens each."""
    rows = []
    per_rank = run(parts.schedules, ranks, tokens, shapes["delays_ms"], shapes["rounds"])
    for index, found in enumerate(per_rank[0]):
        worst = max(rank[index]["difference"] for rank in per_rank)
        common = {"ranks": ranks, "delay_ms": found["delay_ms"], "tokens_per_rank": tokens}
        for name in found["samples"]:
            row = common | {"name": name, "difference": worst}
            if worst > AGREEMENT:
                row["not_run"] = f"void: results differ by {worst:.1e}"
            if name in found["predicted"]:
                row["predicted_seconds"] = found["predicted"][name]
            if name in FLAT:
                row["steps"] = found["steps"][name]
                row["waited_by_rank"] = [rank[index]["waited"][name] for rank in per_rank]
                row["scans_alone"] = medians(found["alone"][name])["median_seconds"]
            rows.append(row | medians(found["samples"][name]))
    return rows


def memory_rows(run: Run, shapes: Row) -> list[Row]:
    """Bytes per rank by length, and the longest sequence under the budget."""
    ranks, lengths = shapes["ranks"], shapes["tokens_per_rank"]
    budget, rows = shapes["budget_mib"] * MIB, []
    for name in ("linear", "ring"):
        held = worst_rank(run(parts.memory, ranks, lengths, [name]))
        longest = longest_under(budget, held, "peak")
        row = {"ranks": ranks, "budget_bytes": budget, "name": name, "held": held}
        row |= {"longest_tokens": ranks * longest, "bytes_per_token": slope(held, "peak")}
        row |= {"kept_per_token": slope(held, "kept")}
        if name == "linear":  # a ring's time at its longest is too long to show it
            row["peak_at_longest"] = worst_rank(run(parts.memory, ranks, [longest], [name]))[0][
                "peak"
            ]
        rows.append(row)
    return rows


def worst_rank(per_rank: list[list[Row]]) -> list[Row]:
    """Of every length, the bytes of the rank that holds most."""
    return [
        rows[0] | {key: max(row[key] for row in rows) for key in ("kept", "peak")}
        for rows in zip(*per_rank, strict=True)
    ]


def slope(held: list[Row], key: str) -> float:
    """Bytes that one more token on a rank takes, from the two lengths measured."""
    first, last = held[0], held[-1]
    return (last[key] - first[key]) / (last["tokens_per_rank"] - first["tokens_per_rank"])


def longest_under(budget: int, held: list[Row], key: str) -> int:
    """Tokens per rank, a multiple of 64, that fill the budget by a straight line."""
    more = (budget - held[-1][key]) / slope(held, key)
    return int(held[-1]["tokens_per_rank"] + more) // 64 * 64


def free_bytes() -> int:
    """Memory that is free or can be freed."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0


def make_figures(rows: list[Row]) -> Row:
    """The figures, from the rows that have been run."""
    usable = [row for row in rows if "not_run" not in row]
    figures: Row = {}
    for make in (scaling_figures, ulysses_figures, schedule_figures, memory_figures):
        figures |= make(usable)
    for row in (row for row in usable if row["part"] == "kernel"):
        figures["kernel_share_of_product"] = row["flops"] / row["product_flops"]
    return figures


def scaling_figures(rows: list[Row]) -> Row:
    """Of time and bytes by length."""
    own = [row for row in rows if row["part"] == "scaling"]
    times = {row["tokens"]: row for row in own if row["kind"] == "time"}
    counts = [row for row in own if row["kind"] == "traffic"]
    figures: Row = {}
    short, middle, long = 16384, 131072, 1048576
    if middle in times and long in times:
        per_token = {n: times[n]["median_seconds"] / n for n in (middle, long)}
        figures["time_per_token_1m_over_128k"] = per_token[long] / per_token[middle]
    if short in times and long in times:
        figures["bytes_per_layer_1m_over_16k"] = sum(times[long]["bytes_by_rank"]) / sum(
            times[short]["bytes_by_rank"]
        )
    if counts:
        figures["traffic_equals_formula"] = all(
            (row["messages"], row["bytes"]) == (row["formula_messages"], row["formula_bytes"])
            for row in counts
        )
    return figures


def ulysses_figures(rows: list[Row]) -> Row:
    """Of ours over DeepSpeed-Ulysses."""
    figures: Row = {}
    for network, name in (
        ("loopback", "over_ulysses_loopback"),
        ("limited", "over_ulysses_slow_link"),
    ):
        own = {
            row["name"]: row["median_seconds"]
            for row in rows
            if row["part"] == "ulysses" and row["network"] == network
        }
        if own:
            figures[name] = own["ulysses"] / own["ours"]
    return figures


def schedule_figures(rows: list[Row]) -> Row:
    """At 8 ranks and 5 ms: the best schedule over LASP's order, and how much of its scans hides.

    Of the shortest segments; those of longer ones have the number of tokens in their name.
    """
    figures: Row = {}
    at = [
        row
        for row in rows
        if row["part"] == "schedules" and (row["ranks"], row["delay_ms"]) == (8, 5)
    ]
    for number, tokens in enumerate(sorted({row["tokens_per_rank"] for row in at})):
        own = {row["name"]: row for row in at if row["tokens_per_rank"] == tokens}
        if any("not_run" in row for row in own.values()):
            continue
        best = min(FLAT, key=lambda name: own[name]["median_seconds"])
        blocking, seconds = own["blocking"]["median_seconds"], own[best]["median_seconds"]
        exposed = max(0.0, seconds - own["none"]["median_seconds"])
        found = {
            "best_schedule_p8_5ms": best,
            "over_blocking_ring_p8_5ms": blocking / seconds,
            "ring_over_blocking_ring_p8_5ms": blocking / own["ring"]["median_seconds"],
            "hidden_share_p8": max(0.0, 1 - exposed / own[best]["scans_alone"]),
        }
        suffix = f"_{tokens}_tokens" if number else ""
        figures |= {name + suffix: value for name, value in found.items()}
    return figures


def memory_figures(rows: list[Row]) -> Row:
    """Of the longest sequence under one budget, and of what stays for backward."""
    own = {row["name"]: row for row in rows if row["part"] == "memory"}
    if not own:
        return {}
    linear, ring = own["linear"], own["ring"]
    return {
        "max_sequence_over_ring_attention_p8": linear["longest_tokens"] / ring["longest_tokens"],
        "kept_per_token_ring_attention_over_linear": ring["kept_per_token"]
        / linear["kept_per_token"],
    }


def print_table(rows: list[Row], figures: Row) -> None:
    """The rows a person reads, then the figures."""
    columns = ("part", "network", "ranks", "delay_ms", "tokens", "tokens_per_rank", "name")
    print(f"\n{'':58} {'forward':>9} {'backward':>9} {'together':>9} {'predicted':>9}")
    for row in rows:
        label = " ".join(f"{key} {row[key]}" for key in columns if key in row and key != "part")
        label = f"{row['part']}: {label}"
        if "not_run" in row:
            print(f"{label:58} not run: {row['not_run']}")
        elif "median_seconds" in row:
            times = [row[f"median_{key}"] for key in ("forward", "backward", "seconds")]
            times += [row["predicted_seconds"]] if "predicted_seconds" in row else []
            busy = "" if row["quiet_machine"] else "  (others used the machine)"
            print(f"{label:58} {' '.join(f'{1e3 * t:7.1f}ms' for t in times)}{busy}")
        elif "longest_tokens" in row:
            print(
                f"{label:58} {row['bytes_per_token']:.0f} bytes a token at the peak, "
                f"{row['kept_per_token']:.0f} kept; longest {row['longest_tokens']} tokens"
            )
        elif "product_flops" in row:
            print(
                f"{label:58} {row['flops'] / 1e9:.1f} of {row['product_flops'] / 1e9:.1f} GFLOP/s"
            )
        if "bytes_per_second" in row and "median_seconds" in row:
            print(
                f"{'':10}F = {row['product_flops'] / 1e9:.1f} GFLOP/s, "
                f"B = {row['bytes_per_second'] / 1e6:.2f} MB/s"
            )
    print()
    for name, value in figures.items():
        print(f"{name:42} {format(value, '.3f') if isinstance(value, float) else value}")


PARTS: dict[str, Callable[[Run, Row], list[Row]]] = {
    "kernel": kernel_rows,
    "scaling": scaling_rows,
    "ulysses": ulysses_rows,
    "schedules": schedule_rows,
    "memory": memory_rows,
}


def main() -> None:
    """Runs the parts asked for and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shapes", type=Path, default=SHAPES)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    shapes = yaml.safe_load(options.shapes.read_text())
    if (shapes["heads"], shapes["width"]) != (HEADS, WIDTH):
        parser.error(f"{options.shapes}: this benchmark has {HEADS} heads of {WIDTH}")
    before = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
    rows = []
    with RankPool() as pool:

        def run(
            function: Callable[..., Any], ranks: int, *args: Any, backend: str | None = "gloo"
        ) -> list[Any]:
            return pool.run(
                function, world_size=ranks, args=args, backend=backend, timeout_seconds=900
            )

        for name, measure in PARTS.items():
            if name in options.only:
                rows += [{"part": name} | row for row in measure(run, shapes[name])]
            else:
                rows += [row for row in before if row["part"] == name]
    figures = make_figures(rows)
    print_table(rows, figures)
    write_results(options.output, figures, rows)


if __name__ == "__main__":
    main()
