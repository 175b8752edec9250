"""Megatron's hybrid models, ``--hybrid-layer-pattern``, with this package's layers in their slots.

A pattern names each layer: ``G`` linear attention, ``*`` softmax attention, ``-`` an MLP, ``|`` the
end of a pipeline stage. With ``--longseq-linear-attention`` the ``G`` layers are
:class:`~.lasp.layer.LinearAttention`, with ``--longseq-context-parallel 2d`` the core of the ``*``
layers is 2D attention. Megatron writes its own stack with Transformer Engine; without it
the slots are filled from Megatron's local layers, and the stack ends in a norm of theirs. Names of
parameters, and so checkpoints, are those of Megatron's stack.
"""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.training.models.hybrid import HybridModelBuilder, HybridModelConfig

from . import compat
from .config import LongSeqTransformerConfig
from .layer_specs import edit_layer_spec, replace_self_attention


class LongSeqHybridStack(HybridStack):
    """Megatron's stack with a final norm that needs no Transformer Engine.

    Args:
        final_norm: what builds it; the rest as of :class:`HybridStack`.
    """

    def __init__(
        self,
        config: Any,
        submodules: HybridStackSubmodules,
        *,
        final_norm: Any,
        post_layer_norm: bool = True,
        **arguments: Any,
    ) -> None:
        super().__init__(config, submodules, post_layer_norm=False, **arguments)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = build_module(
                final_norm,
                config=config,
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
            )


def hybrid_stack_spec(model_config: Any) -> ModuleSpec:
    """The spec of a hybrid model's stack. A collective call: it may make process groups.

    Args:
        model_config: Megatron's ``HybridModelConfig``, whose ``transformer`` is the
            :class:`~megatron_longseq.config.LongSeqTransformerConfig`.
    """
    config = model_config.transformer
    if config.transformer_impl == "local":
        spec = _local_spec(config)
    else:
        spec = copy.deepcopy(compat.stock_hybrid_stack_spec())
    slots = spec.submodules
    if config.longseq_linear_attention != "none":
        # The slot of softmax attention as it stands, with the same norms and linear layers.
        slots.gdn_layer = copy.deepcopy(slots.attention_layer)
        replace_self_attention([slots.gdn_layer], model_config)
    edited = edit_layer_spec(
        TransformerBlockSubmodules(
            layer_specs=[slots.gdn_layer, slots.attention_layer, slots.mlp_layer],
            layer_norm=compat.stock_final_norm(config),
        ),
        model_config,
    )
    slots.gdn_layer, slots.attention_layer, slots.mlp_layer = edited.layer_specs
    if config.transformer_impl == "local":
        spec.params = {"final_norm": edited.layer_norm}
    return spec


def _local_spec(config: Any) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    parts: Any = layer.submodules
    keys = parts.sharded_state_dict_keys_map

    def keys_of(prefix: str) -> dict[str, str]:
        return {old: new for old, new in keys.items() if old.startswith(prefix)}

    attention = TransformerLayerSubmodules(
        input_layernorm=parts.input_layernorm,
        self_attention=parts.self_attention,
        self_attn_bda=parts.self_attn_bda,
        sharded_state_dict_keys_map=keys_of("input_layernorm"),
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=parts.pre_mlp_layernorm,
        mlp=parts.mlp,
        mlp_bda=parts.mlp_bda,
        sharded_state_dict_keys_map=keys_of("pre_mlp_layernorm"),
    )
    return ModuleSpec(
        module=LongSeqHybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )


@dataclass(kw_only=True)
class LongSeqHybridModelConfig(HybridModelConfig):
    """Megatron's hybrid model config, built by :class:`LongSeqHybridModelBuilder`."""

    builder: ClassVar[str] = f"{__name__}.LongSeqHybridModelBuilder"


class LongSeqHybridModelBuilder(HybridModelBuilder):
    """Megatron's builder, whose stack has this package's layers unless the user names another."""

    def build_model(self, pg_collection: Any, *arguments: Any, **options: Any) -> HybridModel:
        """Builds one stage of the model; see Megatron's builder for the arguments."""
        config = self._model_config
        if config.hybrid_stack_spec is None:
            assert isinstance(config.transformer, LongSeqTransformerConfig)
            config.hybrid_stack_spec = hybrid_stack_spec(config)
        return super().build_model(pg_collection, *arguments, **options)
