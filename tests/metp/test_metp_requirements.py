"""What METP cannot work with ends a run before its first step, by name; however it was asked for.

All command lines are checked in one process, all configs built by hand in another part of it.
"""

import os

import pytest

from megatron_longseq.errors import UserError

GOOD = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 "
    "--lr 0.001 --mock-data --tokenizer-type NullTokenizer --vocab-size 257 "
    "--position-embedding-type rope"
)
METP = "--longseq-tensor-parallel metp --tensor-model-parallel-size 2 --sequence-parallel"

# Of every entry of the table whose only other value is not True: how a user writes a refused one,
# and what it is in a config.
REFUSED_VALUES = {
    "experimental_attention_variant": ("dsa", "dsa"),
    "window_size": ("4,0", (4, 0)),
    "softmax_type": ("off-by-one", "off-by-one"),
    "attention_dropout": ("0.1", 0.1),
    "linear_attention_freq": ("2", 2),
    "hybrid_layer_pattern": ("*-*-", "*-*-"),
    "longseq_layer_pattern": (None, "*-*-"),
    "transformer_impl": ("inference_optimized", "inference_optimized"),
    "fp8": ("hybrid", "hybrid"),
    "fp4": ("e2m1", "e2m1"),
    "gtp_weight_remat_size": (None, 2),
    "mlp_chunks_for_training": ("2", 2),
    "cuda_graph_impl": ("local", "local"),
    "cpu_offloading_num_layers": ("1", 1),
    "mtp_num_layers": ("1", 1),
    "position_embedding_type": ("mrope", "mrope"),
    "recompute_modules": ("layernorm mlp", ["layernorm", "mlp"]),
}

# case: world size, flags beside GOOD and METP, what the message must say
COMMAND_LINES = {
    "one tensor-parallel rank": (
        1,
        "--tensor-model-parallel-size 1",
        ["--tensor-model-parallel-size 1", "at least 2", "2, 4"],
    ),
    "a sequence that does not split": (
        2,
        "--seq-length 66",
        ["--seq-length 66", "multiple of 4", "nearest: [64, 68]"],
    ),
    "a sequence that does not split over both": (
        4,
        "--seq-length 68 --context-parallel-size 2 --longseq-context-parallel 2d",
        ["--seq-length 68", "multiple of 8", "nearest: [64, 72]"],
    ),
    "a sequence shorter than the ranks": (
        2,
        "--seq-length 2",
        ["--seq-length 2", "multiple of 4", "nearest: [4]"],
    ),
    "context parallelism of Megatron": (
        4,
        "--context-parallel-size 2",
        ["--context-parallel-size 2", "METP", "--longseq-context-parallel 2d"],
    ),
    "head parallelism": (
        4,
        "--context-parallel-size 2 --longseq-context-parallel 2d --longseq-head-parallel-size 2",
        ["--longseq-head-parallel-size 2", "use 1"],
    ),
    "shards that tear a head": (
        4,
        "--tensor-model-parallel-size 4 --longseq-metp-shards-per-step 1 "
        "--group-query-attention --num-query-groups 1",
        ["--longseq-metp-shards-per-step 1", "of which there are 1", "usable: [4]"],
    ),
    "shards that do not divide": (
        4,
        "--tensor-model-parallel-size 4 --longseq-metp-shards-per-step 3",
        ["--longseq-metp-shards-per-step 3", "usable: [1, 2, 4]"],
    ),
    "no shards": (2, "--longseq-metp-shards-per-step 0", ["--longseq-metp-shards-per-step 0"]),
    "no tiles": (2, "--longseq-mlp-tiles 0", ["--longseq-mlp-tiles 0", "at least 1"]),
    "fewest tokens in words": (
        2,
        "--longseq-metp-min-tokens many",
        ["--longseq-metp-min-tokens many", "auto, 0"],
    ),
    "fewest tokens below zero": (
        2,
        "--longseq-metp-min-tokens=-1",
        ["--longseq-metp-min-tokens -1", "a number of tokens"],
    ),
    "a kernel that is not there": (
        2,
        "--longseq-attention-kernel fast",
        ["--longseq-attention-kernel", "fast", "reference"],
    ),
    "masks of documents": (2, "--reset-attention-mask", ["--reset-attention-mask"]),
    "packed samples": (2, "--sft", ["--sft"]),
}

# Options of METP, each without it.
WITHOUT_METP = {
    "--longseq-metp-min-tokens": "5",
    "--longseq-metp-shards-per-step": "1",
    "--longseq-mlp-tiles": "2",
}


