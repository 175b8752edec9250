"""``python -m megatron_longseq.gpu_check``; see :mod:`megatron_longseq.gpu_check`."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

NO_GPU_EXIT_CODE = 3
MINUTES = 9.0
STARTING_SECONDS = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if everything agrees, 1 if not, 3 without a GPU."""
    arguments = parser().parse_args(argv)
    started = time.monotonic()
    import torch

    gpus = 0
    if arguments.device == "cuda" and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
    if arguments.device == "cuda" and gpus == 0:
        print(
            f"no GPU here (torch {torch.__version__}, CUDA {torch.version.cuda}); --device cpu "
            "runs the same checks on the CPU",
            file=sys.stderr,
        )
        return NO_GPU_EXIT_CODE
    from ..launch import RankPool
    from . import plan, report
    from .rows import BAD, FAILED, ON_CPU, ON_GPU, Row

    sizes = ON_GPU if arguments.device == "cuda" else ON_CPU
    checks, rows = plan.make_plan(arguments.device, sizes, gpus)
    if arguments.only:
        checks = [check for check in checks if arguments.only in check.name]
        rows = [row for row in rows if arguments.only in row.check]
    if not checks and not rows:
        print(f"--only {arguments.only}: no check has that in its name", file=sys.stderr)
        return 2

    def show(found: list, seconds: float) -> None:
        print("\n".join(report.terminal_lines(found, seconds)), flush=True)

    with RankPool() as pool:
        facts = {"torch": torch.__version__}
        try:
            (facts,) = pool.run(
                report.describe_device,
                world_size=1,
                args=(arguments.device,),
                timeout_seconds=STARTING_SECONDS,
            )
        except RuntimeError as failure:  # of the rank, or of the pool itself
            rows.append(Row("every case", FAILED, plan.first_line(failure), check="the device"))
        print(", ".join(f"{k} {v}" for k, v in facts.items() if v is not None), flush=True)
        deadline = started + 60 * arguments.minutes
        rows = plan.run_plan(pool, checks, deadline=deadline, report=show) + rows
    seconds = time.monotonic() - started
    output = arguments.output
    if output is None and arguments.device == "cuda" and not arguments.only:
        output = Path("docs/gpu-check.md")
    if output is not None:
        report.write(output, report.as_markdown(rows, facts, seconds))
        report.write(output.with_suffix(".json"), report.as_json(rows, facts, seconds))
        print(f"written: {output} and {output.with_suffix('.json')}")
    print(f"{report.verdict(rows)} ({seconds:.0f} s)")
    return 1 if any(row.status in BAD for row in rows) else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="gpu_check",
        description="Checks the lines of megatron_longseq that only a GPU can run, on one GPU.",
        allow_abbrev=False,
    )
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument(
        "--output",
        type=Path,
        help="the Markdown page; a JSON goes beside it (default: docs/gpu-check.md after a whole "
        "run on a GPU, otherwise none)",
    )
    made.add_argument("--only", default="", metavar="TEXT", help="checks with TEXT in their name")
    made.add_argument("--minutes", type=float, default=MINUTES, help="time limit (default 9)")
    return made


if __name__ == "__main__":
    # Devices are counted through NVML: this process must not hold a CUDA context itself.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    sys.exit(main())
