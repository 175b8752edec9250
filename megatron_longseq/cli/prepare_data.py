"""``longseq prepare-data``: text to a corpus that Megatron trains on."""

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from megatron_longseq.data import prepare, splits
from megatron_longseq.data.tokenizer import (
    BYTES,
    PACKAGE_OF_TYPE,
    TOKENIZER_FLAGS,
    build_tokenizer,
    check_tokenizer_options,
)
from megatron_longseq.data.writer import STOPPING
from megatron_longseq.errors import UserError

MOST_WORKERS = 16
"""Default limit; beyond it, one process that reads and writes is the limit."""

DESCRIPTION = """\
Turns text into PREFIX.bin and PREFIX.idx, the format Megatron trains on, and PREFIX.json, with
which a training run checks that its tokenizer is that of the corpus. Each file of text, and each
line of .jsonl, is one document; without INPUT, each package of Python's standard library is."""


def add_parser(subparsers: Any) -> None:
    """Adds ``prepare-data`` to the subcommands of ``longseq``."""
    parser = subparsers.add_parser(
        "prepare-data", help="turn text into a corpus for training", description=DESCRIPTION
    )
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="INPUT",
        help="folder of text or source files, text file, .jsonl or .jsonl.gz "
        "(default: the standard library of the running Python)",
    )
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="path of the corpus, without an ending"
    )
    parser.add_argument("--key", help="key of the document in JSON lines (default: text)")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a corpus that is at PREFIX"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help=f"processes that tokenise (default: one per CPU, {MOST_WORKERS} at most); "
        "bytes needs none",
    )
    group = parser.add_argument_group("tokenizer", "Megatron's flags, under Megatron's names")
    group.add_argument(
        "--tokenizer-type",
        default=BYTES,
        metavar="TYPE",
        help=f"{BYTES} (default; needs nothing else), {', '.join(PACKAGE_OF_TYPE)}",
    )
    for flag in TOKENIZER_FLAGS:
        kinds: dict[str, dict[str, Any]] = {
            "text": {"metavar": "NAME"},
            "file": {"metavar": "FILE"},
            "integer": {"type": int, "metavar": "N"},
            "list": {"nargs": "+", "metavar": "TOKEN"},
            "true": {"action": "store_true"},
            "false": {"action": "store_false"},
        }
        group.add_argument(
            flag.flag,
            dest=flag.field,
            default=argparse.SUPPRESS,
            help=flag.help,
            **kinds[flag.kind],
        )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prepares the corpus that ``arguments`` describe and says how to train on it.

    Returns:
        The exit code: 0, or 128 and the signal's number after Ctrl-C, SIGTERM or SIGHUP.

    Raises:
        UserError: Something the user gave can't be used; nothing is left behind.
    """
    options = {
        flag.field: getattr(arguments, flag.field)
        for flag in TOKENIZER_FLAGS
        if hasattr(arguments, flag.field)
    }
    check_tokenizer_options(arguments.tokenizer_type, options)
    workers = _workers(arguments.workers, arguments.tokenizer_type)
    stopped_by: list[int] = []
    try:
        with _stopping_raises(stopped_by):
            plan = prepare.plan_corpus(
                arguments.inputs,
                arguments.output,
                key=arguments.key,
                overwrite=arguments.overwrite,
            )
            start = time.monotonic()
            tokenizer = build_tokenizer(arguments.tokenizer_type, options)
            with _progress_bar(plan.size) as progress:
                prepared = prepare.write_corpus(plan, tokenizer, workers=workers, progress=progress)
    except KeyboardInterrupt:
        number = stopped_by[0] if stopped_by else signal.SIGINT
        name = signal.Signals(number).name
        print(f"stopped by {name}: no unfinished file is left", file=sys.stderr)
        return 128 + number
    print(summary(prepared, time.monotonic() - start))
    return 0


def _workers(given: int | None, tokenizer_type: str) -> int:
    if given is None:
        return min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    if given < 1:
        raise UserError(f"--workers {given}: must be at least 1")
    if tokenizer_type == BYTES and given > 1:
        raise UserError(
            f"--workers {given}: no meaning with --tokenizer-type bytes, which is as fast as the "
            "disk in one process; leave it out"
        )
    return given


def summary(prepared: prepare.PreparedCorpus, seconds: float) -> str:
    """Returns what was written, and the flags of a training run on it, as lines of text."""
    facts, prefix = prepared.sidecar, prepared.prefix
    lines = [
        f"{prefix}.bin    {prepare.format_bytes(facts.bin_bytes)}",
        f"{prefix}.idx    {prepare.format_bytes(prepared.idx_bytes)}",
        f"{prefix}.json   tokenizer and sizes",
        f"source      {', '.join(facts.source[:3])}" + (", ..." if len(facts.source) > 3 else ""),
        f"documents   {facts.documents:,}",
        f"tokens      {facts.tokens:,}, one end of document each included ({seconds:.1f} s)",
        f"longest     {facts.longest_document:,} tokens: {prepared.longest_name}",
    ]
    if prepared.skipped:
        found = (f"{count:,} {kind}" for kind, count in sorted(prepared.skipped.items()))
        lines.append(f"skipped     {', '.join(found)}")
    # Parts are whole documents: without a look at the lengths, a part could well be empty.
    split = (
        splits.suggested_split(prepared.lengths, max(1, facts.tokens // 100)) or splits.TRAIN_ONLY
    )
    flags = ["--data-path", prefix, "--split", split, *facts.training_flags]
    if split == splits.TRAIN_ONLY:
        flags += ["--eval-iters", "0"]
    longest = splits.smallest_part(split, prepared.lengths) - 1
    lines += [
        "",
        "Train on it with these flags of Megatron's:",
        f"  {shlex.join(flags)}",
        f"and a --seq-length up to {longest:,}, which each part of this split can fill.",
    ]
    return "\n".join(lines)


@contextmanager
def _stopping_raises(stopped_by: list[int]) -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end the block as Ctrl-C does, so that its files are removed."""

    def stop(number: int, frame: FrameType | None) -> None:
        stopped_by.append(number)
        raise KeyboardInterrupt

    # What is ignored stays so: nohup and shells that start jobs in the background rely on it.
    heeded = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _progress_bar(size: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar of ``size`` bytes on the terminal; yields what moves it. None without one."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("tokenising"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=size)
        yield lambda done: bar.advance(task, done)
