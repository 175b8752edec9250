"""``longseq doctor``: what is installed, which kernel runs where, and what is wrong."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from ..environment import UNDECLARED, Environment, Feature, Package, inspect_environment

# A text and its style, and a line of a table.
Cell = tuple[str, str]
Row = tuple[Cell, ...]
PACKAGE_COLUMNS = ("package", "found", "supported", "tested with", "used for")
FEATURE_COLUMNS = ("feature", "device", "uses", "missing for more")
PROBLEM_COLUMNS = ("", "what", "what to do")
# Without a terminal: as wide as the longest command needs.
PLAIN_WIDTH = 150


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what is installed, which kernel each feature uses here, and what is wrong",
        description="Shows versions and what they were tested with, GPUs and driver, which "
        "implementation each feature uses here, what is missing for a better one, and problems. "
        "Exit status 0 if training can run here, 1 if not.",
    )
    parser.add_argument("--json", action="store_true", help="print everything found as JSON")
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="import Megatron too, to see that it works (takes about three times as long)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Reports; returns 0 if training can run here, else 1."""
    found = inspect_environment(thorough=arguments.thorough)
    if arguments.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print_report(found)
    return 0 if found.can_train else 1


def print_report(found: Environment) -> None:
    """Prints tables and, last, the verdict; plain lines where the package rich does not work."""
    try:
        importlib.import_module("rich.console")
    except Exception:  # missing, or broken in any way: the report is for such environments
        print("\n".join(plain_lines(found)))
    else:
        _print_tables(found)


def _print_tables(found: Environment) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    console.print(Text("\n".join(machine_lines(found))))
    console.print(_table("Packages", PACKAGE_COLUMNS, package_rows(found)))
    if also := also_found(found):
        console.print(Text(also, style="dim"))
    console.print(_table("What runs here, and on a GPU", FEATURE_COLUMNS, feature_rows(found)))
    for line in install_lines(found):
        # Not wrapped: to be copied.
        console.print(Text(line), soft_wrap=True)
    if found.problems:
        console.print(_table("Problems", PROBLEM_COLUMNS, problem_rows(found)))
    console.print(Text(found.verdict, style="bold green" if found.can_train else "bold red"))


def plain_lines(found: Environment) -> list[str]:
    """The report without tables."""
    lines = machine_lines(found)
    for title, rows in (
        ("Packages", package_rows(found)),
        ("What runs here, and on a GPU", feature_rows(found)),
        ("Problems", problem_rows(found)),
    ):
        lines += ["", title, *("  " + " | ".join(cell for cell, _ in row if cell) for row in rows)]
    return [*lines, also_found(found), *install_lines(found), "", found.verdict]


def _table(title: str, columns: Sequence[str], rows: Sequence[Row]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(text, style=style) for text, style in row))
    return table


def machine_lines(found: Environment) -> list[str]:
    """This package, this machine, its GPUs."""
    machine, torch = found.machine, found.torch
    cuda = torch.get("cuda")
    lines = [
        f"megatron_longseq {found.longseq}, Python {found.python} ({found.executable})",
        f"{machine.cpus} CPUs, {machine.memory_bytes / 2**30:.1f} GiB of memory, "
        f"driver {machine.driver or 'none'}, "
        + (f"torch for CUDA {cuda}, NCCL {torch.get('nccl') or 'none'}" if cuda else "no CUDA"),
    ]
    for gpu in machine.gpus:
        memory = "" if gpu.memory_mib is None else f", {gpu.memory_mib} MiB"
        capability = gpu.compute_capability
        shown = f", compute capability {capability[0]}.{capability[1]}" if capability else ""
        lines.append(f"GPU {gpu.index}: {gpu.name}{memory}{shown}")
    if not machine.gpus:
        lines.append("no GPU found")
    return lines


def package_rows(found: Environment) -> list[Row]:
    """Versions found, and what was tested; without the small ones of :func:`also_found`."""
    return [
        (
            (package.name, ""),
            _found(package),
            (package.supported, ""),
            (_tested(package), ""),
            (package.use, ""),
        )
        for package in found.packages
        if not _is_quiet(package)
    ]


def also_found(found: Environment) -> str:
    """The small packages that are as they should be, in one line."""
    quiet = [f"{p.name} {p.version}" for p in found.packages if _is_quiet(p)]
    return f"also needed by Megatron, and found: {', '.join(quiet)}" if quiet else ""


def _is_quiet(package: Package) -> bool:
    return package.use == UNDECLARED and package.works and package.in_range


def _found(package: Package) -> Cell:
    text = package.version or ""
    if package.status != "found":
        text = f"{text} ({package.status})" if text else package.status
    text += f": {package.note}" if package.note else ""
    good = package.works and package.in_range
    missing = package.status == "missing" and not package.needed
    return text, "" if good else ("dim" if missing else "red")


def _tested(package: Package) -> str:
    if package.tested_with is None:
        return "never run"
    return package.tested_with + ("" if package.used_in_tests else " (pinned, not used by a test)")


def feature_rows(found: Environment) -> list[Row]:
    """Which implementation runs where."""
    return [
        (
            (feature.name, ""),
            (feature.device + ("" if feature.here else " (none here)"), ""),
            (feature.uses or "nothing", "" if feature.uses else "red"),
            (_missing(feature), ""),
        )
        for feature in found.features
    ]


def _missing(feature: Feature) -> str:
    return "; ".join(f"{missing.name}: {missing.why}" for missing in feature.missing)


def install_lines(found: Environment) -> list[str]:
    """The command that brings each missing package, once."""
    commands = {
        missing.install: missing.name
        for feature in found.features
        for missing in feature.missing
        if missing.install
    }
    return [f"for {name}: {command}" for command, name in commands.items()]


def problem_rows(found: Environment) -> list[Row]:
    """Problems, the worst first."""
    styles = {"stops": "red", "warning": "yellow", "hint": "dim"}
    return [
        ((p.severity, styles[p.severity]), (p.what, ""), (p.remedy, "")) for p in found.problems
    ]
