"""What linear attention cannot work with ends a run before its first step, by name.

All command lines are checked in one process, and all configs built by hand.
"""

import os

import pytest

from megatron_longseq.errors import UserError

GOOD = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 "
    "--lr 0.001 --mock-data --tokenizer-type NullTokenizer --vocab-size 257 "
    "--position-embedding-type none --transformer-impl local"
)
LINEAR = "--longseq-linear-attention"
ROPE = "--position-embedding-type rope"
CP = "--context-parallel-size"
HYBRID = f"{LINEAR} gdn --linear-attention-freq 4"

# flags beside GOOD, ranks: taken as they are
ACCEPTED = {
    "all linear": (f"{LINEAR} gdn", 1),
    "all linear, split": (f"{LINEAR} gdn {CP} 2 --longseq-scan ring", 2),
    "as many context ranks as no head count allows": (f"{LINEAR} gla {CP} 8", 8),
    "contiguous": (f"{LINEAR} kda {CP} 4 --longseq-linear-layout contiguous", 4),
    "rotated": (f"{LINEAR} retention {ROPE}", 1),
    "hybrid, one rank": (f"{HYBRID} {ROPE}", 1),
    "hybrid, split": (f"{HYBRID} {ROPE} {CP} 2 --longseq-context-parallel 2d", 2),
    "a pattern": (f"{LINEAR} linear --linear-attention-freq [1,0,1,0]", 1),
    "chunks": (f"{LINEAR} gdn {CP} 2 --longseq-sequence-chunks 4", 2),
    "a hybrid pattern": (
        f"{LINEAR} gdn --hybrid-layer-pattern G-*-|G-*- {ROPE} {CP} 2 "
        "--longseq-context-parallel 2d --pipeline-model-parallel-size 2",
        4,
    ),
    "a hybrid pattern of linear layers": (
        f"{LINEAR} gla --hybrid-layer-pattern G-G- {CP} 2 --longseq-linear-layout contiguous",
        2,
    ),
    "sizes": (f"{LINEAR} gdn --linear-num-key-heads 2 --linear-num-value-heads 6", 1),
}

