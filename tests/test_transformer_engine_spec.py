"""The Transformer Engine spec, edited like the local one. Run with a stub of TE's module names.

Transformer Engine needs a GPU; here its classes are empty ones of the same names, so that these
tests say which module stands where in the spec, and nothing about what it computes.
"""


def edited_spec_with_stubbed_transformer_engine(method):
    from types import SimpleNamespace

    from megatron.core.extensions import transformer_engine
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_longseq import layer_specs
    from megatron_longseq.attention_2d.core_attention import TwoDCoreAttentionBuilder

    class Stubs:
        """Answers what Megatron asks the TE backend for, with classes named as TE's are."""

        def __getattr__(self, name):
            return lambda *_args, **_kwargs: type(f"TE_{name}", (), {})

        def fuse_layernorm_and_linear(self):
            return True

        def grouped_mlp_modules(self, *_args):
            return type("TE_grouped_mlp", (), {}), None

    gpt_layer_specs.HAVE_TE = True
    gpt_layer_specs.TESpecProvider = Stubs
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    assert isinstance(spec, ModuleSpec) and transformer_engine is not None
    model_config = SimpleNamespace(
        transformer=SimpleNamespace(
            longseq_context_parallel="2d" if method == "2d" else "megatron",
            longseq_tensor_parallel="metp" if method == "metp" else "megatron",
            context_parallel_size=1,
            longseq_attention_kernel="auto",
            longseq_comm_timeout_seconds=10.0,
        )
    )
    if method == "metp":
        # What the layers share needs process groups, which a spec does not.
        vars(model_config)["_longseq_metp"] = SimpleNamespace()
        layer_specs.compat.norm_of_transformer_engine = lambda: type("TE_norm", (), {})
    before = names(spec)
    after = names(layer_specs.edit_layer_spec(spec, model_config))
    keys = spec.submodules.sharded_state_dict_keys_map
    return before, after, TwoDCoreAttentionBuilder.__name__, keys


def names(spec, path=""):
    """Path in the spec -> name of the module that stands there."""
    import dataclasses
    import functools

    found = {}
    if isinstance(spec, functools.partial):
        for key, value in spec.keywords.items():
            found |= names(value, f"{path}.{key}")
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        for field in dataclasses.fields(spec):
            found |= names(getattr(spec, field.name), f"{path}.{field.name}")
    elif isinstance(spec, type):
        found[path] = spec.__name__
    elif spec is not None and not isinstance(spec, dict | list | str):
        found[path] = type(spec).__name__
    return found


def test_only_core_attention_changes_in_the_transformer_engine_spec(megatron_ranks):
    before, after, ours, _ = megatron_ranks.run(
        edited_spec_with_stubbed_transformer_engine, world_size=1, args=("2d",)
    )[0]
    changed = {path for path in before | after if before.get(path) != after.get(path)}
    assert len(changed) == 1
    path = changed.pop()
    assert path.endswith("self_attention.submodules.core_attention")
    assert before[path] == "TE_core_attention" and after[path] == ours
    assert sum(name.startswith("TE_") for name in after.values()) >= 4


def test_metp_takes_the_norms_of_transformer_engine_and_linear_layers_of_its_own(megatron_ranks):
    before, after, _, _ = megatron_ranks.run(
        edited_spec_with_stubbed_transformer_engine, world_size=1, args=("metp",)
    )[0]
    assert before[".submodules.input_layernorm"] == "IdentityOp", "TE fuses it with linear_qkv"
    expected = {
        ".submodules.input_layernorm": "TE_norm",
        ".submodules.pre_mlp_layernorm": "TE_norm",
        ".submodules.self_attention.module": "METPSelfAttention",
        ".submodules.self_attention.submodules.linear_qkv": "ColumnShardLinear",
        ".submodules.self_attention.submodules.linear_proj": "RowShardLinear",
        ".submodules.self_attention.submodules.core_attention": "METPCoreAttentionBuilder",
        ".submodules.mlp": "METPMLPBuilder",
    }
    assert {path: after.get(path) for path in expected} == expected