def refusal_of(call):
    """What a user reads; anything but our own error is told as such."""
    try:
        call()
    except UserError as error:
        return str(error)
    except SystemExit as end:
        return f"left with {end}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def command_lines():
    """The message of every refused command line, from the parser that Megatron would use."""
    import argparse

    from megatron_longseq import arguments, compat
    from megatron_longseq.metp.requirements import UNSUPPORTED

    parser = argparse.ArgumentParser(allow_abbrev=False)
    compat.add_megatron_arguments(parser)
    arguments.add_arguments(parser)

    def parse(world_size, *flags):
        os.environ["WORLD_SIZE"] = str(world_size)
        words = " ".join([GOOD, *flags]).split()
        return refusal_of(lambda: arguments.check_command_line(parser, words))

    found = {case: parse(n, METP, flags) for case, (n, flags, _) in COMMAND_LINES.items()}
    for option in UNSUPPORTED:
        if not option.config_only:
            value = REFUSED_VALUES.get(option.name, ("", True))[0]
            found[option.name] = parse(2, METP, f"{option.flag} {value}")
            found[f"{option.name} without METP"] = parse(
                2, "--tensor-model-parallel-size 2", f"{option.flag} {value}"
            )
    for flag, value in WITHOUT_METP.items():
        found[flag] = parse(2, "--tensor-model-parallel-size 2", f"{flag} {value}")
    found["no sequence parallelism"] = parse(2, METP.replace("--sequence-parallel", ""))
    found["nothing wrong"] = parse(2, METP)
    return found


def configs_by_hand():
    """The message of every refused config, built and filled as a library user or $LONGSEQ_CONFIG.

    And which names of the table neither Megatron's configs nor its parser know.
    """
    import copy
    import dataclasses

    import torch
    from megatron.training.models.gpt import GPTModelConfig

    from megatron_longseq.config import LongSeqTransformerConfig, check_methods
    from megatron_longseq.metp.requirements import UNSUPPORTED
    from megatron_longseq.run_config import known_arguments

    def build(**more):
        given = {
            "num_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "pipeline_dtype": torch.float32,
            "transformer_impl": "local",
            "attention_dropout": 0.0,
            "longseq_tensor_parallel": "metp",
        }
        return LongSeqTransformerConfig(**given | more)

    good = build()
    in_config = {field.name for field in dataclasses.fields(good)}
    found = {"nothing wrong": refusal_of(lambda: check_methods(good))}
    built = {}
    for option in UNSUPPORTED:
        value = REFUSED_VALUES.get(option.name, (None, True))[1]
        changed = copy.copy(good)
        setattr(changed, option.name, value)
        found[option.name] = refusal_of(lambda changed=changed: check_methods(changed))
        if option.name in in_config:
            given = {option.name: value}
            built[option.name] = refusal_of(lambda given=given: build(**given))
    for case, given in {
        "one tensor-parallel rank": {"tensor_model_parallel_size": 1, "sequence_parallel": False},
        "no sequence parallelism": {"sequence_parallel": False},
        "attention dropout left as it is": {"attention_dropout": 0.1},
        "head parallelism": {
            "context_parallel_size": 2,
            "longseq_context_parallel": "2d",
            "longseq_head_parallel_size": 2,
        },
        "context parallelism of Megatron": {"context_parallel_size": 2},
        "shards": {"longseq_metp_shards_per_step": 3},
        "tiles": {"longseq_mlp_tiles": 0},
        "tokens": {"longseq_metp_min_tokens": "x"},
        "fused activation": {
            "bias_activation_fusion": True,
            "gated_linear_unit": True,
            "activation_func": quick_gelu(),
        },
    }.items():
        found[case] = refusal_of(lambda given=given: build(**given))
    known = {action.dest for action in known_arguments()._actions} | in_config
    known |= {field.name for field in dataclasses.fields(GPTModelConfig)}
    return found, built, [option.name for option in UNSUPPORTED if option.name not in known]


def quick_gelu():
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return quick_gelu


def table():
    from megatron_longseq.metp.requirements import UNSUPPORTED

    return [(option.name, option.flag, option.config_only) for option in UNSUPPORTED]


@pytest.fixture(scope="module")
def answers(megatron_ranks):
    return megatron_ranks.run(everything, world_size=1)[0]


def everything():
    return command_lines(), *configs_by_hand(), table()


@pytest.mark.parametrize("case", COMMAND_LINES)
def test_a_command_line_that_metp_cannot_run_is_refused_by_name(case, answers):
    for part in COMMAND_LINES[case][2]:
        assert part in answers[0][case]


def test_every_option_of_the_table_is_refused_on_the_command_line(answers):
    lines, _, _, _, entries = answers
    accepted = {
        name: lines[name]
        for name, flag, config_only in entries
        if not config_only
        and not (
            lines[name].startswith(flag) and ("metp" in lines[name] or "refused" in lines[name])
        )
    }
    assert accepted == {}


