"""The report repeats Megatron's order of imports; Megatron itself must agree."""

from megatron_longseq.environment import inspect_environment
from megatron_longseq.environment.probe import norm, optimizer


def choices_of_megatron():
    """(what Megatron chose when it was imported, what the report says)."""
    from megatron.core import optimizer as megatron_optimizer
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import transformer_block

    names = {"TENorm": "transformer_engine", "FusedLayerNorm": "apex", "WrappedTorchNorm": "torch"}
    chosen = {
        "final": names[transformer_block.LayerNormImpl.__name__],
        "local": names[gpt_layer_specs.LNImpl.__name__],
        "optimizer": megatron_optimizer.Adam.__module__,
    }
    return chosen, norm() | {"optimizer": optimizer()["module"]}


def test_norm_and_optimizer_are_those_that_megatron_takes(megatron_ranks):
    ((chosen, reported),) = megatron_ranks.run(choices_of_megatron, world_size=1)
    assert chosen["optimizer"].startswith(reported.pop("optimizer"))
    del chosen["optimizer"]
    assert chosen == reported


def test_a_thorough_look_imports_megatron():
    found = {package.name: package for package in inspect_environment(thorough=True).packages}
    for name in ("megatron-core", "megatron-training"):
        assert (found[name].status, found[name].note) == ("found", None)
