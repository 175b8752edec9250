"""METP against Megatron's tensor parallelism: memory, longest sequence, step time, traffic.

    make bench-metp                            the full run; a quarter of an hour on two cores
    python benchmarks/metp.py --only memory    one part: memory, sequence, speed or traffic

h = 512, 8 heads of 64, LayerNorm, GELU with f = 4h, MHA, causal, bf16, no position embedding, V =
2048. All rows are Megatron's GPT model, DDP, Adam and schedule on real processes. The stock layers
("TP", "TP+SP") compute attention with this package's kernel, which keeps no s x s scores, and are
what figures compare with; rows with Megatron's ``DotProductAttention`` stand beside them.

Prints tables and writes ``benchmarks/results/metp.json``: ``rows`` (counted bytes and messages, raw
times) and ``figures``. A contender whose loss or gradients differ from those of TP+SP is void and
has no figure.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from attention_contenders import quiet
from written_results import write_results

from megatron_longseq.launch import RankPool
from megatron_longseq.launch.training import PRELOAD, preload
from megatron_longseq.measurement import LimitedLinks, links_available

RESULTS = Path(__file__).parent / "results" / "metp.json"
PARTS = ("memory", "sequence", "speed", "traffic")
# Gradients of a whole step in bf16, all together, against TP+SP's: rounding, not another result.
BF16_AGREEMENT = 0.03
Row = dict[str, Any]
Run = Callable[..., list[Any]]


def memory_rows(run: Run) -> list[Row]:
    """Agreement, saved bytes, attention and score blocks."""
    import metp_memory as memory

    rows: list[Row] = []
    contenders = list(dict.fromkeys([*memory.SAVED[1:], *memory.all_contenders()]))
    for ranks in (2, 4, 8):
        worst = run(memory.agreement, ranks, 256, contenders)
        for contender in contenders:
            error = max(rank[contender.name] for rank in worst)
            row = {"kind": "agreement", "name": contender.name, "ranks": ranks, "tokens": 256}
            rows.append(row | {"difference": error, "void": error > memory.AGREEMENT})
        found = run(memory.saved_bytes, ranks, 1024)
        rows += memory.saved_rows(ranks, 1024, found[0])
    for contender in (memory.TP_SP, memory.METP):
        held = run(memory.attention_bytes, 2, 4096, contender)[0]
        counted = sum(held.get(role, 0) for role in memory.COUNTED)
        elements = counted / (2 * 4096 * memory.HIDDEN / 2)
        row = {"kind": "attention", "name": contender.name, "ranks": 2, "tokens": 4096}
        rows.append(row | {"bytes": held, "counted": counted, "counted_over_bsh_p": elements})
    for ranks, name in ((1, "one process"), (8, memory.METP.name)):
        largest = run(memory.score_bytes, ranks, 1280)[0]
        row = {"kind": "scores", "name": name, "ranks": ranks, "tokens": 1280, "bytes": largest}
        rows.append(row | {"formula_bytes": 4 * memory.HEADS * 1280**2 // ranks**3})
    return rows


def sequence_rows(run: Run) -> list[Row]:
    """The longest sequences, for 4 and 8 ranks."""
    import metp_memory as memory

    rows: list[Row] = []
    for contender in (memory.NORM_TP_SP, memory.NORM_METP):
        both = [
            max(run(memory.peaks, 4, contender, [1024], layers=2, arithmetic=real))
            for real in (True, False)
        ]
        row = {"kind": "peak without arithmetic", "name": contender.name, "ranks": 4}
        rows.append(row | {"peak": both[0][0], "without": both[1][0], "equal": both[0] == both[1]})
    for ranks in (4, 8):

        def peaks(contender: Any, lengths: list[int], ranks: int = ranks) -> list[int]:
            every = run(
                memory.peaks, ranks, contender, lengths, layers=memory.LAYERS, arithmetic=False
            )
            found = [max(of_ranks) for of_ranks in zip(*every, strict=True)]
            for length, peak in zip(lengths, found, strict=True):
                print(f"p = {ranks}, {contender.name}, {length} tokens: {peak} bytes", flush=True)
            return found

        rows += memory.longest_rows(ranks, peaks)
    return rows


def speed_rows(run: Run, sequences: list[int], rounds: int, most_rounds: int) -> list[Row]:
    """Step times over loopback, then over a link as slow as the ratio of an A100 asks for."""
    import metp_speed as speed

    loopback = run(speed.step_times, 2, sequences, rounds, most_rounds, None)
    rows = _time_rows("loopback", loopback, sequences)
    available, reason = links_available()
    if not available:
        return [*rows, {"kind": "time", "network": "limited", "not_run": reason}]
    product = min(rank["rates"]["product"] for rank in loopback)
    limit = product / speed.A100_OVER_200_GBIT
    with LimitedLinks([[0], [1]], bandwidth_bytes_per_second=limit) as links:
        limited = run(speed.step_times, 2, sequences, rounds, most_rounds, links, backend=None)
    for rank in limited:
        rank["rates"]["link"] = limit
    return rows + _time_rows("limited", limited, sequences)


def _time_rows(network: str, per_rank: list[Any], sequences: list[int]) -> list[Row]:
    import metp_speed as speed

    rate = {
        key: min(rank["rates"][key] for rank in per_rank)
        for key in ("product", "attention", "link")
    }
    rows: list[Row] = []
    for sequence in sequences:
        samples = per_rank[0]["samples"][sequence]
        error = max(rank["difference"][sequence] for rank in per_rank)
        calm = all(quiet(own) for own in samples.values())
        for name, own in samples.items():
            counted = quiet(own) if calm else own
            row = {"kind": "time", "network": network, "name": name, "tokens": sequence}
            row |= {"ranks": 2, "layers": speed.LAYERS, "samples": own, "quiet_machine": calm}
            row["seconds"] = statistics.median(one["seconds"] for one in counted)
            method = name.split(",")[0]
            row["predicted_seconds"] = speed.predicted_seconds(method, 2, sequence, rate)
            row |= {"flops_per_second": rate["product"], "link_bytes_per_second": rate["link"]}
            row |= {"attention_flops_per_second": rate["attention"], "difference": error}
            rows.append(row | {"void": error > BF16_AGREEMENT})
    return rows


def traffic_rows(run: Run) -> list[Row]:
    """Counted traffic, ranks that are equal once; errors of weight gradients."""
    import metp_speed as speed

    rows: list[Row] = []
    for ranks in (2, 4, 8):
        holders: dict[str, tuple[Row, list[int]]] = {}
        for rank, own in enumerate(run(speed.traffic, ranks, 256)):
            for row in own:
                holders.setdefault(json.dumps(row), (row, []))[1].append(rank)
        rows += [
            {"kind": "traffic", "ranks": ranks, "holds_for_ranks": who} | row
            for row, who in holders.values()
        ]
    for ranks in (2, 4, 8):
        errors = run(speed.gradient_errors, ranks, 1024)[0]
        rows.append({"kind": "gradient error", "ranks": ranks, "tokens": 1024, "errors": errors})
    return rows


# --- figures ----------------------------------------------------------------------------------

FORMULAS = {
    "baseline_saved_over_formula": "TP+SP's saved bytes over 32 sbh/p + lse + norm statistics",
    "saved_bytes_ratio_p8": "10 / 32 = 0.3125",
    "saved_bytes_ratio_norm_recompute_p8": "6 / 32 = 0.1875",
    "attention_saving_vs_tp_p2": "our reading: 1 - (2p + 3) / (6p) = 5/12 = 0.4167",
    "score_block_ratio_p8": "1 / p^3 = 0.001953",
    "max_sequence_ratio_p4": "aim >= 2.99; tiled loss and norm recompute on both sides",
    "max_sequence_ratio_p8": "aim >= 2.99; tiled loss and norm recompute on both sides",
    "step_time_ratio_loopback": "aim <= 1.05",
    "step_time_ratio_limited": "aim <= 1.0",
    "dw_error_p8_over_p2": "aim <= 1.5; 1 if flat in p",
}


def make_figures(rows: list[Row]) -> dict[str, Any]:
    """The figures that the rows allow."""
    void = {(row["name"], row["ranks"]) for row in rows if row.get("void") and "ranks" in row}
    figures: dict[str, Any] = {}

    def of(kind: str, **where: Any) -> list[Row]:
        return [
            row
            for row in rows
            if row["kind"] == kind
            and (row.get("name"), row.get("ranks")) not in void
            and all(row.get(key) == value for key, value in where.items())
        ]

    baselines = of("saved", name="TP+SP, stock loss")
    if baselines:
        ratios = [row["bytes"] / row["formula_bytes"] for row in baselines]
        figures["baseline_saved_over_formula"] = max(ratios, key=lambda ratio: abs(ratio - 1))
    for figure, name in (
        ("saved_bytes_ratio_p8", "METP, ring loss"),
        ("saved_bytes_ratio_norm_recompute_p8", "METP, ring loss, norm recompute"),
    ):
        for row in of("saved", name=name, ranks=8):
            figures[figure] = row["over_tp_sp"]
    counted = {row["name"]: row["counted"] for row in of("attention")}
    if len(counted) == 2:
        stock, metp = counted["TP+SP, stock loss"], counted["METP, ring loss"]
        figures["attention_saving_vs_tp_p2"] = 1 - metp / stock
    scores = {row["ranks"]: row["bytes"] for row in of("scores")}
    if len(scores) == 2:
        figures["score_block_ratio_p8"] = scores[8] / scores[1]
    for row in of("longest"):
        if row["figure"] and row["counted"] and (row["baseline"], row["ranks"]) not in void:
            figures[f"max_sequence_ratio_p{row['ranks']}"] = row["ratio"]
    for network in ("loopback", "limited"):
        # Only of quiet rounds: what others do to one of the two is no figure.
        times = of("time", network=network, tokens=32768, quiet_machine=True, void=False)
        if len(times) == 2:
            seconds = {row["name"].split(",")[0]: row["seconds"] for row in times}
            figures[f"step_time_ratio_{network}"] = seconds["METP"] / seconds["TP+SP"]
    sent = of("traffic")
    if sent:
        figures["traffic_equals_formula"] = all(
            (row["messages"], row["bytes"]) == (row["formula_messages"], row["formula_bytes"])
            for row in sent
        )
    errors = {row["ranks"]: row["errors"] for row in of("gradient error")}
    if errors:
        figures["dw_error_p8_over_p2"] = max(errors[8][key] / errors[2][key] for key in errors[2])
    return figures


def print_tables(rows: list[Row], figures: dict[str, Any]) -> None:
    """The rows a person reads, then the figures with their formulas."""
    for row in rows:
        kind, name = row["kind"], row.get("name", "")
        if kind == "agreement" and row["void"]:
            print(
                f"void, p = {row['ranks']}: {name}: differs from TP+SP by {row['difference']:.1e}"
            )
        elif kind == "saved":
            formula = f"{row['formula_bytes']:>9} = {row['formula']}" if row["formula"] else "-"
            print(
                f"saved, p = {row['ranks']}  {name:42} {row['bytes']:>9} bytes a layer, "
                f"{row['over_tp_sp']:6.4f} of TP+SP; formula {formula}"
            )
        elif kind == "attention":
            parts = ", ".join(f"{role} {size / 1e6:.2f}" for role, size in row["bytes"].items())
            print(f"attention, p = 2  {name}: {row['counted_over_bsh_p']:.3f} bsh/p; MB: {parts}")
        elif kind == "longest":
            print(
                f"longest, p = {row['ranks']}  {row['scenario']}, {row['budget'] / 1e6:.1f} MB: "
                f"{row['baseline']} {row['baseline_tokens']}, {name} {row['tokens']} "
                f"({row['ratio']:.3f}{'' if row['counted'] else ', not verified'})"
            )
        elif kind == "time" and "seconds" in row:
            print(
                f"step, {row['network']:8} {row['tokens']:>6} tokens  {name:20} "
                f"{row['seconds']:8.2f} s, predicted {row['predicted_seconds']:8.2f} s; F = "
                f"{row['flops_per_second'] / 1e9:.1f} GFLOP/s, B = "
                f"{row['link_bytes_per_second'] / 1e6:.2f} MB/s"
                f"{'' if row['quiet_machine'] else ' (others used the machine)'}"
                f"{'  void' if row['void'] else ''}"
            )
        elif kind == "gradient error":
            errors = ", ".join(f"{key} {error:.2e}" for key, error in row["errors"].items())
            print(f"dW against fp64, p = {row['ranks']}: {errors}")
    print()
    for name, value in figures.items():
        shown = value if isinstance(value, bool) else format(value, ".4f")
        print(f"{name:38} {shown!s:>8}   {FORMULAS.get(name, '')}")


def main() -> None:
    """Runs the parts asked for; rows of the others are kept as they were written last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--sequences", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--rounds", type=int, default=1, help="quiet ones wanted of a timed step")
    parser.add_argument("--most-rounds", type=int, default=3, help="after which to give up")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with RankPool(PRELOAD) as pool:
        pool.start()
        preload()  # Megatron here too: contenders and their names are objects of its modules

        def run(function: Callable[..., Any], ranks: int, *args: Any, **kwargs: Any) -> list[Any]:
            backend = kwargs.pop("backend", "gloo")
            return pool.run(
                function,
                world_size=ranks,
                args=(ranks, *args),
                kwargs=kwargs,
                backend=backend,
                timeout_seconds=3600,
            )

        makers: dict[str, Callable[[Run], list[Row]]] = {
            "memory": memory_rows,
            "sequence": sequence_rows,
            "speed": partial(
                speed_rows,
                sequences=options.sequences,
                rounds=options.rounds,
                most_rounds=options.most_rounds,
            ),
            "traffic": traffic_rows,
        }
        parts: dict[str, list[Row]] = {}
        if options.output.exists():
            for row in json.loads(options.output.read_text())["rows"]:
                parts.setdefault(row["part"], []).append(row)
        for part in PARTS:
            if part in options.only:
                started = time.perf_counter()
                parts[part] = [{"part": part} | row for row in makers[part](run)]
                print(f"{part}: {time.perf_counter() - started:.0f} s", flush=True)
    rows = [row for part in PARTS for row in parts.get(part, [])]
    figures = make_figures(rows)
    print_tables(rows, figures)
    write_results(options.output, figures, rows)


if __name__ == "__main__":
    main()
