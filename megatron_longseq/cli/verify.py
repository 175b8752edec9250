"""``longseq verify``: is this layout right? A run against one process, to rounding."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..errors import UserError, check_at_least_one
from ..launch import RankFailure, RankPool
from ..launch.training import PRELOAD, PRELOAD_DOUBLE_PRECISION

TIMEOUT_SECONDS = 1800.0


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "verify",
        help="compare a run with one process, or with stock Megatron",
        description="Runs a config (or flags after --) and a reference from the same weights and "
        "random data, and compares outputs of modules, loss, every parameter's gradient, and every "
        "parameter after some steps. Exit status 0 if all agree, 1 if not.",
    )
    parser.add_argument("--config", help="a run file, or its name in configs/runs")
    parser.add_argument("--processes", type=int, metavar="N", help="ranks (default: the config's)")
    parser.add_argument("--against", choices=("one-process", "stock"), default="one-process")
    parser.add_argument("--precision", choices=("fp64", "fp32", "bf16"), default="fp64")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default 3)")
    parser.add_argument("--seed", type=int, default=1, help="of the random tokens")
    parser.add_argument("--json", metavar="FILE", help="write the verdict there, or to - (stdout)")
    parser.add_argument("flags", nargs="*", help="further flags, after --")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verifies and prints the verdict; returns 0 if everything agrees, else 1."""
    from ..verification.session import verify

    check_at_least_one("--processes", arguments.processes)
    check_at_least_one("--steps", arguments.steps)
    if arguments.json not in (None, "-") and not Path(arguments.json).parent.is_dir():
        raise UserError(
            f"--json {arguments.json}: there is no folder {Path(arguments.json).parent}"
        )
    preload = PRELOAD_DOUBLE_PRECISION if arguments.precision == "fp64" else PRELOAD
    with RankPool(preload=preload) as pool:
        try:
            verdict = verify(
                pool,
                config=arguments.config,
                flags=list(arguments.flags),
                processes=arguments.processes,
                against=arguments.against,
                precision=arguments.precision,
                steps=arguments.steps,
                seed=arguments.seed,
                timeout_seconds=TIMEOUT_SECONDS,
            )
        except RankFailure as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    if arguments.json == "-":
        print(json.dumps(verdict, indent=2))
    else:
        print_verdict(verdict, arguments)
    if arguments.json not in (None, "-"):
        Path(arguments.json).write_text(json.dumps(verdict, indent=2) + "\n")
    return 0 if verdict["passed"] else 1


def print_verdict(verdict: dict, arguments: argparse.Namespace) -> None:
    """Prints the verdict as a table and one sentence."""
    table = Table(title=f"{arguments.precision}, against {arguments.against}")
    for column in ("compared", "largest relative difference", "allowed", "where"):
        table.add_column(column)
    for name, allowed in verdict["tolerances"].items():
        found = verdict[name]
        mark = "" if found["relative"] <= allowed else " ✗"
        label = f"parameter after {verdict['steps']} steps" if name == "parameter" else name
        table.add_row(label, f"{found['relative']:.2e}{mark}", f"{allowed:.0e}", found["where"])
    console = Console(width=120 if not sys.stdout.isatty() else None)
    console.print(table)
    if verdict["passed"]:
        counts = ", ".join(f"{number} {what}" for what, number in verdict["compared"].items())
        console.print(f"equal ({counts})")
    else:
        first = verdict["first_module"]
        console.print(
            f"DIFFERENT: the first module that differs is {first}"
            if first
            else "DIFFERENT: no module's output differs; look at the gradients' reductions"
        )
