"""Double rings and context-first placement inside real Megatron: equal to one process."""

import pytest
from training_runs import log, losses, train

from megatron_longseq.verification.session import verify

SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 96 --seq-length 48 --max-position-embeddings 48 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 0.01 --position-embedding-type rope "
    "--tokenizer-type NullTokenizer --vocab-size 61 --make-vocab-size-divisible-by 8 "
    "--longseq-context-parallel 2d --context-parallel-size 4"
)
LAYOUTS = {
    "windows of two": (4, "--longseq-head-parallel-size 1 --longseq-ring-window-size 2"),
    "context-first, tensor parallel": (
        8,
        "--longseq-head-parallel-size 2 --longseq-placement context-first "
        "--tensor-model-parallel-size 2 --sequence-parallel",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_one_process_in_double_precision(layout, megatron_ranks_fp64):
    processes, flags = LAYOUTS[layout]
    verdict = verify(
        megatron_ranks_fp64, flags=f"{SHAPE} {flags}".split(), processes=processes, steps=1
    )
    assert verdict["passed"], verdict
    assert max(verdict[name]["relative"] for name in ("output", "loss", "gradient")) < 1e-12


def test_placement_changes_no_loss_and_the_start_up_lines_say_what_runs(
    megatron_ranks, tmp_path, corpus
):
    grid = "--longseq-context-parallel 2d --context-parallel-size 4 --longseq-head-parallel-size"
    head_first = train(
        megatron_ranks, tmp_path / "a", f"{grid} 2", processes=4, steps=3, data=corpus
    )
    context_first = train(
        megatron_ranks,
        tmp_path / "b",
        f"{grid} 2 --longseq-placement context-first",
        processes=4,
        steps=3,
        data=corpus,
    )
    assert losses(context_first) == losses(head_first), "the same sums in the same order"
    assert "head-first; ring: single, a node holds the whole ring" in log(tmp_path / "a")
    assert "context-first; ring: single" in log(tmp_path / "b")
