"""From a config to Megatron layer specs; nothing else in this package chooses modules.

The stock spec is taken as Megatron builds it and edited, never rewritten, so that whatever
Megatron decides for its own layers stays decided by Megatron.
"""

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from . import compat
from .attention_2d.core_attention import TwoDCoreAttentionBuilder
from .config import factorisation, ranks_per_node, ring_windows
from .errors import UserError
from .external_options import prepare_model_config
from .lasp.layer import LinearAttention, LinearAttentionSubmodules
from .lasp.requirements import check_positions, linear_layers, preset_of
from .lasp.runtime import LinearRuntime
from .lasp.sequence_chunks import InstallSequenceChunks
from .memory.recomputed_layer import LayerOffload, RecomputedLayer
from .memory.requirements import take_over_recompute
from .metp.language_model import InstallMetp
from .metp.linears import ColumnShardLinear, RowShardLinear
from .metp.mlp import METPMLPBuilder
from .metp.requirements import check_sequence, check_shards_per_step, least_tokens
from .metp.runtime import MetpRuntime
from .metp.self_attention import METPCoreAttentionBuilder, METPSelfAttention
from .norms import SequenceParallelNorm
from .process_groups import context_parallel_groups, linear_groups, metp_groups

_SHARED = "_longseq_two_d_attention"
_METP = "_longseq_metp"
_LINEAR = "_longseq_linear_attention"


def longseq_layer_spec(model_config: Any, vp_stage: int | None = None) -> Any:
    """Returns the layer specs of this pipeline stage.

    Args:
        model_config: Megatron's ``GPTModelConfig``; its ``transformer`` is the
            :class:`~megatron_longseq.config.LongSeqTransformerConfig`, or Megatron's own, which
            :mod:`~megatron_longseq.external_options` then completes.
        vp_stage: virtual pipeline stage, with interleaved pipelines.

    Edits of the stock spec, Megatron's local one or Transformer Engine's alike:

    * where Megatron falls back to PyTorch's norm, which refuses sequence parallelism, the layers
      get :class:`~megatron_longseq.norms.SequenceParallelNorm`;
    * with ``--longseq-context-parallel 2d`` the core attention becomes
      :class:`~megatron_longseq.attention_2d.core_attention.TwoDCoreAttention`;
    * with ``--longseq-tensor-parallel metp`` attention and MLP become METP's, with linear layers
      of this package, and a hook fits embedding and loss of the built model;
    * with ``--longseq-keep-attention-output`` the layers of a full recompute do it themselves, but
      for their attention;
    * with ``--longseq-linear-attention`` the layers that ``--linear-attention-freq`` names, or all,
      get :class:`~megatron_longseq.lasp.layer.LinearAttention` for their self attention.

    A collective call: with a method of this package it makes process groups.
    """
    config = prepare_model_config(model_config)
    if config.longseq_tensor_parallel == "metp":
        install = InstallMetp(metp_runtime(model_config))
        if install not in model_config.pre_wrap_hooks:
            model_config.pre_wrap_hooks.insert(0, install)
    linear = config.longseq_linear_attention != "none"
    if linear:
        check_positions(config, model_config.position_embedding_type, model_config.rotary_percent)
    spec = copy.deepcopy(compat.stock_layer_spec(model_config, vp_stage))
    if isinstance(spec, ModuleSpec):
        count = get_num_layers_to_build(config, vp_stage=vp_stage)
        spec = TransformerBlockSubmodules(
            layer_specs=[spec] * count, layer_norm=compat.stock_final_norm(config)
        )
    if linear:
        # Layers of a kind may share one spec: each gets its own before some of them change.
        spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]
        if config.longseq_sequence_chunks > 1:
            chunked = InstallSequenceChunks(
                linear_runtime(model_config), config.longseq_sequence_chunks
            )
            if chunked not in model_config.pre_wrap_hooks:
                model_config.pre_wrap_hooks.insert(0, chunked)
        which = linear_layers(config)
        here = [which[layer] for layer in layers_of_stage(config, vp_stage)]
        chosen = [s for s, is_linear in zip(spec.layer_specs, here, strict=True) if is_linear]
        replace_self_attention(chosen, model_config)
    spec = edit_layer_spec(spec, model_config)
    if config.longseq_keep_attention_output:
        recompute_layers(spec, config)
    return spec


def recompute_layers(spec: TransformerBlockSubmodules, config: Any) -> None:
    """Makes the layers of a stage recompute themselves but for their attention, in place.

    Which ones, is what Megatron's block would have recomputed.
    """
    method, count = take_over_recompute(config)
    layers = [copy.deepcopy(layer) for layer in spec.layer_specs]
    recomputed = len(layers) if method == "uniform" else min(count or 0, len(layers))
    keeping = max(1, round(config.longseq_keep_attention_layers * recomputed))
    offload = LayerOffload() if config.longseq_keep_attention_offload else None
    for index, layer in enumerate(layers[:recomputed]):
        if layer.module is not TransformerLayer:
            raise UserError(
                f"--longseq-keep-attention-output: a layer is a {layer.module.__name__}; it knows "
                "Megatron's TransformerLayer"
            )
        layer.module = RecomputedLayer
        share = config.longseq_keep_attention_tokens if index < keeping else 0.0
        layer.params = {**(layer.params or {}), "kept_share": share, "offload": offload}
    spec.layer_specs = layers


