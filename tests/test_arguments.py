"""Bad command lines end before the first step, naming flag, value, rule and what would work."""

import os

import pytest

from megatron_longseq.errors import UserError

GOOD = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 "
    "--lr 0.001 --mock-data --tokenizer-type NullTokenizer --vocab-size 257"
)

# case: world size, flags, what the message must say
REFUSED = {
    "too few processes": (
        1,
        "--tensor-model-parallel-size 2",
        ["--tensor-model-parallel-size 2", "needs 2 processes", "but 1 was started"],
    ),
    "processes that are no multiple": (
        3,
        "--tensor-model-parallel-size 2",
        ["needs 2 processes or a multiple", "3 were started"],
    ),
    "heads": (
        3,
        "--tensor-model-parallel-size 3",
        ["--tensor-model-parallel-size 3", "--num-attention-heads 4", "nearest: 1, 2, 4"],
    ),
    "query groups": (
        4,
        "--tensor-model-parallel-size 4 --num-attention-heads 12 --hidden-size 96 "
        "--group-query-attention --num-query-groups 6",
        ["--tensor-model-parallel-size 4", "--num-query-groups 6", "nearest: 1, 2, 3, 6"],
    ),
    "layers": (
        3,
        "--pipeline-model-parallel-size 3",
        ["--pipeline-model-parallel-size 3", "--num-layers 4", "nearest: 1, 2, 4"],
    ),
    "sequence": (
        4,
        "--tensor-model-parallel-size 4 --sequence-parallel --seq-length 66",
        ["--tensor-model-parallel-size 4", "--seq-length 66"],
    ),
    "batch": (
        2,
        "--global-batch-size 5",
        ["--global-batch-size 5", "2 data-parallel replicas", "nearest: 4, 6"],
    ),
    "head width": (
        1,
        "--num-attention-heads 5",
        ["--num-attention-heads 5", "--hidden-size 64", "nearest: 1, 2, 4, 8"],
    ),
    "context parallelism with local layers": (
        2,
        "--context-parallel-size 2",
        ["--context-parallel-size 2", "refused", "cannot split a sequence"],
    ),
    "cp comm type": (1, "--cp-comm-type a2a", ["--cp-comm-type a2a", "Transformer Engine"]),
    "hierarchical sizes": (
        1,
        "--hierarchical-context-parallel-sizes 1 1",
        ["--hierarchical-context-parallel-sizes 1 1", "Transformer Engine"],
    ),
    "attention backend": (1, "--attention-backend flash", ["--attention-backend flash"]),
    "yaml": (1, "--yaml-cfg x.yaml", ["--yaml-cfg x.yaml", "longseq train --config"]),
    "packed data": (1, "--sft", ["--sft", "refused"]),
    "nccl on a cpu": (
        1,
        "--distributed-backend nccl",
        ["--distributed-backend nccl", "on a CPU it must be gloo"],
    ),
    "transformer engine on a cpu": (
        1,
        "--transformer-impl transformer_engine",
        ["--transformer-impl transformer_engine", "on a CPU it must be local"],
    ),
    "fp8 on a cpu": (1, "--fp8-format hybrid", ["--fp8-format", "needs a GPU"]),
    "an unknown device": (
        1,
        "--longseq-device tpu",
        ["--longseq-device", "tpu", "auto", "cpu", "cuda"],
    ),
    "an unknown flag": (
        1,
        "--longseq-devise cpu",
        ["--longseq-devise", "there is no such flag", "nearest: --longseq-device"],
    ),
    "a value without a flag": (1, "--num-layers 4 7", ["7: belongs to no flag"]),
    "a value of another type": (1, "--num-layers four", ["--num-layers", "four"]),
    "warm-up longer than the run": (
        1,
        "--lr-warmup-iters 9",
        ["--lr-warmup-iters 9", "4 steps", "nearest: 3"],
    ),
    "what only Megatron checks": (
        2,
        "--use-distributed-optimizer --overlap-param-gather",
        ["Megatron refuses", "--overlap-grad-reduce"],
    ),
}


