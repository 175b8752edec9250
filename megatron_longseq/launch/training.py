"""Runs of the entry point on this machine's ranks: forked on a CPU, torchrun on GPUs."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .pool import RankPool
from .torchrun import torchrun_command

# What the parent process of a pool calls to import Megatron under the CPU platform.
PRELOAD = "megatron_longseq.launch.training:preload"
PRELOAD_DOUBLE_PRECISION = "megatron_longseq.launch.training:preload_double_precision"
WEEK_SECONDS = 7 * 24 * 3600.0


def preload() -> None:
    """Gets a parent process ready to fork ranks that run Megatron on a CPU."""
    from ..pretrain_gpt import prepare_process

    prepare_process(["--longseq-device", "cpu"])


def preload_double_precision() -> None:
    """As :func:`preload`, with every ``float32`` of Megatron's turned into ``float64``."""
    from ..pretrain_gpt import prepare_process

    prepare_process(["--longseq-device", "cpu"], double_precision=True)


def train_rank(argv: Sequence[str]) -> None:
    """What each forked rank runs: the entry point with this command line."""
    from ..pretrain_gpt import train

    sys.argv = ["pretrain_gpt.py", *argv]
    try:
        train()
    except SystemExit as end:
        # Megatron leaves so when it was told to stop early: --exit-interval, a signal, ..
        if end.code not in (None, 0):
            raise


def run_training(
    pool: RankPool,
    argv: Sequence[str],
    *,
    processes: int,
    foreground: Sequence[int] = (0,),
    timeout_seconds: float = WEEK_SECONDS,
    threads: int | None = None,
    log_directory: Path | None = None,
) -> None:
    """Trains on forked CPU ranks; see :meth:`RankPool.run` for the arguments and errors.

    Args:
        threads: of each rank; default: this machine's cores shared by the ranks.
    """
    if threads is None:
        threads = max(1, len(os.sched_getaffinity(0)) // processes)
    pool.run(
        train_rank,
        world_size=processes,
        args=(list(argv),),
        foreground=foreground,
        timeout_seconds=timeout_seconds,
        threads=threads,
        log_directory=log_directory,
    )


def run_torchrun(argv: Sequence[str], *, processes: int) -> int:
    """Trains with torchrun; returns its exit status."""
    return subprocess.run(torchrun_command(argv, processes=processes), check=False).returncode