def layers_of_stage(config: Any, vp_stage: int | None) -> list[int]:
    """The layers of this pipeline stage, counted from 0 over the whole model."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)))


def replace_self_attention(layers: list[ModuleSpec], model_config: Any) -> None:
    """Makes the self attention of these layers linear, in place.

    The norm before it becomes a module of its own where Transformer Engine fuses the two: it has
    several readers. Its checkpoint keys are those of the fused one.

    Raises:
        UserError: a layer has another self attention than Megatron's standard one.
    """
    runtime = linear_runtime(model_config)
    for layer in layers:
        parts = layer.submodules
        attention = getattr(parts, "self_attention", None)
        if not isinstance(attention, ModuleSpec) or attention.module is not SelfAttention:
            raise UserError(
                f"--longseq-linear-attention {runtime.preset.name}: the layers that Megatron chose "
                "have no self attention of its standard kind; use its standard attention layers"
            )
        stock: Any = attention.submodules
        column = stock.linear_qkv
        if parts.input_layernorm is IdentityOp:
            parts.input_layernorm = compat.norm_of_transformer_engine()
            column = compat.column_linear_of_transformer_engine()
        parts.self_attention = ModuleSpec(
            module=LinearAttention,
            params={**(attention.params or {}), "runtime": runtime},
            submodules=LinearAttentionSubmodules(in_proj=column, out_proj=stock.linear_proj),
            metainfo={"fuse_input_layernorm": False},
        )
        parts.sharded_state_dict_keys_map = {
            **parts.sharded_state_dict_keys_map,
            "input_layernorm.": "self_attention.in_proj.layer_norm_",
        }


def linear_runtime(model_config: Any) -> LinearRuntime:
    """The runtime of linear attention of this model: one, with one set of buffers.

    The first call for a model is collective.
    """
    runtime = vars(model_config).get(_LINEAR)
    if runtime is None:
        config = model_config.transformer
        preset = preset_of(config)
        assert preset is not None
        groups = linear_groups(
            config.tensor_model_parallel_size, ranks_per_node(), config.longseq_comm_timeout_seconds
        )
        if config.longseq_scan == "two_level" and groups.context and not groups.ranks_per_node:
            raise UserError(
                f"--longseq-scan two_level: the {config.context_parallel_size} context-parallel "
                "ranks are not spread over nodes of equally many, at least two; use auto"
            )
        runtime = LinearRuntime(
            groups.context,
            preset,
            layout=config.longseq_linear_layout,
            schedule=config.longseq_scan,
            backend=config.longseq_linear_backend,
            node_size=groups.ranks_per_node,
            timeout_seconds=config.longseq_comm_timeout_seconds,
        )
        vars(model_config)[_LINEAR] = runtime
    return runtime


def edit_layer_spec(spec: Any, model_config: Any) -> Any:
    """Returns a stock spec with this package's edits; see :func:`longseq_layer_spec`."""
    spec = replace_modules(spec, {WrappedTorchNorm: SequenceParallelNorm})
    if model_config.transformer.longseq_tensor_parallel == "metp":
        if not metp_layers(spec, metp_runtime(model_config)) and getattr(spec, "layer_specs", True):
            raise UserError(
                "--longseq-tensor-parallel metp: the layers that Megatron chose have no self "
                "attention of its standard kind; use its standard attention layers"
            )
    elif model_config.transformer.longseq_context_parallel == "2d":
        builder = two_d_core_attention(model_config)
        replaced = replace_core_attention(spec, builder)
        # A pipeline stage of a hybrid model may have linear layers alone.
        hybrid = model_config.transformer.longseq_linear_attention != "none"
        if not replaced and not hybrid and getattr(spec, "layer_specs", [spec]):
            raise UserError(
                "--longseq-context-parallel 2d: the layers that Megatron chose have no core "
                "attention to replace; use its standard attention layers"
            )
    return spec


def two_d_core_attention(model_config: Any) -> TwoDCoreAttentionBuilder:
    """The builder of 2D attention of this model: one, with one set of groups and buffers.

    The first call for a model makes process groups, so it is collective.
    """
    builder = vars(model_config).get(_SHARED)
    if builder is None:
        config = model_config.transformer
        split = factorisation(config, config.longseq_head_parallel_size)
        builder = TwoDCoreAttentionBuilder(
            context_parallel_groups(
                config.context_parallel_size,
                config.longseq_comm_timeout_seconds,
                ring_windows(config, split).schedule,
            ),
            kernel=config.longseq_attention_kernel,
            timeout_seconds=config.longseq_comm_timeout_seconds,
            backward_ring=config.longseq_backward_ring,
            gradient_dtype=config.longseq_ring_gradient_dtype,
        )
        # Kept with the model's config: interleaved pipelines and multi-token prediction ask again.
        vars(model_config)[_SHARED] = builder
    return builder