def messages():
    """The message of each case, from the parser Megatron would use; run in a Megatron rank."""
    import sys

    from megatron_longseq import compat
    from megatron_longseq.arguments import extra_arguments

    found = {}
    for case, (world_size, flags, _) in REFUSED.items():
        os.environ["WORLD_SIZE"] = str(world_size)
        sys.argv = ["pretrain_gpt.py", *GOOD.split(), *flags.split()]
        try:
            compat.parse_and_validate(extra_arguments())
        except UserError as error:
            found[case] = str(error)
        except SystemExit as end:
            found[case] = f"left with {end}"
        else:
            found[case] = "accepted"
    return found


@pytest.fixture(scope="module")
def found(megatron_ranks):
    return megatron_ranks.run(messages, world_size=1)[0]


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_command_line_is_refused_by_name(case, found):
    for part in REFUSED[case][2]:
        assert part in found[case]


def defaults_and_given(flags):
    import argparse

    from megatron_longseq import arguments, compat

    parser = argparse.ArgumentParser()
    compat.add_megatron_arguments(parser)
    arguments.add_arguments(parser)
    names = (
        "attention_dropout",
        "hidden_dropout",
        "create_attention_mask_in_dataloader",
        "dist_ckpt_optim_fully_reshardable",
        "distributed_backend",
        "transformer_impl",
        "num_layers",
    )
    parsed = [parser.parse_args(flags)]
    given = arguments.given_arguments(parser, flags)
    parsed.append(parser.parse_args(flags))
    before, after = ({name: getattr(args, name) for name in names} for args in parsed)
    return before, given, after


def test_mapped_defaults_give_way_to_a_value_given(megatron_ranks):
    args, given, again = megatron_ranks.run(
        defaults_and_given, world_size=1, args=(["--attention-dropout", "0.3"],)
    )[0]
    assert args["attention_dropout"] == 0.3 and args["hidden_dropout"] == 0.0
    assert args["create_attention_mask_in_dataloader"] is False
    assert args["dist_ckpt_optim_fully_reshardable"] is True
    assert args["distributed_backend"] == "gloo" and args["transformer_impl"] == "local"
    assert given == {"attention_dropout": 0.3}
    assert again == args, "asking what was given must not change the parser"


def derived(flags):
    import sys

    from megatron_longseq import compat
    from megatron_longseq.arguments import extra_arguments

    os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"] = "4", "4"
    sys.argv = ["pretrain_gpt.py", *GOOD.split(), *flags.split()]
    args = compat.parse_and_validate(extra_arguments())
    return (
        args.overlap_p2p_comm,
        args.hierarchical_context_parallel_sizes,
        args.longseq_head_parallel_size,
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--pipeline-model-parallel-size 4 --num-layers 8 "
            "--num-virtual-stages-per-pipeline-rank 2",
            (False, None, None),
        ),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            (True, None, None),
        ),
        ("--longseq-context-parallel 2d --context-parallel-size 4", (False, [4, 1], 4)),
        (
            "--longseq-context-parallel 2d --context-parallel-size 4 "
            "--group-query-attention --num-query-groups 2",
            (False, [2, 2], 2),
        ),
        (
            "--longseq-context-parallel 2d --context-parallel-size 2 "
            "--tensor-model-parallel-size 2 --longseq-head-parallel-size 1",
            (False, [1, 2], 1),
        ),
    ],
)
def test_arguments_that_follow_from_others_are_set(flags, expected, megatron_ranks):
    assert megatron_ranks.run(derived, world_size=1, args=(flags,))[0] == expected


def options_of_the_library():
    from megatron_longseq.config import LongSeqTransformerConfig

    LongSeqTransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    LongSeqTransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, longseq_device="tpu"
    )


def test_options_are_checked_for_library_users_too(megatron_ranks):
    with pytest.raises(UserError, match=r"--longseq-device tpu: must be one of auto, cpu, cuda"):
        megatron_ranks.run(options_of_the_library, world_size=1)
