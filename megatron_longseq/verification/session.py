"""One verification from start to end: two runs on forked ranks, and the verdict.

The parent of the ranks knows Megatron; the process that calls :func:`verify` need not.
"""

import os
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..launch import RankPool


def verify(
    pool: RankPool,
    *,
    config: str | None = None,
    flags: Sequence[str] = (),
    processes: int | None = None,
    against: str = "one-process",
    precision: str = "fp64",
    steps: int = 3,
    seed: int = 1,
    timeout_seconds: float = 300.0,
) -> dict[str, Any]:
    """Compares a run with its reference.

    Args:
        pool: ranks prepared for Megatron; with double precision for ``fp64``.
        config: a run file or its name; or None, and ``flags`` say everything.
        processes: ranks of the run; default the config's.
        against, precision, steps, seed: see ``longseq verify --help``.

    Returns:
        The fields of :class:`~megatron_longseq.verification.comparison.Verdict`, and ``passed``.
    """
    if config is None and not flags:
        raise UserError("verify needs --config NAME, or flags after --")
    plan = pool.run(
        _plan,
        world_size=1,
        args=(config, list(flags), processes, against, precision, steps),
    )[0]
    # Records go through files: they are large, and only a process that knows Megatron reads them.
    with tempfile.TemporaryDirectory(prefix="longseq-verify-") as directory:
        for name, (argv, count, masked) in plan.items():
            pool.run(
                _capture,
                world_size=count,
                args=(argv, seed, masked, f"{directory}/{name}"),
                timeout_seconds=timeout_seconds,
            )
        return pool.run(
            _verdict, world_size=1, args=(directory, precision), timeout_seconds=timeout_seconds
        )[0]


def _plan(config, flags, processes, against, precision, steps):
    from ..run_config import Run, known_arguments, load_run
    from .runs import verification_runs

    parser = known_arguments()
    if config is None:
        run = Run(name="flags", description="", processes=processes or 1, argv=list(flags))
    else:
        run = load_run(config, parser, flags)
    return verification_runs(
        run.argv,
        parser,
        processes=processes or run.processes,
        against=against,
        precision=precision,
        steps=steps,
    )


def _capture(argv, seed, masked, directory):
    from .capture import capture_run

    record = capture_run(argv, seed, masked)
    os.makedirs(directory, exist_ok=True)
    with open(f"{directory}/rank{os.environ['RANK']}.pickle", "wb") as file:
        pickle.dump(record, file)


def _verdict(directory, precision):
    from .comparison import compare
    from .runs import ROUNDING, TOLERANCES

    records = {
        name: [pickle.loads(path.read_bytes()) for path in sorted(Path(directory, name).iterdir())]
        for name in ("reference", "candidate")
    }
    verdict = compare(**records, tolerances=TOLERANCES[precision], rounding=ROUNDING[precision])
    return verdict.as_dict()