def closing_lines(model_config: Any) -> list[str]:
    """What the methods of a model have counted during a run, for the end of its log."""
    runtime = vars(model_config).get(_METP)
    if runtime is None or runtime.min_tokens == 0 or not runtime.chosen:
        return []
    return [f"METP: computed {runtime.summary()} in training"]


def metp_runtime(model_config: Any) -> MetpRuntime:
    """The METP runtime of this model: one, with one set of groups and buffers.

    The first call for a model makes process groups, so it is collective.
    """
    runtime = vars(model_config).get(_METP)
    if runtime is None:
        config = model_config.transformer
        check_sequence(
            getattr(model_config, "seq_length", None),
            config.tensor_model_parallel_size,
            config.context_parallel_size,
        )
        least = least_tokens(config)
        runtime = MetpRuntime(
            metp_groups(config.longseq_comm_timeout_seconds),
            kernel=config.longseq_attention_kernel,
            shards_per_step=check_shards_per_step(config),
            mlp_tiles=config.longseq_mlp_tiles,
            min_tokens=least,
            timeout_seconds=config.longseq_comm_timeout_seconds,
        )
        vars(model_config)[_METP] = runtime
    return runtime


def metp_layers(spec: Any, runtime: MetpRuntime) -> int:
    """Makes every layer in ``spec`` one of METP, in place; returns how many.

    Experts stay Megatron's. Where Transformer Engine fuses a norm with the linear layer behind it,
    the norm becomes a module of its own, with the same checkpoint keys.
    """
    if isinstance(spec, list | tuple):
        return sum(metp_layers(item, runtime) for item in spec)
    if isinstance(spec, TransformerBlockSubmodules):
        return metp_layers(spec.layer_specs, runtime)
    if isinstance(spec, ModuleSpec):
        return metp_layers(spec.submodules, runtime)
    if not isinstance(spec, TransformerLayerSubmodules):
        return 0
    attention = spec.self_attention
    if not isinstance(attention, ModuleSpec) or attention.module is not SelfAttention:
        return 0
    attention.module = METPSelfAttention
    attention.params = {**(attention.params or {}), "runtime": runtime}
    attention.submodules = dataclasses.replace(
        attention.submodules,  # type: ignore[type-var]
        linear_qkv=ColumnShardLinear,
        linear_proj=RowShardLinear,
        core_attention=METPCoreAttentionBuilder(runtime),
    )
    keys = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if spec.input_layernorm is IdentityOp:
        spec.input_layernorm = compat.norm_of_transformer_engine()
    if _is_dense(spec.mlp):
        spec.mlp = METPMLPBuilder(runtime)
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        if spec.pre_mlp_layernorm is IdentityOp:
            spec.pre_mlp_layernorm = compat.norm_of_transformer_engine()
    spec.sharded_state_dict_keys_map = {**spec.sharded_state_dict_keys_map, **keys}
    return 1


def _is_dense(mlp: Any) -> bool:
    """Whether a layer's ``mlp`` builds Megatron's MLP: not experts, not a layer of the user's."""
    builder = getattr(getattr(mlp, "func", None), "__self__", None)
    return isinstance(builder, type) and issubclass(builder, MLP)


def replace_core_attention(spec: Any, builder: Any) -> int:
    """Sets the core attention of every attention in ``spec``, in place; returns how many."""
    if isinstance(spec, list | tuple):
        return sum(replace_core_attention(item, builder) for item in spec)
    if isinstance(spec, dict):
        return replace_core_attention(list(spec.values()), builder)
    if isinstance(spec, functools.partial):
        return replace_core_attention([*spec.args, *spec.keywords.values()], builder)
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return 0
    names = {field.name for field in dataclasses.fields(spec)}
    if "core_attention" in names:
        latent = isinstance(spec, MLASelfAttentionSubmodules)  # built as a spec, not called
        spec.core_attention = builder.as_spec() if latent else builder  # type: ignore[attr-defined]
        return 1
    return sum(replace_core_attention(getattr(spec, name), builder) for name in names)


def replace_modules(spec: Any, replacements: Mapping[Any, Any]) -> Any:
    """Returns ``spec`` with modules replaced, wherever they stand in it.

    Walks dataclasses (specs and their submodules), lists, dicts and the keywords of
    :class:`functools.partial`, which Megatron uses to bind a module's own submodules.
    """
    if isinstance(spec, functools.partial):
        keywords = {k: replace_modules(v, replacements) for k, v in spec.keywords.items()}
        args = [replace_modules(a, replacements) for a in spec.args]
        return functools.partial(spec.func, *args, **keywords)
    if isinstance(spec, list | tuple):
        return type(spec)(replace_modules(item, replacements) for item in spec)
    if isinstance(spec, dict):
        return {key: replace_modules(value, replacements) for key, value in spec.items()}
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        result = copy.copy(spec)
        for field in dataclasses.fields(spec):
            value = replace_modules(getattr(spec, field.name), replacements)
            setattr(result, field.name, value)
        return result
    try:
        return replacements.get(spec, spec)
    except TypeError:  # what cannot be a key stands for itself
        return spec
