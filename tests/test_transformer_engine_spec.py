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
            tensor_model_parallel_size=1,
            num_attention_heads=4,
            num_query_groups=4,
            longseq_head_parallel_size=None,
            longseq_placement="head-first",
            longseq_ring_window_size=None,
            longseq_backward_ring="auto",
            longseq_ring_gradient_dtype="fp32",
            longseq_network_cards_per_node=None,
            longseq_linear_attention="gdn" if method == "linear" else "none",
            longseq_attention_kernel="auto",
            longseq_comm_timeout_seconds=10.0,
        )
    )
    if method == "metp":
        # What the layers share needs process groups, which a spec does not.
        vars(model_config)["_longseq_metp"] = SimpleNamespace()
        layer_specs.compat.norm_of_transformer_engine = lambda: type("TE_norm", (), {})
    before = names(spec)
    if method == "linear":
        vars(model_config)["_longseq_linear_attention"] = SimpleNamespace()
        layer_specs.compat.norm_of_transformer_engine = lambda: type("TE_norm", (), {})
        layer_specs.compat.column_linear_of_transformer_engine = lambda: type("TE_column", (), {})
        layer_specs.replace_self_attention([spec], model_config)
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


def test_linear_attention_reads_a_norm_of_its_own_with_the_keys_of_the_fused_one(megatron_ranks):
    before, after, _, keys = megatron_ranks.run(
        edited_spec_with_stubbed_transformer_engine, world_size=1, args=("linear",)
    )[0]
    attention = ".submodules.self_attention"
    expected = {
        ".submodules.input_layernorm": "TE_norm",
        f"{attention}.module": "LinearAttention",
        f"{attention}.submodules.in_proj": "TE_column",
        f"{attention}.submodules.out_proj": before[f"{attention}.submodules.linear_proj"],
    }
    assert {path: after.get(path) for path in expected} == expected
    # Those of Megatron's GatedDeltaNet, whose norm is fused with its in_proj.
    assert keys["input_layernorm."] == "self_attention.in_proj.layer_norm_"


def norm_with_a_stub_of_transformer_engine():
    """Keys that a norm of Transformer Engine saves by itself, and as METP builds it."""
    import torch
    from megatron.core.extensions import transformer_engine

    from megatron_longseq import compat

    class StubNorm(torch.nn.LayerNorm):
        """Has an extra state, as the norms of Transformer Engine have."""

        def __init__(self, config, hidden_size, eps):
            super().__init__(hidden_size, eps=eps)

        def get_extra_state(self):
            return torch.zeros(0)

        def set_extra_state(self, state):
            raise AssertionError("there is none to set")

    transformer_engine.TENorm = StubNorm
    stock = StubNorm(None, 8, 1e-5)
    norm = compat.norm_of_transformer_engine()(config=None, hidden_size=8, eps=1e-5)
    norm.load_state_dict({"weight": torch.ones(8), "bias": torch.zeros(8)}, strict=True)
    same = torch.equal(norm(torch.arange(8.0)), stock(torch.arange(8.0)))
    return sorted(stock.state_dict()), sorted(norm.state_dict()), isinstance(norm, StubNorm), same


def test_a_norm_by_itself_saves_what_transformer_engines_fused_norm_saves(megatron_ranks):
    stock, ours, is_one, same = megatron_ranks.run(
        norm_with_a_stub_of_transformer_engine, world_size=1
    )[0]
    assert stock == ["_extra_state", "bias", "weight"]
    # A fused layer saves layer_norm_weight and layer_norm_bias, and no state for its norm.
    assert ours == ["bias", "weight"]
    assert is_one and same
