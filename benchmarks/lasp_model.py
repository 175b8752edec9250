"""Whole models of linear layers: the longest sequence, memory, step time, and losses by layout.

    make bench-lasp-model                                 all parts
    python benchmarks/lasp_model.py --only longest loss   some: longest, memory, speed, loss

What is run is in ``configs/compare/lasp-model.yaml``. ``longest`` and ``loss`` are training runs by
the entry point on the sources of Python's standard library; ``memory`` and ``speed`` are single
steps of Megatron's model, DDP, distributed optimizer and schedule. Prints tables and writes
``benchmarks/results/lasp_model.json``: ``rows`` and ``figures``; parts left out keep the rows they
had. Contenders whose loss or gradients differ are void and have no figure.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lasp_model_runs as runs
import yaml
from attention_contenders import quiet
from written_results import write_results

from megatron_longseq.launch import RankPool
from megatron_longseq.launch.training import PRELOAD, preload
from megatron_longseq.measurement import LimitedLinks, links_available

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "lasp_model.json"
SHAPES = ROOT / "configs" / "compare" / "lasp-model.yaml"
TIMEOUT_SECONDS = 3600.0
# Loss and gradients in fp32, and a loss in bf16: rounding, not another result.
AGREEMENT, BF16_LOSS_AGREEMENT = 1e-5, 5e-3

Row = dict[str, Any]


def longest_rows(pool: RankPool, shapes: Row, options: argparse.Namespace) -> list[Row]:
    """Training on one sequence of real text by length."""
    with runs.corpus(options.corpus) as data:
        return runs.longest_rows(pool, shapes, data)


def loss_rows(pool: RankPool, shapes: Row, options: argparse.Namespace) -> list[Row]:
    """Training on one rank and on several."""
    with runs.corpus(options.corpus) as data:
        return runs.loss_rows(pool, shapes, data)


def memory_rows(pool: RankPool, shapes: Row, _options: argparse.Namespace) -> list[Row]:
    """Agreement of the contenders, and the longest sequence within a budget."""
    import lasp_model_memory as memory
    from lasp_model_contenders import Contender, Shape

    ranks, shape = shapes["ranks"], Shape(**shapes["shape"])
    tokens = shapes["agreement_tokens"]
    rows = agreement_rows(pool, shape, ranks, tokens, memory.same_model(tokens // 2))

    def peaks(contender: Contender, lengths: list[int]) -> list[int]:
        per_rank = pool.run(
            memory.peaks,
            world_size=ranks,
            args=(contender, shape, lengths),
            backend="gloo",
            timeout_seconds=TIMEOUT_SECONDS,
        )
        found = [max(of_ranks) for of_ranks in zip(*per_rank, strict=True)]
        for length, peak in zip(lengths, found, strict=True):
            print(f"{contender.name}, {length} tokens: {peak} bytes", flush=True)
        return found

    rows += memory.longest_rows(ranks, shapes["rival_tokens"], shapes["chunk_tokens"], peaks)
    return [row | {"shape": shapes["shape"]} for row in rows]


def agreement_rows(
    pool: RankPool, shape: Any, ranks: int, tokens: int, groups: list[list[Any]]
) -> list[Row]:
    """How far contenders of the same model are apart, in every group of such."""
    import lasp_model_memory as memory

    rows: list[Row] = []
    for group in groups:
        found = pool.run(
            memory.agreement,
            world_size=ranks,
            args=(group, shape, tokens),
            backend="gloo",
            timeout_seconds=TIMEOUT_SECONDS,
        )[0]
        for name, error in found.items():
            row = {"kind": "agreement", "name": name, "ranks": ranks, "tokens": tokens}
            rows.append(row | {"difference": error, "void": not error <= AGREEMENT})
    return rows


def speed_rows(pool: RankPool, shapes: Row, _options: argparse.Namespace) -> list[Row]:
    """A step over loopback, then over a link as slow as the ratio of an A100 asks for."""
    import lasp_model_speed as speed
    from lasp_model_contenders import Shape

    ranks, shape, tokens = shapes["ranks"], Shape(**shapes["shape"]), shapes["tokens"]
    group = [speed.TP_SP, speed.LASP]
    rows = agreement_rows(pool, shape, ranks, shapes["agreement_tokens"], [group])

    def times(links: LimitedLinks | None) -> list[Row]:
        return pool.run(
            speed.step_times,
            world_size=ranks,
            args=(shape, tokens, shapes["rounds"], shapes["most_rounds"], links),
            backend="gloo" if links is None else None,
            timeout_seconds=TIMEOUT_SECONDS,
        )

    loopback = times(None)
    rows += time_rows("loopback", loopback, tokens)
    available, reason = links_available()
    if available:
        product = min(rank["rates"]["product"] for rank in loopback)
        limit = product / shapes["flops_per_byte"]
        with LimitedLinks(
            [[rank] for rank in range(ranks)], bandwidth_bytes_per_second=limit
        ) as links:
            limited = times(links)
        for rank in limited:
            rank["rates"]["link"] = limit
        rows += time_rows("limited", limited, tokens)
    else:
        rows.append({"kind": "time", "network": "limited", "not_run": reason})
    return [row | {"shape": shapes["shape"]} for row in rows]


def time_rows(network: str, per_rank: list[Row], tokens: int) -> list[Row]:
    """One row per contender: all samples, and the median of those that count."""
    losses, samples = per_rank[0]["losses"], per_rank[0]["samples"]
    rate = {key: min(rank["rates"][key] for rank in per_rank) for key in ("product", "link")}
    difference = abs(losses["LASP"] - losses["TP+SP"]) / losses["TP+SP"]
    rows = []
    for name, own in samples.items():
        calm = quiet(own)
        row = {"kind": "time", "network": network, "name": name, "ranks": len(per_rank)}
        row |= {"tokens": tokens, "samples": own, "quiet_machine": bool(calm)}
        row |= {"seconds": statistics.median(one["seconds"] for one in calm or own)}
        row |= {"flops_per_second": rate["product"], "link_bytes_per_second": rate["link"]}
        row |= {"loss": losses[name], "difference": difference}
        rows.append(row | {"void": not difference <= BF16_LOSS_AGREEMENT})
    return rows


# --- figures ----------------------------------------------------------------------------------

AIMS = {
    "longest_sequence_trained": "aim >= 4194304; tokens of one sequence, 4 processes",
    "loss_difference_longest": "relative; against one process, longest lengths it can run",
    "gradient_norm_difference_longest": "relative; as far as the log has digits",
    "peak_growth_bytes_per_token": "per rank; the batch, its losses and a state per chunk",
    "max_sequence_over_best_rival_p8": "aim >= 8; every forward twice on both sides",
    "over_megatron_sp_slow_link": "aim >= 2.36; step time of TP+SP over LASP's",
    "over_megatron_sp_loopback": "the same over loopback",
    "loss_difference_cp4_over_cp1": "relative; the largest of 100 steps, fp32",
    "loss_difference_cp4_over_cp1_fp64": "the same in fp64",
    "recall_accuracy_cp1": "answers given more than half of all probability",
    "recall_accuracy_cp4": "",
}


def make_figures(rows: list[Row]) -> Row:
    """The figures, from the rows that have been run."""
    usable = [row for row in rows if "not_run" not in row]
    figures: Row = {}
    for make in (longest_figures, memory_figures, speed_figures, loss_figures):
        figures |= make([row for row in usable if row["part"] == make.__name__.split("_")[0]])
    return figures


def longest_figures(rows: list[Row]) -> Row:
    """Of one sequence of real text."""
    several = {row["tokens"]: row for row in rows if row["ranks"] > 1}
    if not several:
        return {}
    figures: Row = {"longest_sequence_trained": max(several)}
    losses, norms = [], []
    for one in (row for row in rows if row["ranks"] == 1 and row["tokens"] in several):
        other = several[one["tokens"]]
        losses += relative(other["losses"], one["losses"])
        norms += relative(other["gradient_norms"], one["gradient_norms"])
    if losses:
        figures["loss_difference_longest"] = max(losses)
        figures["gradient_norm_difference_longest"] = max(norms)
    # Of the runs of one step, between which only the number of chunks differs.
    lengths = sorted(tokens for tokens, row in several.items() if len(row["losses"]) == 1)
    if len(lengths) > 1:
        first, last = several[lengths[0]], several[lengths[-1]]
        growth = (last["peak_bytes"] - first["peak_bytes"]) / (lengths[-1] - lengths[0])
        figures["peak_growth_bytes_per_token"] = growth
    return figures


def memory_figures(rows: list[Row]) -> Row:
    """Of the longest sequence within a budget."""
    void = {row["name"] for row in rows if row.get("void")}
    figures: Row = {}
    for row in (row for row in rows if row["kind"] == "longest"):
        if row["figure"] and row["counted"] and not void:
            figures[f"max_sequence_over_best_rival_p{row['ranks']}"] = row["ratio"]
    return figures


def speed_figures(rows: list[Row]) -> Row:
    """Of step times, of quiet rounds only: what others do to one of the two is no figure."""
    figures: Row = {}
    if any(row.get("void") for row in rows):
        return figures
    for network, figure in (
        ("limited", "over_megatron_sp_slow_link"),
        ("loopback", "over_megatron_sp_loopback"),
    ):
        seconds = {
            row["name"]: row["seconds"]
            for row in rows
            if row["kind"] == "time" and row["network"] == network and row["quiet_machine"]
        }
        if len(seconds) == 2:
            figures[figure] = seconds["TP+SP"] / seconds["LASP"]
    return figures


def loss_figures(rows: list[Row]) -> Row:
    """Of the same training on one rank and on several."""
    figures: Row = {}
    for precision, figure in (
        ("fp32", "loss_difference_cp4_over_cp1"),
        ("fp64", "loss_difference_cp4_over_cp1_fp64"),
    ):
        own = [row for row in rows if row["kind"] == "text" and row["precision"] == precision]
        differences = [
            difference
            for one in (row for row in own if row["ranks"] == 1)
            for other in own
            if other["name"] == one["name"] and other["ranks"] > 1
            for difference in relative(other["losses"], one["losses"])
        ]
        if differences:
            figures[figure] = max(differences)
    for row in (row for row in rows if row["kind"] == "recall"):
        figures[f"recall_accuracy_cp{row['ranks']}"] = row["accuracy"]
    return figures


def relative(found: list[float], expected: list[float]) -> list[float]:
    """Relative differences, one by one."""
    return [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]


# --- what a person reads ------------------------------------------------------------------------


def print_tables(rows: list[Row], figures: Row) -> None:
    """The rows, then the figures with their aims."""
    for row in rows:
        kind, part = row["kind"], row["part"]
        if "not_run" in row:
            print(f"{part}: not run: {row['not_run']}")
        elif kind == "sequence":
            print(
                f"{row['tokens']:>8} tokens, {row['ranks']} ranks, {row['chunks']:>3} chunks: "
                f"loss {', '.join(f'{loss:.6f}' for loss in row['losses'])}; "
                f"{row['seconds'][-1]:6.1f} s; peak {row['peak_bytes'] / 1e6:7.1f} MB a rank"
            )
        elif kind == "agreement":
            void = "  void" if row["void"] else ""
            print(f"p = {row['ranks']}  {row['name']:38} differs by {row['difference']:.1e}{void}")
        elif kind == "longest":
            print(
                f"p = {row['ranks']}  {row['scenario']:26} {row['budget'] / 1e6:6.2f} MB: "
                f"{row['rival']} {row['rival_tokens']}, {row['name']} {row['tokens']} tokens "
                f"({row['ratio']:.2f}{'' if row['counted'] else ', or more'})"
            )
        elif kind == "time":
            print(
                f"step, {row['network']:8} {row['tokens']:>6} tokens  {row['name']:6} "
                f"{row['seconds']:8.2f} s; F = {row['flops_per_second'] / 1e9:.1f} GFLOP/s, "
                f"B = {row['link_bytes_per_second'] / 1e6:.2f} MB/s"
                f"{'' if row['quiet_machine'] else ' (others used the machine)'}"
                f"{'  void' if row['void'] else ''}"
            )
        elif kind == "text":
            print(
                f"real text, {row['name']:9} {row['precision']} CP {row['ranks']}: loss "
                f"{row['losses'][0]:.6f} to {row['losses'][-1]:.6f} in {len(row['losses'])} steps"
            )
        elif kind == "recall":
            print(
                f"recall, CP {row['ranks']}: loss {row['losses'][0]:.4f} to "
                f"{row['final_loss']:.4f} in {len(row['losses'])} steps, accuracy "
                f"{row['accuracy']:.4f} of {row['answers']} answers"
            )
    print()
    for name, value in figures.items():
        shown = format(value, ".3g") if abs(value) < 0.01 else f"{value:,.3f}"
        print(f"{name:36} {shown:>16}   {AIMS[name]}")


PARTS: dict[str, Callable[[RankPool, Row, argparse.Namespace], list[Row]]] = {
    "longest": longest_rows,
    "memory": memory_rows,
    "speed": speed_rows,
    "loss": loss_rows,
}


def main() -> None:
    """Runs the parts asked for; rows of the others are kept as they were written last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shapes", type=Path, default=SHAPES)
    parser.add_argument("--corpus", type=Path, help="prefix of one that exists already")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    shapes = yaml.safe_load(options.shapes.read_text())
    parts: dict[str, list[Row]] = {}
    if options.output.exists():
        for row in json.loads(options.output.read_text())["rows"]:
            parts.setdefault(row["part"], []).append(row)

    def results() -> tuple[Row, list[Row]]:
        rows = [row for part in PARTS for row in parts.get(part, [])]
        return make_figures(rows), rows

    with RankPool(PRELOAD) as pool:
        pool.start()
        preload()  # Megatron here too: contenders and their names are objects of its modules
        for part in (part for part in PARTS if part in options.only):
            started = time.perf_counter()
            found = PARTS[part](pool, shapes[part], options)
            parts[part] = [{"part": part} | row for row in found]
            print(f"{part}: {time.perf_counter() - started:.0f} s", flush=True)
            write_results(options.output, *results())  # what has taken minutes is kept
    figures, rows = results()
    print_tables(rows, figures)


if __name__ == "__main__":
    main()
