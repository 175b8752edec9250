"""The stock spec, edited: what is replaced, and what stays Megatron's."""

import pytest


def replaced_everywhere():
    import functools
    from dataclasses import dataclass, field

    from megatron_longseq.layer_specs import replace_modules

    class Old: ...

    class New: ...

    @dataclass
    class Submodules:
        norm: type = Old
        other: object = None
        partial: object = None
        many: list = field(default_factory=list)

    original = Submodules(
        other=print, partial=functools.partial(print, sub=Submodules()), many=[Submodules()]
    )
    result = replace_modules(original, {Old: New})
    return (
        result.norm is New,
        result.many[0].norm is New,
        result.partial.keywords["sub"].norm is New,
        result.other is print,
        original.norm is Old and original.partial.keywords["sub"].norm is Old,
    )


def test_modules_are_replaced_at_every_depth_and_the_original_stays(megatron_ranks):
    assert all(megatron_ranks.run(replaced_everywhere, world_size=1)[0])


def norm_against_torch(kind, zero_centered):
    import torch
    from megatron.core.transformer import TransformerConfig

    from megatron_longseq.norms import SequenceParallelNorm

    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        normalization=kind,
        layernorm_zero_centered_gamma=zero_centered,
        use_cpu_initialization=True,
        sequence_parallel=True,
        tensor_model_parallel_size=2,
    )
    norm = SequenceParallelNorm(config, 16, eps=1e-3)
    reference = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[kind](16, eps=1e-3)
    with torch.no_grad():
        for name, parameter in norm.named_parameters():
            parameter.normal_()
            shift = 1.0 if zero_centered and name == "weight" else 0.0
            dict(reference.named_parameters())[name].copy_(parameter + shift)
    x = torch.randn(5, 2, 16)
    return (
        torch.equal(norm(x), reference(x)),
        sorted(norm.state_dict()) == sorted(reference.state_dict()),
        all(parameter.sequence_parallel for parameter in norm.parameters()),
    )


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_our_norm_is_torchs_with_marked_weights(kind, zero_centered, megatron_ranks):
    results = megatron_ranks.run(norm_against_torch, world_size=1, args=(kind, zero_centered))
    assert all(results[0]), results
