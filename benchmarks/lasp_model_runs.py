"""Whole training runs of ``benchmarks/lasp_model.py``: Megatron's loop by the real entry point."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megatron_longseq.cli import main as longseq
from megatron_longseq.launch import RankPool
from megatron_longseq.launch.training import PRELOAD_DOUBLE_PRECISION, run_training
from megatron_longseq.measurement.step_records import merge_steps, read_steps

Row = dict[str, Any]
_GRADIENT_NORM = re.compile(r"grad norm: ([0-9.E+-]+)")
TIMEOUT_SECONDS = 1800.0


@contextmanager
def corpus(prefix: Path | None) -> Iterator[Path]:
    """The prefix of a corpus: the one given, or the standard library's sources, made anew."""
    if prefix is not None:
        yield prefix
        return
    with tempfile.TemporaryDirectory(prefix="longseq-corpus-") as folder:
        own = Path(folder) / "corpus"
        if longseq(["prepare-data", "--output", str(own)]) != 0:
            raise SystemExit("the corpus could not be prepared")
        yield own


@contextmanager
def _folders() -> Iterator[tuple[Path, Path]]:
    """A folder for step records and one for logs, removed after use."""
    with tempfile.TemporaryDirectory(prefix="longseq-lasp-model-") as folder:
        yield Path(folder) / "steps", Path(folder) / "logs"


def train(pool: RankPool, flags: str, *, ranks: int) -> Row:
    """Trains; the merged record of each step, peaks by rank and the gradient norms of the log."""
    with _folders() as (steps, logs):
        run_training(
            pool,
            [*flags.split(), "--longseq-measure", str(steps)],
            processes=ranks,
            foreground=(),
            timeout_seconds=TIMEOUT_SECONDS,
            log_directory=logs,
        )
        by_rank = read_steps(steps)
        # Megatron's last rank writes the line of a step.
        norms = _GRADIENT_NORM.findall((logs / f"rank{ranks - 1}.log").read_text())
    return {
        "steps": merge_steps(by_rank),
        "peak_bytes_by_rank": [max(step["peak_bytes"] for step in own) for own in by_rank],
        "gradient_norms": [float(norm) for norm in norms],
    }


def sequence_row(
    pool: RankPool, shapes: Row, data: Path, *, ranks: int, tokens: int, chunks: int, steps: int
) -> Row:
    """So many steps on sequences of one length: losses, seconds, peaks, what was sent."""
    flags = (
        f"{shapes['flags']} --data-path {data} --seq-length {tokens} "
        f"--max-position-embeddings {tokens} --context-parallel-size {ranks} "
        f"--longseq-sequence-chunks {chunks} --train-iters {steps}"
    )
    found = train(pool, flags, ranks=ranks)
    of_steps = found.pop("steps")
    return (
        {"kind": "sequence", "ranks": ranks, "tokens": tokens, "chunks": chunks}
        | {"losses": [step["loss"] for step in of_steps]}
        | {"seconds": [step["seconds"] for step in of_steps]}
        | {"peak_bytes": max(found["peak_bytes_by_rank"])}
        | {"bytes_sent": of_steps[0]["bytes_sent"]}
        | found
    )


def longest_rows(pool: RankPool, shapes: Row, data: Path) -> list[Row]:
    """Sequences over all ranks by length, and what one process gets for the same data."""
    ranks, chunk = shapes["ranks"], shapes["chunk_tokens"]
    row = partial(sequence_row, pool, shapes, data)
    rows: list[Row] = []

    def add(**run: int) -> None:
        rows.append(row(**run))
        print(
            f"{rows[-1]['tokens']} tokens, {rows[-1]['ranks']} ranks, {rows[-1]['chunks']} chunks: "
            f"loss {rows[-1]['losses']}, {rows[-1]['seconds']} s, "
            f"{rows[-1]['peak_bytes'] / 1e6:.1f} MB",
            flush=True,
        )

    # Two steps: the second loss is that of weights which the first one's gradients have changed.
    short = shapes["one_process_tokens"]
    if free_bytes() >= shapes["needs_gib"] << 30:
        add(ranks=1, tokens=short, chunks=1, steps=2)
    else:
        reason = f"needs {shapes['needs_gib']} GiB of free memory"
        rows.append({"kind": "sequence", "ranks": 1, "tokens": short, "not_run": reason})
    add(ranks=ranks, tokens=short, chunks=short // chunk, steps=2)
    for tokens in shapes["tokens"]:
        add(ranks=ranks, tokens=tokens, chunks=tokens // chunk, steps=1)
    tokens = shapes["one_process_tokens_in_chunks"]
    add(ranks=1, tokens=tokens, chunks=tokens // chunk, steps=1)
    return rows


def free_bytes() -> int:
    """Memory that is free or can be freed."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0


# --- losses of two layouts --------------------------------------------------------------------


def loss_rows(pool: RankPool, shapes: Row, data: Path) -> list[Row]:
    """The loss of every step on real text, and associative recall, on one rank and on several."""
    rows = text_rows(pool, shapes, data, shapes["presets"], "fp32")
    with RankPool(PRELOAD_DOUBLE_PRECISION) as double:
        rows += text_rows(double, shapes, data, shapes["presets_in_double_precision"], "fp64")
    return rows + [recall_row(pool, shapes, ranks) for ranks in (1, shapes["ranks"])]


def text_rows(
    pool: RankPool, shapes: Row, data: Path, presets: list[str], precision: str
) -> list[Row]:
    """Losses of the steps on real text of each preset, on one rank and on several."""
    rows: list[Row] = []
    for preset in presets:
        for ranks in (1, shapes["ranks"]):
            flags = (
                f"{shapes['text']} --data-path {data} --longseq-linear-attention {preset} "
                f"--context-parallel-size {ranks}"
            )
            steps = train(pool, flags, ranks=ranks)["steps"]
            rows.append(
                {"kind": "text", "name": preset, "precision": precision, "ranks": ranks}
                | {"losses": [step["loss"] for step in steps]}
            )
            print(f"{preset}, {precision}, CP {ranks}: loss {steps[-1]['loss']:.6f}", flush=True)
    return rows


def recall_row(pool: RankPool, shapes: Row, ranks: int) -> Row:
    """Associative recall learnt on so many ranks: losses of all steps, answers of the last 20."""
    from associative_recall import train_recall

    with _folders() as (folder, logs):
        flags = (
            f"{shapes['recall']} --context-parallel-size {ranks} --longseq-measure {folder}"
        ).split()
        by_rank = pool.run(
            train_recall,
            world_size=ranks,
            args=(flags, shapes["pairs"], shapes["keys"]),
            timeout_seconds=TIMEOUT_SECONDS,
            log_directory=logs,
        )
        losses = [step["loss"] for step in merge_steps(read_steps(folder))]
    last = sorted(by_rank[0])[-20:]
    sure, asked = (sum(answers[step][i] for answers in by_rank for step in last) for i in (0, 1))
    return {
        "kind": "recall",
        "ranks": ranks,
        "losses": losses,
        "final_loss": sum(losses[-20:]) / len(losses[-20:]),
        "accuracy": sure / asked,
        "answers": asked,
    }
