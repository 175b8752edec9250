"""The count of linear layers' operations agrees with Megatron's, where Megatron has one."""

import pytest


def counts():
    """Megatron's counts of a model of its own linear layers and of softmax, and ours from these."""
    import argparse

    from megatron_longseq import arguments, compat
    from megatron_longseq.lasp.flops import (
        linear_layer_flops,
        softmax_layer_flops,
        throughput_factor,
    )

    parser = argparse.ArgumentParser(allow_abbrev=False)
    compat.add_megatron_arguments(parser)
    arguments.add_arguments(parser)

    def parse(flags):
        args = parser.parse_args(
            "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 "
            f"--seq-length 256 --micro-batch-size 1 --normalization RMSNorm {flags}".split()
        )
        # What Megatron fills in when it validates.
        args.kv_channels, args.padded_vocab_size = 16, 128
        args.num_query_groups = args.num_query_groups if args.group_query_attention else 4
        return args

    sizes = (
        "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 "
        "--linear-value-head-dim 8 --linear-conv-kernel-dim 4 --linear-attention-freq 3"
    )
    stock = parse(f"{sizes} --experimental-attention-variant gated_delta_net")
    pattern = parse(f"{sizes} --longseq-linear-attention gdn --hybrid-layer-pattern G-*-G-")
    ours = parse(f"{sizes} --longseq-linear-attention gdn")
    groups = "--group-query-attention --num-query-groups 2"
    softmax = {
        flags: (
            compat.flops_of_sequence(parse(flags)),
            softmax_layer_flops(parse(flags)),
        )
        for flags in ("", groups)
    }
    counted = compat.flops_of_sequence(ours)
    return (
        compat.flops_of_sequence(stock),
        counted * throughput_factor(ours, compat.flops_of_sequence),
        softmax,
        {
            name: linear_layer_flops(
                parse(f"--longseq-linear-attention {name} --linear-num-key-heads 4")
            )
            for name in ("linear", "retention", "lightning", "gla", "deltanet", "gdn", "kda")
        },
        throughput_factor(pattern, compat.flops_of_sequence),
    )


@pytest.fixture(scope="module")
def found(megatron_ranks):
    return megatron_ranks.run(counts, world_size=1)[0]


def test_a_gated_delta_net_counts_what_megatron_counts_for_its_own(found):
    stock, ours, *_ = found
    assert ours == pytest.approx(stock, rel=1e-12)


def test_a_gated_delta_net_in_a_hybrid_pattern_counts_what_megatron_counts(found):
    *_, factor = found
    assert factor == pytest.approx(1, rel=1e-12)


def test_groups_of_softmax_attention_are_counted_as_megatron_does(found):
    _, _, softmax, *_ = found
    (plain, plain_layer), (grouped, grouped_layer) = softmax.values()
    assert (plain - grouped) / (6 * 256) == pytest.approx(plain_layer - grouped_layer, rel=1e-12)
    assert plain > grouped


def test_every_further_matrix_counts(found):
    *_, layers, _ = found
    assert layers["linear"] == layers["retention"]
    assert layers["lightning"] < layers["linear"], "a gate of two thin matrices"
    assert layers["gla"] > layers["linear"] and layers["kda"] > layers["deltanet"]
    assert layers["gdn"] > layers["deltanet"], "a gate and a decay"