# flags beside GOOD, ranks, what the message must say
REFUSED = {
    "an unknown model": (f"{LINEAR} mamba", 1, ["--longseq-linear-attention", "mamba"]),
    "a map without a model": (
        "--longseq-feature-map elu",
        1,
        ["--longseq-feature-map elu", "no effect without --longseq-linear-attention"],
    ),
    "a schedule without a model": ("--longseq-scan ring", 1, ["--longseq-scan ring"]),
    "a map that the model has fixed": (
        f"{LINEAR} gdn --longseq-feature-map elu",
        1,
        ["--longseq-feature-map elu", "gdn", "linear"],
    ),
    "a denominator of signed weights": (
        f"{LINEAR} gla --longseq-output-norm denominator",
        1,
        ["--longseq-output-norm denominator", "identity"],
    ),
    "a hybrid pattern of other layers": (
        f"{LINEAR} gdn --hybrid-layer-pattern G-M- {ROPE}",
        1,
        ["--hybrid-layer-pattern G-M-", "layers M need Transformer Engine", "G (linear"],
    ),
    "a hybrid pattern without a linear layer": (
        f"{LINEAR} gdn --hybrid-layer-pattern *-*- {ROPE}",
        1,
        ["--hybrid-layer-pattern *-*- has no layer G"],
    ),
    "linear layers of a hybrid pattern that nobody computes": (
        "--hybrid-layer-pattern G-*-",
        1,
        ["--hybrid-layer-pattern G-*-", "add --longseq-linear-attention gdn"],
    ),
    "a hybrid pattern that ranks of a pipeline do not divide": (
        f"{LINEAR} gdn --hybrid-layer-pattern G-* {ROPE} --pipeline-model-parallel-size 2",
        2,
        ["--pipeline-model-parallel-size 2", "--hybrid-layer-pattern G-*", "nearest: 1, 3"],
    ),
    "the old name of the pattern": (
        f"{LINEAR} gdn --hybrid-override-pattern G-*- {ROPE}",
        1,
        ["--hybrid-override-pattern", "old name of --hybrid-layer-pattern"],
    ),
    "kept attention of a hybrid pattern": (
        "--hybrid-layer-pattern *-*- --longseq-context-parallel 2d --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 --longseq-keep-attention-output",
        1,
        ["--longseq-keep-attention-output True", "recomputes its layers itself"],
    ),
    "latent attention in a hybrid pattern": (
        "--hybrid-layer-pattern *-*- --longseq-context-parallel 2d --multi-latent-attention",
        1,
        ["--multi-latent-attention", "needs Transformer Engine for it"],
    ),
    "dropout of attention that no layer has": (
        f"{LINEAR} gdn --attention-dropout 0.1",
        1,
        ["--attention-dropout 0.1", "only softmax attention drops weights"],
    ),
    "layers named twice": (
        f"{LINEAR} gdn --hybrid-layer-pattern G-*- {ROPE} --linear-attention-freq 2",
        1,
        ["--linear-attention-freq 2", "the pattern names the layers"],
    ),
    "a hybrid pattern in chunks": (
        f"{LINEAR} gdn --hybrid-layer-pattern G-G- --longseq-sequence-chunks 2",
        1,
        ["--longseq-sequence-chunks 2", "--linear-attention-freq"],
    ),
    "a hybrid pattern over ranks that its softmax layers do not know": (
        f"{LINEAR} gdn --hybrid-layer-pattern G-*- {ROPE} {CP} 2",
        2,
        [f"{CP} 2", "layers of softmax attention", "--longseq-context-parallel 2d"],
    ),
    "a window without a convolution": (
        f"{LINEAR} gla --linear-conv-kernel-dim 3",
        1,
        ["--linear-conv-kernel-dim 3", "gla has no convolution"],
    ),
    "a schedule for one rank": (
        f"{LINEAR} gla --longseq-scan ring",
        1,
        ["--longseq-scan ring", "--context-parallel-size"],
    ),
    "softmax layers that cannot split": (
        f"{HYBRID} {CP} 2",
        2,
        ["--context-parallel-size 2", "softmax", "--longseq-context-parallel 2d"],
    ),
    "2D attention without a layer of it": (
        f"{LINEAR} gdn {CP} 2 --longseq-context-parallel 2d",
        2,
        ["--longseq-context-parallel 2d", "all layers are linear"],
    ),
    "contiguous beside softmax": (
        f"{HYBRID} {CP} 2 --longseq-context-parallel 2d --longseq-linear-layout contiguous",
        2,
        ["--longseq-linear-layout contiguous", "--linear-attention-freq 4", "zigzag"],
    ),
    "contiguous with RoPE": (
        f"{LINEAR} retention {ROPE} {CP} 2 --longseq-linear-layout contiguous",
        2,
        ["--longseq-linear-layout contiguous", "--position-embedding-type rope"],
    ),
    "RoPE that no layer reads": (f"{LINEAR} gdn {ROPE}", 1, ["--position-embedding-type rope"]),
    "retention without RoPE": (
        f"{LINEAR} retention",
        1,
        ["--position-embedding-type none", "use rope"],
    ),
    "keys too narrow for RoPE": (
        f"{LINEAR} retention {ROPE} --linear-key-head-dim 8",
        1,
        ["--linear-key-head-dim 8", "16"],
    ),
    "heads over tensor-parallel ranks": (
        f"{LINEAR} gdn --linear-num-key-heads 2 --linear-num-value-heads 4 "
        "--tensor-model-parallel-size 4",
        4,
        ["--tensor-model-parallel-size 4", "2 key heads", "[1, 2]"],
    ),
    "value heads of no key head": (
        f"{LINEAR} gdn --linear-num-key-heads 4 --linear-num-value-heads 6",
        1,
        ["--linear-num-value-heads 6", "[4, 8]"],
    ),
    "no value heads": (f"{LINEAR} gdn --linear-num-value-heads 0", 1, ["at least 1"]),
    "no linear layer": (f"{LINEAR} gdn --linear-attention-freq 1", 1, ["leaves no layer"]),
    "a pattern of another length": (
        f"{LINEAR} gdn --linear-attention-freq [1,0]",
        1,
        ["--linear-attention-freq [1, 0]", "--num-layers is 4"],
    ),
    "segments shorter than a window": (
        f"{LINEAR} gdn {CP} 16",
        16,
        ["--seq-length 64", "gdn", "32 segments", "at least 96"],
    ),
    "METP": (
        f"{LINEAR} gdn --longseq-tensor-parallel metp --tensor-model-parallel-size 2 "
        "--sequence-parallel",
        2,
        ["--longseq-tensor-parallel metp", "refused", "use megatron"],
    ),
    "further tokens": (f"{LINEAR} gdn --mtp-num-layers 1", 1, ["--mtp-num-layers 1", "refused"]),
    "another variant": (
        f"{LINEAR} gdn --experimental-attention-variant gated_delta_net",
        1,
        ["--experimental-attention-variant gated_delta_net"],
    ),
    "a window of softmax attention": (f"{LINEAR} gdn --window-size 4,0", 1, ["--window-size"]),
    "groups of softmax attention": (
        f"{LINEAR} gdn --group-query-attention --num-query-groups 2",
        1,
        ["--group-query-attention", "--linear-num-key-heads"],
    ),
    "chunks without a model": (
        "--longseq-sequence-chunks 2",
        1,
        ["--longseq-sequence-chunks 2", "no effect without --longseq-linear-attention"],
    ),
    "no chunk": (f"{LINEAR} gla --longseq-sequence-chunks 0", 1, ["at least 1"]),
    "chunks that do not divide the sequence": (
        f"{LINEAR} gla {CP} 2 --longseq-sequence-chunks 5",
        2,
        ["--longseq-sequence-chunks 5", "--seq-length 64", "20 = chunks x 4", "[1, 2, 4, 8]"],
    ),
    "chunks shorter than a window": (
        f"{LINEAR} gdn {CP} 4 --longseq-sequence-chunks 4",
        4,
        ["--seq-length 64", "32 segments", "at least 96"],
    ),
    "chunks with softmax layers": (
        f"{HYBRID} {ROPE} --longseq-sequence-chunks 2",
        1,
        ["--longseq-sequence-chunks 2", "--linear-attention-freq 4", "keys and values"],
    ),
    "chunks in a pipeline": (
        f"{LINEAR} gla --pipeline-model-parallel-size 2 --longseq-sequence-chunks 2",
        2,
        ["--pipeline-model-parallel-size 2", "one stage's forward"],
    ),
    "chunks recomputed once more": (
        f"{LINEAR} gla --longseq-sequence-chunks 2 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
        1,
        ["--recompute-granularity full", "leave it out"],
    ),
    "chunks with other modules recomputed": (
        f"{LINEAR} gla --longseq-sequence-chunks 2 --recompute-granularity selective "
        "--recompute-modules core_attn layernorm",
        1,
        ["--recompute-modules", "core_attn alone"],
    ),
    "chunks of whole parameters": (
        f"{LINEAR} gla --longseq-sequence-chunks 2 --use-torch-fsdp2",
        1,
        ["--use-torch-fsdp2", "whole parameters"],
    ),
    "chunks of packed documents": (
        f"{LINEAR} gla --longseq-sequence-chunks 2 --dataloader-inter-document-masking",
        1,
        ["--dataloader-inter-document-masking", "whatever documents end there"],
    ),
    "chunks that tensor-parallel ranks cannot split": (
        f"{LINEAR} gla --longseq-sequence-chunks 64 --tensor-model-parallel-size 2 "
        "--sequence-parallel",
        2,
        ["--longseq-sequence-chunks 64", "--tensor-model-parallel-size 2"],
    ),
    "chunks with dropout": (
        f"{LINEAR} gla --longseq-sequence-chunks 2 --hidden-dropout 0.1",
        1,
        ["--hidden-dropout 0.1", "use 0"],
    ),
    "chunks with experts": (
        f"{LINEAR} gla --longseq-sequence-chunks 2 --num-experts 2 --disable-bias-linear",
        1,
        ["--num-experts 2", "auxiliary losses"],
    ),
    "norms of softmax attention": (f"{LINEAR} gdn --qk-layernorm", 1, ["--qk-layernorm"]),
}


