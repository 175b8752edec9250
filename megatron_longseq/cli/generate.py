"""``longseq generate --load DIR --prompt TEXT``: text from a trained model of linear layers."""

import argparse
import subprocess
import sys

from ..errors import check_at_least_one
from ..generation import Request, add_arguments, request_of
from ..launch import RankFailure, RankPool, torchrun_command
from ..launch.training import PRELOAD

TIMEOUT_SECONDS = 24 * 3600.0


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "generate",
        help="text from a trained model of linear layers",
        description="Loads a checkpoint of a model trained with --longseq-linear-attention, in "
        "whatever layout, and prints how it goes on from a prompt. A long prompt is split over the "
        "processes; each further token costs the same, however long the text.",
    )
    add_arguments(parser)
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="that share the prompt (default 1)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generates and prints the text."""
    import torch

    check_at_least_one("--processes", arguments.processes)
    request = request_of(arguments)
    request.check()
    if torch.cuda.is_available():
        command = torchrun_command(
            _flags(arguments), processes=arguments.processes, module="megatron_longseq.generation"
        )
        return subprocess.run(command, check=False).returncode
    with RankPool(preload=PRELOAD) as pool:
        try:
            texts = pool.run(
                _generate,
                world_size=arguments.processes,
                args=(request, arguments.processes),
                backend="gloo",
                timeout_seconds=TIMEOUT_SECONDS,
            )
        except RankFailure as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    print(texts[0])
    return 0


def _generate(request: Request, processes: int) -> str:
    from ..generation import generate

    return generate(request, processes)


def _flags(arguments: argparse.Namespace) -> list[str]:
    """The request's flags as the user gave them; a prompt's file stays a file."""
    own = ("load", "step", "prompt", "prompt_file", "tokens", "temperature", "top_k", "seed")
    return [
        f"--{name.replace('_', '-')}={getattr(arguments, name)}"
        for name in own
        if getattr(arguments, name) is not None
    ]
