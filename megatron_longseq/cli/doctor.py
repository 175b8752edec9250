"""``longseq doctor``: what is installed, which kernel runs where, and what is wrong."""

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..environment import UNDECLARED, Environment, Feature, Package, inspect_environment

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
    """Prints tables and, last, the verdict."""
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    console.print(_machine_lines(found))
    console.print(package_table(found))
    console.print(feature_table(found))
    for line in install_lines(found):
        # Not wrapped: to be copied.
        console.print(Text(line), soft_wrap=True)
    if found.problems:
        console.print(problem_table(found))
    console.print(Text(found.verdict, style="bold green" if found.can_train else "bold red"))


def _machine_lines(found: Environment) -> Text:
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
    return Text("\n".join(lines))


def package_table(found: Environment) -> Table:
    """Versions found, and what was tested; small ones that are fine share a line."""
    table = Table(title="Packages", title_justify="left")
    for column in ("package", "found", "supported", "tested with", "used for"):
        table.add_column(column, overflow="fold")
    quiet = []
    for package in found.packages:
        if package.use == UNDECLARED and package.works and package.in_range:
            quiet.append(f"{package.name} {package.version}")
            continue
        table.add_row(
            package.name, _found(package), package.supported, _tested(package), Text(package.use)
        )
    if quiet:
        table.caption = f"also needed by Megatron, and found: {', '.join(quiet)}"
        table.caption_justify = "left"
    return table


def _found(package: Package) -> Text:
    text = package.version or ""
    if package.status != "found":
        text = f"{text} ({package.status})" if text else package.status
    text += f": {package.note}" if package.note else ""
    good = package.works and package.in_range
    missing = package.status == "missing" and not package.needed
    return Text(text, style="" if good else ("dim" if missing else "red"))


def _tested(package: Package) -> str:
    if package.tested_with is None:
        return "never run"
    return package.tested_with + ("" if package.used_in_tests else " (pinned, not used by a test)")


def feature_table(found: Environment) -> Table:
    """Which implementation runs where."""
    table = Table(title="What runs here, and what would run on a GPU", title_justify="left")
    for column in ("feature", "device", "uses", "missing for more"):
        table.add_column(column, overflow="fold")
    for feature in found.features:
        device = feature.device + ("" if feature.here else " (none here)")
        uses = Text(feature.uses or "nothing", style="" if feature.uses else "red")
        table.add_row(feature.name, device, uses, Text(_missing(feature)))
    return table


def _missing(feature: Feature) -> str:
    return "\n".join(f"{missing.name}: {missing.why}" for missing in feature.missing)


def install_lines(found: Environment) -> list[str]:
    """The command that brings each missing package, once."""
    commands = {
        missing.install: missing.name
        for feature in found.features
        for missing in feature.missing
        if missing.install
    }
    return [f"for {name}: {command}" for command, name in commands.items()]


def problem_table(found: Environment) -> Table:
    """Problems, the worst first."""
    table = Table(title="Problems", title_justify="left")
    for column in ("", "what", "what to do"):
        table.add_column(column, overflow="fold")
    styles = {"stops": "red", "warning": "yellow", "hint": "dim"}
    for problem in found.problems:
        style = styles[problem.severity]
        table.add_row(Text(problem.severity, style=style), Text(problem.what), Text(problem.remedy))
    return table
