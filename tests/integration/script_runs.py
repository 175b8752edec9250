"""Runs of scripts of a Megatron-LM checkout, on ranks that import Megatron from there."""

import os
import re
import runpy
import shutil
import sys
from pathlib import Path

from training_runs import MODEL, RUN

from megatron_longseq.launch import RankPool
from megatron_longseq.launch.training import train_rank

CHECKOUT_VARIABLE = "LONGSEQ_TEST_CHECKOUT"
PRELOAD = f"{__name__}:preload"

# What a stock script must be told on a CPU, and what our flags set by default; the same for all.
ON_CPU = (
    "--distributed-backend gloo --transformer-impl local --use-cpu-initialization "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --no-rope-fusion "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion --num-workers 0 --attention-dropout 0 --hidden-dropout 0 "
    "--no-create-attention-mask-in-dataloader"
).split()
_RUN = [*MODEL, *RUN, *ON_CPU, "--log-params-norm", "--train-iters", "5"]
_STEP = re.compile(r"iteration +\d+/.*?lm loss: (\S+) .*?grad norm: (\S+) .*?params norm: (\S+) ")


def preload() -> None:
    """Imports Megatron from the checkout that the environment names."""
    from megatron_longseq.pretrain_gpt import prepare_process

    folder = os.environ[CHECKOUT_VARIABLE]
    prepare_process(["--longseq-device", "cpu", "--megatron-path", folder])


def make_checkout(folder: Path, source: Path | None) -> Path:
    """A checkout to play with: of ``source``, or of the installed wheel and the tiny script.

    The source itself stays as it is: tests compile into the copy and patch it.
    """
    import importlib.util

    core = importlib.util.find_spec("megatron.core")
    wheel = Path(core.submodule_search_locations[0]).parent
    folder.mkdir()
    if source is None:
        (folder / "megatron").symlink_to(wheel)
        script = Path(__file__).with_name("tiny_pretrain_gpt.py")
        shutil.copy(script, folder / "pretrain_gpt.py")
        return folder
    for script in source.glob("*.py"):
        shutil.copy(script, folder)
    shutil.copytree(source / "megatron", folder / "megatron")
    helpers = Path("core", "datasets")
    if not list((folder / "megatron" / helpers).glob("helpers_cpp*.so")):
        # Compiling them needs pybind11; the wheel of the same release ships them.
        for binary in (wheel / helpers).glob("helpers_cpp*.so"):
            shutil.copy(binary, folder / "megatron" / helpers)
    return folder


def run_file(script: str, argv: list[str]) -> None:
    """What each rank runs: the script, as ``python SCRIPT ..`` would."""
    sys.argv = [script, *argv]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def steps_of_script(
    pool: RankPool, script: Path, logs: Path, flags="", *, processes=1, environment=None
) -> list[tuple[str, ...]]:
    """Loss, gradient norm and parameter norm of each step, as Megatron printed them."""
    argv = [*_RUN, "--mock-data", *flags.split()]
    pool.run(
        run_file,
        world_size=processes,
        args=(str(script), argv),
        environment=environment or {},
        timeout_seconds=100,
        log_directory=logs,
    )
    return printed_steps(logs, processes)


def steps_of_entry_point(
    pool: RankPool, checkout: Path, logs: Path, flags="", *, processes=1
) -> list[tuple[str, ...]]:
    """As :func:`steps_of_script`, of our entry point with ``--megatron-path``."""
    argv = [*_RUN, "--mock-data", "--megatron-path", str(checkout), *flags.split()]
    pool.run(
        train_rank, world_size=processes, args=(argv,), timeout_seconds=100, log_directory=logs
    )
    return printed_steps(logs, processes)


def printed_steps(logs: Path, processes: int) -> list[tuple[str, ...]]:
    """The last rank prints the losses."""
    text = (logs / f"rank{processes - 1}.log").read_text()
    return [match.groups() for match in _STEP.finditer(text)]