def answer(call):
    try:
        call()
    except UserError as error:
        return str(error)
    return "accepted"


def command_lines():
    import argparse

    from megatron_longseq import arguments, compat

    parser = argparse.ArgumentParser(allow_abbrev=False)
    compat.add_megatron_arguments(parser)
    arguments.add_arguments(parser)

    def parse(flags, ranks):
        os.environ["WORLD_SIZE"] = str(ranks)
        words = f"{GOOD} {flags}".split()
        return answer(lambda: arguments.check_command_line(parser, words))

    accepted = {case: parse(*entry) for case, entry in ACCEPTED.items()}
    refused = {case: parse(flags, ranks) for case, (flags, ranks, _) in REFUSED.items()}
    return accepted, refused


def configs():
    """Sizes of configs with and without linear layers, and the answers to wrong ones."""
    from megatron_longseq.config import LongSeqTransformerConfig
    from megatron_longseq.lasp.requirements import check_own_batches, heads_of

    def build(**more):
        given = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
        return LongSeqTransformerConfig(**given, transformer_impl="local", **more)

    gdn = {"longseq_linear_attention": "gdn"}
    chunked = gdn | {"longseq_sequence_chunks": 2, "hidden_dropout": 0.0}
    plain, linear = build(), build(**gdn)
    sizes = plain.linear_num_key_heads, plain.linear_key_head_dim
    split = build(**gdn, context_parallel_size=2, longseq_linear_layout="contiguous")
    return (
        sizes,
        heads_of(linear),
        answer(lambda: build(**gdn, linear_num_key_heads=3, linear_num_value_heads=4)),
        answer(lambda: build(**gdn, longseq_output_norm="denominator")),
        answer(lambda: check_own_batches(split, "the trainer")),
        answer(lambda: check_own_batches(build(**chunked, context_parallel_size=2), "the trainer")),
        answer(lambda: build(**chunked, num_moe_experts=2)),
    )


@pytest.fixture(scope="module")
def answers(megatron_ranks):
    return *megatron_ranks.run(command_lines, world_size=1)[0], megatron_ranks.run(
        configs, world_size=1
    )[0]


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_works_is_taken(case, answers):
    assert answers[0][case] == "accepted"


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_by_name(case, answers):
    for part in REFUSED[case][2]:
        assert part in answers[1][case]


def test_sizes_are_those_of_softmax_attention_unless_given(answers):
    sizes, heads, *_ = answers[2]
    # Without our layers Megatron's own defaults hold, for its own.
    assert sizes == (16, 128)
    assert (heads.key, heads.value, heads.key_width, heads.value_width) == (4, 4, 16, 16)


def test_a_config_built_by_hand_is_refused_by_name(answers):
    _, _, heads, norm, batches, chunks, experts = answers[2]
    assert "--linear-num-value-heads 4" in heads and "nearest: [3, 6]" in heads
    assert "--longseq-output-norm denominator" in norm
    assert "the trainer cuts batches in Megatron's zigzag" in batches
    assert "--longseq-sequence-chunks 2: the trainer cuts whole sequences" in chunks
    assert "--num-experts 2: not with --longseq-sequence-chunks 2" in experts