def test_the_table_does_not_touch_runs_without_metp(answers):
    lines, _, _, _, entries = answers
    meddling = [
        name
        for name, _, config_only in entries
        if not config_only and "metp" in lines[f"{name} without METP"]
    ]
    assert meddling == []


def test_every_option_of_the_table_is_refused_in_a_config_built_by_hand(answers):
    _, found, built, _, entries = answers
    assert found["nothing wrong"] == "accepted"
    for name, flag, _ in entries:
        assert found[name].startswith(flag) and "metp" in found[name], (name, found[name])
    # Some Megatron refuses itself, before our checks; none goes through.
    assert [name for name, answer in built.items() if answer == "accepted"] == []


def test_the_table_names_only_options_that_megatron_has(answers):
    assert answers[3] == []


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("one tensor-parallel rank", ["--tensor-model-parallel-size 1", "at least 2"]),
        ("no sequence parallelism", ["add --sequence-parallel"]),
        ("attention dropout left as it is", ["--attention-dropout 0.1", "use --attention-dropout"]),
        ("head parallelism", ["--longseq-head-parallel-size 2", "use 1"]),
        ("context parallelism of Megatron", ["--context-parallel-size 2", "2d"]),
        ("shards", ["--longseq-metp-shards-per-step 3", "usable: [1, 2]"]),
        ("tiles", ["--longseq-mlp-tiles 0"]),
        ("tokens", ["--longseq-metp-min-tokens x"]),
        ("fused activation", ["quick_gelu", "bias_activation_fusion"]),
    ],
)
def test_a_config_built_by_hand_is_refused_by_name(case, parts, answers):
    for part in parts:
        assert part in answers[1][case]


@pytest.mark.parametrize("flag", WITHOUT_METP)
def test_an_option_of_metp_without_metp_is_refused(flag, answers):
    message = answers[0][flag]
    assert message.startswith(f"{flag} {WITHOUT_METP[flag]}: has no effect without")
    assert "--longseq-tensor-parallel metp" in message


def test_metp_needs_sequence_parallelism(answers):
    assert "add --sequence-parallel" in answers[0]["no sequence parallelism"]
    assert answers[0]["nothing wrong"] == "accepted"


def crossovers():
    from megatron_longseq.metp.requirements import crossover_tokens, parse_min_tokens
    from megatron_longseq.metp.traffic import head_group_traffic, matmul_chain_traffic

    sizes = {"element_bytes": 2, "gradient_bytes": 4}
    found = {}
    for ranks in (2, 4, 8):
        for name, (hidden, heads, groups, ffn, gated) in {
            "llama": (4096, 32, 8, 14336, True),
            "plain": (512, 8, 8, 2048, False),
            "wide keys": (512, 32, 32, 2048, False),
        }.items():
            least = crossover_tokens(
                ranks=ranks,
                hidden=hidden,
                query_heads=heads,
                kv_heads=groups,
                head_width=64 if name != "llama" else 128,
                ffn=ffn,
                gated=gated,
                **sizes,
            )

            def sent(
                tokens, ranks=ranks, hidden=hidden, heads=heads, groups=groups, ffn=ffn, gated=gated
            ):
                """Bytes of METP, and of sequence parallelism's gathers and scatters."""
                width = 128 if hidden == 4096 else 64
                metp = sum(
                    matmul_chain_traffic(
                        ranks=ranks, hidden=hidden, ffn=ffn, gated=gated, backward=b, **sizes
                    ).bytes
                    + head_group_traffic(
                        ranks=ranks,
                        tokens=tokens // ranks,
                        batch=1,
                        hidden=hidden,
                        query_heads=heads,
                        key_heads=groups,
                        width=width,
                        backward=b,
                        **sizes,
                    ).bytes
                    for b in (False, True)
                )
                return metp, 10 * tokens * hidden * 2 * (ranks - 1) // ranks

            far = 1 << 30
            found[ranks, name] = (
                least,
                None if least is None else (sent(least), sent(least - ranks)),
                sent(far),
            )
    return found, parse_min_tokens("auto"), parse_min_tokens("77")


def test_the_crossover_is_where_both_send_as_much(megatron_ranks):
    found, auto, number = megatron_ranks.run(crossovers, world_size=1)[0]
    for (ranks, name), (least, around, (metp, stock)) in found.items():
        if least is None:
            assert metp >= stock, (ranks, name, "it would send less at long sequences")
            continue
        (metp, stock), (metp_before, stock_before) = around
        assert metp <= stock and metp_before > stock_before, (ranks, name, least)
    never = {case for case, (least, *_) in found.items() if least is None}
    # With two ranks and as many key heads as query heads, dK and dV alone outweigh the gathers.
    assert (2, "plain") in never and (8, "plain") not in never and (8, "wide keys") in never
    assert auto is None and number == 77
