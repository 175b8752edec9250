"""The checks, each with its processes and its time limit; one that fails does not stop the rest."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..launch import RankFailure, RankPool
from ..softmax.block_kernels import kernels
from .kernels import check_kernel
from .linear_attention import check_linear_kernel, measure_linear_speed
from .ranks import compare_with_dense, digests, watch_memory
from .rows import BAD, FAILED, NOT_RUN, OK, SKIPPED, WRONG, Row, Sizes
from .speed import measure_speed

DTYPES = ("float64", "float32", "bfloat16", "float16")
# With less than this left a check is not begun: a process on a GPU needs it to start.
SHORTEST_SECONDS = 5.0
NCCL_LABEL = "2D attention, 2 GPUs over NCCL, bfloat16"


@dataclass(frozen=True)
class Check:
    """A function to run in fresh processes, once per environment.

    Attributes:
        ranks: processes; with a ``backend`` they form a process group.
        seconds: time limit of each run.
        environments: of each run, beside the usual one.
        judge: makes rows of the runs' results, ``[run][rank]``.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    ranks: int = 1
    backend: str | None = None
    seconds: float = 60.0
    environments: tuple[Mapping[str, str], ...] = ({},)
    judge: Callable[[list[list[Any]]], list[Row]] | None = None


def make_plan(device: str, sizes: Sizes, gpus: int) -> tuple[list[Check], list[Row]]:
    """(the checks for this device; rows for what cannot be checked here, with the reason).

    Args:
        gpus: how many there are; with two or more, NCCL is checked between two.
    """
    checks: list[Check] = []
    rows: list[Row] = []
    place = torch.device(device)
    usable = {
        name: tuple(d for d in DTYPES if kernel.unusable(getattr(torch, d), place) is None)
        for name, kernel in kernels().items()
    }
    for name, dtypes in usable.items():
        for group in _apart(dtypes, device):
            label = f"kernel {name}, {', '.join(group)}"
            checks.append(Check(label, check_kernel, (name, group, device, sizes.rows)))
        if not dtypes:
            reason = kernels()[name].unusable(torch.bfloat16, place)
            rows.append(Row("every case", SKIPPED, str(reason), check=f"kernel {name}"))
    for name, dtypes in usable.items():
        # The reference keeps all scores: nobody uses it for speed.
        timed = tuple(d for d in dtypes if d != "float64" and name != "reference")
        for group in _apart(timed, device):
            label = f"speed {name}, {', '.join(group)}"
            checks.append(Check(label, measure_speed, (name, group, device, sizes)))
    checks += _checks_of_linear_attention(device, sizes)
    checks += _checks_of_ranks(device, sizes, gpus)
    if gpus < 2:
        rows.append(Row("every case", SKIPPED, "needs two GPUs", check=NCCL_LABEL))
    return checks, rows


def _apart(dtypes: tuple[str, ...], device: str) -> list[tuple[str, ...]]:
    """Which dtypes share a process: on a GPU none, as an error there ends all that follows it."""
    if device == "cuda":
        return [(dtype,) for dtype in dtypes]
    return [dtypes] if dtypes else []


def _checks_of_linear_attention(device: str, sizes: Sizes) -> list[Check]:
    """Those of the Triton kernels; plain torch is what they are compared with."""
    name, dtypes = "triton", ("float32", "bfloat16", "float16")
    checks = []
    for group in _apart(dtypes, device):
        label = f"linear attention {name}, {', '.join(group)}"
        checks.append(Check(label, check_linear_kernel, (name, group, device, sizes.rows)))
    label = f"linear attention {name}, speed in bfloat16"
    speed = (name, ("bfloat16",), device, sizes)
    return [*checks, Check(label, measure_linear_speed, speed)]


