"""From a config to Megatron layer specs; nothing else in this package chooses modules.

The stock spec is taken as Megatron builds it and edited, never rewritten, so that whatever
Megatron decides for its own layers stays decided by Megatron.
"""

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from . import compat
from .attention_2d.core_attention import TwoDCoreAttentionBuilder
from .errors import UserError
from .external_options import prepare_model_config
from .norms import SequenceParallelNorm
from .process_groups import context_parallel_groups

_SHARED = "_longseq_two_d_attention"


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
      :class:`~megatron_longseq.attention_2d.core_attention.TwoDCoreAttention`.

    A collective call: with 2D attention it makes process groups.
    """
    config = prepare_model_config(model_config)
    spec = copy.deepcopy(compat.stock_layer_spec(model_config, vp_stage))
    if isinstance(spec, ModuleSpec):
        count = get_num_layers_to_build(config, vp_stage=vp_stage)
        spec = TransformerBlockSubmodules(
            layer_specs=[spec] * count, layer_norm=compat.stock_final_norm(config)
        )
    return edit_layer_spec(spec, model_config)


def edit_layer_spec(spec: Any, model_config: Any) -> Any:
    """Returns a stock spec with this package's edits; see :func:`longseq_layer_spec`."""
    spec = replace_modules(spec, {WrappedTorchNorm: SequenceParallelNorm})
    if model_config.transformer.longseq_context_parallel == "2d":
        builder = two_d_core_attention(model_config)
        replaced = replace_core_attention(spec, builder)
        if not replaced and getattr(spec, "layer_specs", [spec]):
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
        builder = TwoDCoreAttentionBuilder(
            context_parallel_groups(
                config.context_parallel_size, config.longseq_comm_timeout_seconds
            ),
            kernel=config.longseq_attention_kernel,
            timeout_seconds=config.longseq_comm_timeout_seconds,
        )
        # Kept with the model's config: interleaved pipelines and multi-token prediction ask again.
        vars(model_config)[_SHARED] = builder
    return builder


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
        spec.core_attention = builder  # type: ignore[attr-defined]
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
