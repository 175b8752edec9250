"""Presets of ZeRO: Megatron's flags, and gradients averaged over data x context exactly once."""

import re
from types import SimpleNamespace

import pytest
from training_runs import MODEL, log, losses, train

from megatron_longseq.errors import UserError
from megatron_longseq.memory.zero_presets import (
    PRESETS,
    check_instances,
    describe,
    preset_arguments,
)

TWO_D = "--longseq-context-parallel 2d --context-parallel-size 2"
LINEAR = "--longseq-linear-attention gdn --position-embedding-type none --context-parallel-size 2"
PLAIN = [w for w in MODEL if w not in ("--group-query-attention", "--num-query-groups", "2")]


def gradient_norms(folder):
    return [float(n) for n in re.findall(r"grad norm: ([0-9.]+)", log(folder, rank=3))]


@pytest.fixture(scope="module")
def replicated(megatron_ranks, tmp_path_factory, corpus):
    """Losses and gradient norms of 2 x data and 2 x context ranks, where nothing is sharded."""
    folder = tmp_path_factory.mktemp("replicated")
    steps = train(megatron_ranks, folder, TWO_D, processes=4, data=corpus)
    return losses(steps), gradient_norms(folder)


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(
            "zero1-partial --longseq-zero-instances 2",
            id="zero1-partial",
            marks=pytest.mark.thorough,
        ),
        pytest.param("zero2", marks=pytest.mark.thorough),
        "zero3",
    ],
)
def test_a_preset_trains_as_if_nothing_were_sharded(
    preset, replicated, megatron_ranks, tmp_path, corpus
):
    flags = f"{TWO_D} --longseq-zero {preset}"
    steps = train(megatron_ranks, tmp_path, flags, processes=4, data=corpus)
    # A gradient averaged twice, or not at all, has another norm; another direction, another loss.
    assert losses(steps) == pytest.approx(replicated[0], rel=1e-5)
    assert gradient_norms(tmp_path) == pytest.approx(replicated[1], abs=2e-3)
    name = preset.split()[0]
    assert f"  {name}: --use-distributed-optimizer" in log(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("sharding", ["--longseq-zero zero3", "--use-torch-fsdp2"])
def test_linear_layers_train_sharded(sharding, megatron_ranks, tmp_path, corpus):
    flags = f"{LINEAR} --untie-embeddings-and-output-weights"
    plain = train(
        megatron_ranks, tmp_path / "a", flags, processes=4, steps=3, data=corpus, model=PLAIN
    )
    more = f" {sharding} --no-gradient-accumulation-fusion --ckpt-format torch_dist"
    found = train(
        megatron_ranks,
        tmp_path / "b",
        flags + (more if "fsdp2" in sharding else f" {sharding}"),
        processes=4,
        steps=3,
        data=corpus,
        model=PLAIN,
    )
    assert losses(found) == pytest.approx(losses(plain), rel=1e-5)


def asked(preset, instances=None):
    return SimpleNamespace(longseq_zero=preset, longseq_zero_instances=instances)


def test_presets_are_megatrons_flags():
    assert describe(preset_arguments(asked("zero1"), over_gloo=True)) == (
        "--use-distributed-optimizer"
    )
    assert describe(preset_arguments(asked("zero3"), over_gloo=False)) == (
        "--use-distributed-optimizer --use-megatron-fsdp --no-gradient-accumulation-fusion "
        "--ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params"
    )
    hybrid = describe(preset_arguments(asked("hybrid", 2), over_gloo=False))
    assert "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim" in hybrid
    assert set(PRESETS) == {"none", "zero1", "zero1-partial", "zero2", "zero3", "hybrid"}


@pytest.mark.parametrize(
    ("preset", "instances", "message"),
    [
        ("hybrid", 2, "over gloo Megatron-FSDP in several instances does not reduce gradients"),
        ("zero1-partial", None, "needs --longseq-zero-instances N"),
        ("zero3", 2, "--longseq-zero-instances 2: has no effect with --longseq-zero zero3"),
    ],
)
def test_what_a_preset_cannot_do_here_is_refused(preset, instances, message):
    with pytest.raises(UserError) as error:
        preset_arguments(asked(preset, instances), over_gloo=True)
    assert message in str(error.value)


def test_instances_must_divide_the_ranks_that_shard():
    check_instances(asked("zero1-partial", 2), 4)
    with pytest.raises(UserError, match=r"--longseq-zero-instances 3: must divide the 4 .*2, 4"):
        check_instances(asked("zero1-partial", 3), 4)


def test_a_preset_and_another_flag_cannot_both_hold(megatron_ranks, tmp_path):
    with pytest.raises(
        UserError, match="--data-parallel-sharding-strategy no_shard: --longseq-zer"
    ):
        train(
            megatron_ranks,
            tmp_path,
            "--longseq-zero zero3 --data-parallel-sharding-strategy no_shard",
        )
