"""The MLP of METP: Megatron's, with its weight shards passing every rank."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import bias_geglu_impl
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import Tensor

from .linears import ColumnShardLinear, RowShardLinear
from .runtime import MetpRuntime


class METPMLP(MLP):
    """O = f(X W1) W2 for this rank's tokens, by :class:`.matmul_chain.RingMatmulChain`.

    Parameters, their names, shards and checkpoint keys are those of Megatron's MLP.
    """

    def __init__(self, *args: Any, runtime: MetpRuntime, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Not a submodule: it is shared by all layers, and holds groups and buffers, no state.
        self.runtime = runtime

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """``[s / p, b, h]`` to the same, and the bias that Megatron adds with the residual."""
        tokens = hidden_states.shape[0] * hidden_states.shape[1] * self.runtime.place.size
        if self.runtime.path(tokens) != "METP":
            return super().forward(hidden_states, per_token_scale, **kwargs)
        assert per_token_scale is None, "only experts scale tokens, and they stay Megatron's"
        # Called, not read: see the module's description in linears.py.
        (w1, b1), (w2, b2) = self.linear_fc1(), self.linear_fc2()
        out = self.runtime.chain(
            hidden_states,
            w1,
            w2,
            f=self.activate,
            bias=b1,
            tiles=self.runtime.mlp_tiles,
            fused_gradients=self.linear_fc1.gradient_accumulation_fusion,
        )
        return out, b2

    def activate(self, inner: Tensor) -> Tensor:
        """``[n, f / p]``, or ``[n, 2 f / p]`` for a gated unit, to ``[n, f / p]``.

        What Megatron's MLP computes between its two linear layers. A shard of a gated unit holds
        gates and values of the same columns, so that a gate meets its value on every rank.
        """
        config = self.config
        if config.bias_activation_fusion:
            return self._activate_fused(inner)
        if not config.gated_linear_unit:
            return self.activation_func(inner)
        gate, value = torch.chunk(inner, 2, dim=-1)
        limit = config.activation_func_clamp_value
        if limit is not None:
            gate = gate.clamp(max=limit)
            value = value.clamp(min=-limit, max=limit)
        return config.activation_func(gate) * (value + config.glu_linear_offset)

    def _activate_fused(self, inner: Tensor) -> Tensor:
        """Megatron's fused activations, whose GELU is another function: the tanh approximation.

        The bias has been added with the product, so that none is left for them.
        """
        config = self.config
        if config.activation_func is F.gelu:
            if config.gated_linear_unit:
                return bias_geglu_impl(inner, None)
            return bias_gelu_impl(inner, inner.new_zeros(inner.shape[-1]))
        return bias_swiglu_impl(inner, None, config.activation_func_fp8_input_store, False)

    def describe(self) -> str:
        """For the start-up lines."""
        shard = sum(p.nbytes for p in (self.linear_fc1.weight, self.linear_fc2.weight))
        tiles = self.runtime.mlp_tiles
        return (
            f"METP MLP, {self.runtime.place.size} weight shards of {shard / 2**20:.3g} MiB pass by"
            + (f", rows in {tiles} tiles" if tiles > 1 else "")
        )


class METPMLPBuilder:
    """Builds the MLP of each layer around one shared runtime; stands in a spec as ``mlp``."""

    def __init__(self, runtime: MetpRuntime) -> None:
        self.runtime = runtime

    def __call__(
        self, *, config: Any, pg_collection: Any, is_mtp_layer: bool, name: str | None = None
    ) -> METPMLP:
        """See Megatron's ``MLP.as_mlp_submodule``."""
        del is_mtp_layer
        return METPMLP(
            config=config,
            submodules=MLPSubmodules(linear_fc1=ColumnShardLinear, linear_fc2=RowShardLinear),
            ffn_hidden_size=config.ffn_hidden_size,
            tp_group=pg_collection.tp,
            name=name,
            runtime=self.runtime,
        )