def _checks_of_ranks(device: str, sizes: Sizes, gpus: int) -> list[Check]:
    tokens, dtypes = sizes.sequence, ("float32", "bfloat16")
    checks = [
        Check(
            f"2D attention, {ranks} processes on one device, {', '.join(group)}",
            compare_with_dense,
            (device, group, tokens),
            ranks,
            "gloo",
            90.0,
        )
        for ranks in (2, 4)
        for group in _apart(dtypes, device)
    ]
    checks.append(
        Check(
            "streams and pinned memory",
            digests,
            (device, "float32", tokens),
            2,
            "gloo",
            environments=({}, {"CUDA_LAUNCH_BLOCKING": "1"}),
            judge=judge_digests,
        )
    )
    calls = (device, "bfloat16", tokens, sizes.calls)
    checks.append(Check("memory over repeated calls", watch_memory, calls, 2, "gloo"))
    if gpus > 1:
        nccl = (device, ("bfloat16",), tokens)
        checks.append(Check(NCCL_LABEL, compare_with_dense, nccl, 2, "nccl", 90.0))
    return checks


def run_plan(
    pool: RankPool,
    checks: Sequence[Check],
    *,
    deadline: float,
    report: Callable[[list[Row], float], None],
) -> list[Row]:
    """Runs the checks in order.

    Args:
        deadline: on ``time.monotonic()``; what has not begun by then is not run, and says so.
        report: is given each check's rows and seconds as they come.
    """
    rows = []
    for check in checks:
        started = time.monotonic()
        found = run_check(pool, check, deadline)
        for row in found:
            row.check = check.name
        report(found, time.monotonic() - started)
        rows += found
    return rows


def run_check(pool: RankPool, check: Check, deadline: float) -> list[Row]:
    """The rows of one check; a failure, whatever its kind, is a row."""
    results = []
    for environment in check.environments:
        left = deadline - time.monotonic()
        if left < SHORTEST_SECONDS:
            return [Row("every case", NOT_RUN, "out of time")]
        try:
            results.append(
                pool.run(
                    check.function,
                    world_size=check.ranks,
                    args=check.args,
                    backend=check.backend,
                    timeout_seconds=min(check.seconds, left),
                    environment=environment,
                )
            )
        except RankFailure as failure:
            return [Row("every case", FAILED, first_line(failure))]
        except Exception as error:  # the pool itself: no memory, no process, a dead parent
            return [Row("every case", FAILED, first_line(error))]
    return (check.judge or merge_ranks)(results)


def first_line(error: Exception) -> str:
    """The first line and, of a traceback in it, where it was raised."""
    text = str(error) if isinstance(error, RankFailure) else f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    frames = [line for line in lines if line.startswith("File ")]
    return "; ".join([*lines[:1], *frames[-1:]])[:400]


def merge_ranks(results: list[list[list[Row]]]) -> list[Row]:
    """One row per case: that of the rank where it came out worst."""
    worst: dict[str, Row] = {}
    for run in results:
        for rank, rows in enumerate(run):
            for row in rows:
                if len(run) > 1 and row.status in BAD:
                    row.detail = f"rank {rank}: {row.detail}"
                known = worst.get(row.case)
                if known is None or _badness(row) > _badness(known):
                    worst[row.case] = row
    return list(worst.values())


def _badness(row: Row) -> tuple[bool, float]:
    errors = [number for number in row.numbers.values() if isinstance(number, float)]
    return row.status in BAD, max(errors, default=0.0)


def judge_digests(results: list[list[dict[str, str]]]) -> list[Row]:
    """All runs and streams of a rank must have given the same bits."""
    rows = []
    for rank in range(len(results[0])):
        names = ("launches as usual", "CUDA_LAUNCH_BLOCKING=1")
        found = {
            f"{how}, {case}": digest
            for how, run in zip(names, results, strict=True)
            for case, digest in run[rank].items()
        }
        if len(set(found.values())) == 1:
            rows.append(Row(f"rank {rank}", OK, f"{len(found)} runs, the same bits", dict(found)))
        else:
            shown = "; ".join(f"{case}: {digest}" for case, digest in found.items())
            rows.append(Row(f"rank {rank}", WRONG, f"the bits differ: {shown}", dict(found)))
    return rows
