"""What keeping attention cannot work with ends a run before its first step, by name."""

import os

import pytest

from megatron_longseq.errors import UserError
from megatron_longseq.memory.keep_attention import Kept, keep_or_compute, keep_rows_or_compute

GOOD = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 "
    "--lr 0.001 --mock-data --tokenizer-type NullTokenizer --vocab-size 257 "
    "--position-embedding-type rope --transformer-impl local"
)
FULL = "--recompute-granularity full --recompute-method"
KEEP = "--longseq-keep-attention-output"
TWO_D = "--longseq-context-parallel 2d"
CP = "--context-parallel-size"

ACCEPTED = {
    "every layer": (f"{TWO_D} {FULL} uniform --recompute-num-layers 1 {KEEP}", 1),
    "some layers": (f"{TWO_D} {FULL} block --recompute-num-layers 3 {KEEP}", 1),
    "windows": (f"{TWO_D} {CP} 4 --longseq-head-parallel-size 1 --longseq-ring-window-size 2", 4),
    "placement": (f"{TWO_D} {CP} 4 --longseq-placement context-first", 4),
}
REFUSED = {
    "without a recompute": (f"{TWO_D} {KEEP}", 1, [KEEP, "--recompute-granularity full"]),
    "with a selective one": (
        f"{TWO_D} {KEEP} --recompute-granularity selective",
        1,
        ["--recompute-granularity selective", KEEP, "opposite"],
    ),
    "layers in groups": (
        f"{TWO_D} {KEEP} {FULL} uniform --recompute-num-layers 2",
        1,
        ["--recompute-num-layers 2", "use 1", "block"],
    ),
    "stock attention": (
        f"{KEEP} {FULL} uniform --recompute-num-layers 1",
        1,
        [KEEP, "all layers are Megatron's", TWO_D],
    ),
    "further tokens": (
        f"{TWO_D} {KEEP} {FULL} uniform --recompute-num-layers 1 --mtp-num-layers 1",
        1,
        ["--mtp-num-layers 1", KEEP],
    ),
    "a share without it": (
        f"{TWO_D} --longseq-keep-attention-tokens 0.5",
        1,
        ["--longseq-keep-attention-tokens 0.5", f"no effect without {KEEP}"],
    ),
    "no share": (
        f"{TWO_D} {KEEP} {FULL} uniform --longseq-keep-attention-layers 0",
        1,
        ["--longseq-keep-attention-layers 0.0", "more than 0 and at most 1"],
    ),
    "a share of tokens of linear layers": (
        f"--longseq-linear-attention gla --position-embedding-type none {KEEP} {FULL} uniform "
        "--recompute-num-layers 1 --longseq-keep-attention-tokens 0.5",
        1,
        ["--longseq-keep-attention-tokens 0.5", "only layers of 2D attention"],
    ),
    "a full recompute under Megatron-FSDP": (
        f"--longseq-zero zero3 {FULL} uniform --recompute-num-layers 1",
        2,
        ["--recompute-granularity full", "--longseq-zero zero1"],
    ),
    "checkpoints under Megatron-FSDP": (
        "--longseq-zero zero2 --save /tmp/none",
        2,
        ["--save /tmp/none", "seen to hang"],
    ),
    "a window that does not divide the ring": (
        f"{TWO_D} {CP} 4 --longseq-head-parallel-size 1 --longseq-ring-window-size 3",
        4,
        ["--longseq-ring-window-size 3", "ring of 4", "1, 2, 4"],
    ),
    "a window without 2D attention": (
        "--longseq-ring-window-size 2",
        1,
        ["--longseq-ring-window-size 2", f"no effect without {TWO_D}"],
    ),
    "a placement of one rank": (
        f"{TWO_D} --longseq-placement context-first",
        1,
        ["--longseq-placement context-first", "greater than 1"],
    ),
    "a placement of METP": (
        f"{TWO_D} {CP} 2 --longseq-tensor-parallel metp --tensor-model-parallel-size 2 "
        "--sequence-parallel --longseq-placement context-first",
        4,
        ["--longseq-placement context-first", "Megatron's tensor parallelism"],
    ),
}


def answers_to_all():
    import argparse

    from megatron_longseq import arguments, compat

    parser = argparse.ArgumentParser(allow_abbrev=False)
    compat.add_megatron_arguments(parser)
    arguments.add_arguments(parser)
    found = {}
    for case, (flags, ranks, *_) in {**ACCEPTED, **REFUSED}.items():
        os.environ["WORLD_SIZE"] = str(ranks)
        try:
            arguments.check_command_line(parser, f"{GOOD} {flags}".split())
            found[case] = "accepted"
        except UserError as error:
            found[case] = str(error)
    return found


@pytest.fixture(scope="module")
def answers(megatron_ranks):
    return megatron_ranks.run(answers_to_all, world_size=1)[0]


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_works_is_taken(case, answers):
    assert answers[case] == "accepted"


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_by_name(case, answers):
    for part in REFUSED[case][2]:
        assert part in answers[case]


def test_a_second_run_gets_what_the_first_has_kept_and_no_more():
    import torch

    calls = []

    def operator():
        calls.append(1)
        return (torch.tensor(float(len(calls))),)

    def layer():
        return [keep_or_compute(operator)[0].item() for _ in range(2)]

    kept = Kept(layer)
    assert kept() == [1, 2] and kept.kept_bytes == 8
    assert kept() == [1, 2] and kept.kept_bytes == 0
    with pytest.raises(RuntimeError, match="the same operators in the same order"):
        kept()
    assert layer() == [3, 4], "outside of a checkpoint it computes"


def test_an_exception_in_a_run_leaves_nothing_behind():
    import torch

    def failing():
        keep_or_compute(lambda: (torch.zeros(1),))
        raise ValueError("early stop")

    with pytest.raises(ValueError):
        Kept(failing)()
    assert keep_or_compute(lambda: (torch.ones(1),))[0].item() == 1
    inner, outer = Kept(lambda: keep_or_compute(lambda: (torch.ones(1),))), Kept(lambda: inner())
    outer()
    assert (inner.kept_bytes, outer.kept_bytes) == (4, 0), "the innermost keeps"


def test_of_a_share_the_last_rows_are_kept():
    import torch

    computed = []

    def compute(rows):
        computed.append(rows)
        out = torch.arange(10.0)[rows, None]
        return out, out.t()

    for share, again in ((0.3, slice(0, 7)), (1.0, None)):
        computed.clear()
        kept = Kept(lambda: keep_rows_or_compute(compute, 10), share)
        first, second = kept(), kept()
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert computed[1:] == ([again] if again else [])
