"""A tiny GPT and how to train it; shared by the tests that run Megatron from start to end."""

from collections.abc import Sequence
from pathlib import Path

from megatron_longseq.launch.training import run_training
from megatron_longseq.measurement.step_records import merge_steps, read_steps

# The vocabulary of 257 is padded to 320 for 1, 2 and 4 tensor-parallel ranks alike.
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 128 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --max-position-embeddings 64 "
    "--tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 80"
).split()
RUN = (
    "--seq-length 64 --micro-batch-size 1 --global-batch-size 4 --lr 0.003 "
    "--lr-decay-style constant --lr-decay-iters 100 --eval-iters 0 --eval-interval 1000 "
    "--log-interval 1 --seed 7"
).split()
CONTINUE = "--finetune --no-load-optim --no-load-rng --exit-on-missing-checkpoint".split()


def train(
    pool,
    folder: Path,
    flags: Sequence[str] | str = (),
    *,
    processes: int = 1,
    steps: int = 5,
    data: Path | None = None,
    model: Sequence[str] = tuple(MODEL),
    run: Sequence[str] = tuple(RUN),
) -> list[dict]:
    """Trains and returns the merged record of each step.

    Logs stay in ``folder/logs``; without ``data`` Megatron's mock data is used.
    """
    flags = flags.split() if isinstance(flags, str) else list(flags)
    source = ["--data-path", str(data), "--split", "90,10,0"] if data else ["--mock-data"]
    measured = folder / "steps"
    argv = [*model, *run, *source, "--train-iters", str(steps), *flags]
    run_training(
        pool,
        [*argv, "--longseq-measure", str(measured)],
        processes=processes,
        foreground=(),
        timeout_seconds=100,
        threads=1,
        log_directory=folder / "logs",
    )
    return merge_steps(read_steps(measured))


def losses(steps: Sequence[dict]) -> list[float]:
    """Mean loss per token of each step."""
    return [step["loss"] for step in steps]


def log(folder: Path, rank: int = 0) -> str:
    """What a rank printed."""
    return (folder / "logs" / f"rank{rank}.log").read_text()
