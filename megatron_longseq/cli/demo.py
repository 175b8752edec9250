"""``longseq demo``: one GPT on real text, trained in several layouts, side by side."""

import argparse
import shutil
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..compare.render import loss_table, save_json, save_picture, summary_table
from ..compare.rows import Comparison, RowFile, RowResult, by_model, read_rows
from ..errors import UserError
from ..launch import RankFailure, RankPool
from ..launch.training import PRELOAD

CONFIG = "configs/runs/demo.yaml"
ROWS = "configs/demo.yaml"
# Without a terminal there is no bar that redraws, and a table as wide as it needs to be.
PLAIN_WIDTH = 150
# Of the loss of a step: in float32 a dozen steps of the same run in two layouts stay well below.
LARGEST_DIFFERENCE = 1e-4


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "demo",
        help="train one GPT on real text in several layouts and compare",
        description="Prepares a corpus from the source code of Python's standard library, trains "
        "a GPT, and variants of it with linear attention, each from one set of weights in every "
        "layout, and compares losses, speed, memory and traffic. Results are kept in the output "
        "folder.",
    )
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    parser.add_argument("--config", default=CONFIG, help=f"the run (default {CONFIG})")
    parser.add_argument("--rows", default=ROWS, help=f"its layouts (default {ROWS})")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; returns 0 if every layout trained to the same loss."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    rows = read_rows(arguments.rows)
    output: Path = arguments.output
    prepare_corpus(output / "corpus", console)
    for folder in ("weights", "steps", "logs"):
        shutil.rmtree(output / folder, ignore_errors=True)
    started = time.monotonic()
    results: list[RowResult] = []
    with RankPool(preload=PRELOAD) as pool, _progress(console) as progress:
        data = ["--data-path", str(output / "corpus")]
        comparison = Comparison(pool, arguments.config, rows, output, data)
        task = progress.add_task("import Megatron, make the weights", total=None, note="")
        try:
            made: set[str | None] = set()
            for row in rows.rows:
                if row.model not in made:
                    comparison.make_weights(row.model)
                    made.add(row.model)
                    progress.update(task, total=1, completed=1)
                results.append(_run_with_progress(comparison, row, progress, console))
        except RankFailure as failure:
            raise UserError(f"{failure}\nlogs are in {output / 'logs'}") from failure
    for own in by_model(results):
        console.print(loss_table(own))
    console.print(summary_table(results))
    save_picture(results, output / "loss.png")
    save_json(results, output / "demo.json")
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    console.print(
        f"{len(results)} layouts in {minutes} min {seconds} s; "
        f"the curves: {output / 'loss.png'}, the numbers: {output / 'demo.json'}"
    )
    apart = [
        row.label
        for own in by_model(results)
        for row in own
        if not row.difference_to(own[0]) <= LARGEST_DIFFERENCE
    ]
    if apart:
        console.print(f"WRONG: other losses than the model's first row: {', '.join(apart)}")
        return 1
    return 0


def prepare_corpus(prefix: Path, console: Console) -> None:
    """Makes the corpus unless it is there already."""
    from . import main

    if prefix.with_suffix(".bin").exists() and prefix.with_suffix(".idx").exists():
        console.print(f"corpus: {prefix} (from an earlier run)")
        return
    prefix.parent.mkdir(parents=True, exist_ok=True)
    if main(["prepare-data", "--output", str(prefix)]) != 0:
        raise UserError(f"the corpus {prefix} could not be prepared")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _run_with_progress(
    comparison: Comparison, row: RowFile, progress: Progress, console: Console
) -> RowResult:
    """Runs a row while a thread reads rank 0's steps as they are written."""
    task = progress.add_task(row.label, total=None, note="")
    watcher = _StepWatcher(progress, task)
    started = time.monotonic()
    try:
        result = comparison.run_row(row, on_start=watcher.start)
    finally:
        watcher.stop()
    count = len(result.losses)
    progress.update(task, total=count, completed=count, note=f"loss {result.losses[-1]:.4f}")
    if not console.is_terminal:
        seconds = time.monotonic() - started
        console.print(f"{row.label}: {count} steps in {seconds:.0f} s")
    return result


class _StepWatcher:
    """Shows how many steps rank 0 has written."""

    def __init__(self, progress: Progress, task) -> None:
        self._progress = progress
        self._task = task
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, directory: Path) -> None:
        self._thread = threading.Thread(target=self._watch, args=(directory,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, directory: Path) -> None:
        path = directory / "rank0.jsonl"
        while not self._stopped.wait(0.3):
            if path.exists():
                done = len(path.read_text().splitlines())
                self._progress.update(self._task, completed=done, note=f"{done} steps")
