"""Unmodified Megatron on a CPU: every stock layout trains to the loss of one process."""

import re

import pytest
from training_runs import CONTINUE, log, losses, train

LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2-interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ),
    "dp2": (2, ""),
    "dp2-zero1-overlap": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--ddp-bucket-size 1",
    ),
    "tp2-pp2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
    ),
    "tp2-dp2-recompute": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
}


@pytest.fixture(scope="module")
def shared(megatron_ranks, tmp_path_factory, corpus):
    """A checkpoint of one process, and the losses of one process that starts from it."""
    folder = tmp_path_factory.mktemp("shared")
    weights = folder / "weights"
    train(
        megatron_ranks,
        folder / "first",
        f"--save {weights} --save-interval 2",
        steps=2,
        data=corpus,
    )
    start = f"--load {weights} {' '.join(CONTINUE)}"
    reference = losses(train(megatron_ranks, folder / "one", start, data=corpus))
    assert reference[-1] < reference[0], "the model must learn, or equal losses say nothing"
    return start, reference


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stock_layout_trains_to_the_loss_of_one_process(
    layout, shared, megatron_ranks, tmp_path, corpus
):
    start, reference = shared
    processes, flags = LAYOUTS[layout]
    found = losses(
        train(megatron_ranks, tmp_path, f"{start} {flags}", processes=processes, data=corpus)
    )
    assert found == pytest.approx(reference, rel=1e-6)


def test_an_interleaved_pipeline_gives_the_same_bits_every_time(megatron_ranks, tmp_path):
    flags = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    runs = [
        losses(train(megatron_ranks, tmp_path / str(i), flags, processes=2, steps=3))
        for i in range(2)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("precision", ["--bf16", "--fp16 --initial-loss-scale 1024"])
def test_half_precision_stays_close_to_float32(precision, megatron_ranks, tmp_path):
    flags = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    exact = losses(train(megatron_ranks, tmp_path / "exact", flags, processes=2))
    found = losses(train(megatron_ranks, tmp_path / "half", f"{flags} {precision}", processes=2))
    assert found == pytest.approx(exact, rel=5e-3)
    assert found != exact


def test_evaluation_and_tensorboard_run(megatron_ranks, tmp_path, corpus):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tmp_path / "board"
    flags = (
        f"--eval-iters 2 --eval-interval 2 --tensorboard-dir {board} --tensorboard-log-interval 1 "
        "--log-memory-to-tensorboard"
    )
    steps = train(megatron_ranks, tmp_path, flags, steps=4, data=corpus)
    assert "validation loss at iteration 4" in log(tmp_path)
    events = EventAccumulator(str(board)).Reload()
    logged = [event.value for event in events.Scalars("lm loss")]
    assert logged == pytest.approx(losses(steps), rel=1e-6)
    peak = events.Scalars("mem-max-allocated-bytes")[-1].value
    assert peak > 100_000  # bytes of live tensors; zero where nobody counts


def test_megatron_logs_our_exact_memory(megatron_ranks, tmp_path):
    steps = train(megatron_ranks, tmp_path, steps=2)
    pattern = r"max allocated: ([\d.]+)"
    logged = [float(value) * 2**20 for value in re.findall(pattern, log(tmp_path))]
    assert logged[0] == pytest.approx(steps[0]["peak_bytes"], rel=0.05)


def test_the_start_up_lines_say_what_runs_where(megatron_ranks, tmp_path):
    flags = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    train(megatron_ranks, tmp_path, flags, processes=4, steps=1)
    text = log(tmp_path)
    assert "CPU over gloo" in text
    assert "2 layers on this rank: attention SelfAttention with DotProductAttention" in text
    assert "norm SequenceParallelNorm" in text
    assert "tensor parallel 2: [0 1] [2 3]" in text
    assert "pipeline parallel 2: [0 2] [1 3]" in text
    assert "hidden state [32, 1, 64] float32" in text
    assert "megatron_longseq" not in log(tmp_path, rank=1)
