"""``longseq train --config configs/runs/NAME.yaml [-- <flags>]``."""

import argparse
import itertools
import shlex
import sys

from ..errors import UserError, check_at_least_one
from ..launch import RankFailure, RankPool, torchrun_command
from ..launch.training import PRELOAD, run_torchrun, run_training
from ..run_config import Run, known_arguments, load_run


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "train",
        help="train a model",
        description="Trains with Megatron's own loop. Flags after -- are any of Megatron's or "
        "--longseq-.., and win over the config.",
    )
    parser.add_argument("--config", required=True, help="a run file, or its name in configs/runs")
    parser.add_argument(
        "--processes", type=int, help="ranks on this machine (default: the config's)"
    )
    parser.add_argument(
        "--print-command", action="store_true", help="print the torchrun line and stop"
    )
    parser.add_argument("flags", nargs="*", help="further flags, after --")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Trains; returns 0, or what torchrun returned."""
    check_at_least_one("--processes", arguments.processes)
    with RankPool(preload=PRELOAD) as pool:
        job: Run = pool.run(resolve, world_size=1, args=(arguments.config, list(arguments.flags)))[
            0
        ]
        processes = arguments.processes or job.processes
        if arguments.print_command:
            print(shlex.join(torchrun_command(job.argv, processes=processes)))
            return 0
        if runs_on_gpu(job.argv):
            return run_torchrun(job.argv, processes=processes)
        try:
            # Rank 0 prints what runs where, the last rank prints the losses: Megatron's habit.
            run_training(pool, job.argv, processes=processes, foreground=(0, processes - 1))
        except RankFailure as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    return 0


def resolve(config: str, flags: list[str]) -> Run:
    """Reads the config in a process that knows Megatron's flags."""
    return load_run(config, known_arguments(), flags)


def runs_on_gpu(argv: list[str]) -> bool:
    """Says whether these flags run on a GPU of this machine."""
    import torch

    device = "auto"
    for flag, value in itertools.pairwise(argv):
        if flag == "--longseq-device":
            device = value
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--longseq-device cuda: PyTorch finds no CUDA device here; use auto or cpu")
    return device != "cpu" and torch.cuda.is_available()
