"""The self attention of METP: Megatron's, one head group after the other on all ranks.

``METPSelfAttention`` takes the place of ``SelfAttention`` in a layer spec;
``METPCoreAttention`` is what it uses when the run-time switch makes a micro-batch compute as
Megatron's tensor parallelism does, on the same weights and tokens.
"""

from typing import Any

from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from ..errors import UserError
from ..softmax.block_kernels import BlockKernel, choose_kernel
from ..softmax.mask_plan import Mask, MaskPlan
from ..softmax.ring_attention import ring_attention
from .head_groups import HeadGroups
from .runtime import MetpRuntime

MASKS = (AttnMaskType.causal, AttnMaskType.no_mask)


class METPSelfAttention(SelfAttention):
    """Self attention of this rank's tokens, by :class:`.head_groups.HeadGroupAttention`.

    Parameters, their names, shards and checkpoint keys are those of Megatron's self attention.
    """

    def __init__(self, *args: Any, runtime: MetpRuntime, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Not a submodule: it is shared by all layers, and holds groups and buffers, no state.
        self.runtime = runtime

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Any = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``[s / p, b, h]`` to the same, and the bias that Megatron adds with the residual.

        Args:
            hidden_states: this rank's tokens, its early piece and its late piece.
            attention_mask: not read: the mask follows from the layer's ``attn_mask_type``.
            rotary_pos_emb: ``[s, 1, 1, d]`` of all tokens of the tensor-parallel group in natural
                order, as Megatron gives it; one tensor, or one for queries and one for keys.

        Raises:
            UserError: something that METP attention does not know.
        """
        self._refuse(
            key_value_states=key_value_states,
            inference_context=inference_context,
            inference_params=inference_params,
            rotary_pos_cos=rotary_pos_cos,
            rotary_pos_sin=rotary_pos_sin,
            rotary_pos_cos_sin=rotary_pos_cos_sin,
            attention_bias=attention_bias,
            packed_seq_params=packed_seq_params,
            sequence_len_offset=sequence_len_offset,
        )
        rows, batch, _ = hidden_states.shape
        if self.runtime.path(rows * batch * self.runtime.place.size) != "METP":
            return super().forward(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb)
        # Called, not read: see the module's description in linears.py.
        (qkv_weight, qkv_bias), (weight, bias) = self.linear_qkv(), self.linear_proj()
        norms = [n for n in (self.q_layernorm, self.k_layernorm) if n is not None]
        heads = HeadGroups(
            to_heads=self._to_heads(rotary_pos_emb),
            kernel=self._kernel(hidden_states),
            causal=self.attn_mask_type is AttnMaskType.causal,
            scale=self._scale(),
            per_step=self.runtime.shards_per_step,
            fused_gradients=self.linear_qkv.gradient_accumulation_fusion,
            parameters=tuple(p for norm in norms for p in norm.parameters()),
        )
        out = self.runtime.attention(hidden_states, qkv_weight, qkv_bias, weight, heads)
        return out, bias

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's, with the tokens in natural order: it is asked as tensor parallelism only."""
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        natural = self.runtime.natural(query.shape[0], query.device)
        return query[natural], key[natural], value[natural]

    def _to_heads(self, rotary_pos_emb: Any) -> Any:
        """The function from mixed query, key and value of some head groups to the three."""
        config = self.config
        if config.no_rope_freq and config.no_rope_freq[self.layer_number - 1]:
            rotary_pos_emb = None
        if not isinstance(rotary_pos_emb, tuple):
            rotary_pos_emb = (rotary_pos_emb, rotary_pos_emb)
        query_rows, key_rows = (
            None if embedding is None else self.runtime.rotary_rows(embedding)
            for embedding in rotary_pos_emb
        )
        width = config.kv_channels
        queries = config.num_attention_heads // config.num_query_groups

        def to_heads(mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            # Each key/value group's queries, then its key, then its value: as Megatron lays them.
            groups = mixed.view(*mixed.shape[:2], -1, queries + 2, width)
            # One split and no slices, whose gradients are each as large as all of `mixed`.
            parts = groups.split([queries, 1, 1], 3)
            query, key, value = (part.flatten(2, 3) for part in parts)
            if self.q_layernorm is not None:
                query = self.q_layernorm(query)
            if self.k_layernorm is not None:
                key = self.k_layernorm(key)
            if query_rows is not None:
                query = self._rotate(query, query_rows)
            if key_rows is not None:
                key = self._rotate(key, key_rows)
            return query, key, value

        return to_heads

    def _rotate(self, tensor: Tensor, rows: Tensor) -> Tensor:
        return apply_rotary_pos_emb(
            tensor,
            rows,
            config=self.config,
            mscale=self._yarn_concentration_factor,
            cp_group=self.pg_collection.cp,
        )

    def _scale(self) -> float:
        scale = self.config.softmax_scale
        return self.config.kv_channels**-0.5 if scale is None else scale

    def _kernel(self, like: Tensor) -> BlockKernel:
        return choose_kernel(self.runtime.kernel, like.dtype, like.device)

    def _refuse(self, **given: Any) -> None:
        for name, value in given.items():
            if value is not None:
                raise UserError(
                    f"--longseq-tensor-parallel metp: its attention was given {name}, which it "
                    "does not know; use --longseq-tensor-parallel megatron, which reads the same "
                    "checkpoints"
                )
        if self.attn_mask_type not in MASKS:
            raise UserError(
                f"--longseq-tensor-parallel metp: attention mask {self.attn_mask_type.name}; it "
                "knows causal and no_mask"
            )

    def describe(self) -> str:
        """For the start-up lines: outer and inner loop, and kernel."""
        runtime = self.runtime
        steps = runtime.place.size // runtime.shards_per_step
        weight = self.linear_qkv.weight
        kernel = choose_kernel(runtime.kernel, weight.dtype, weight.device)
        heads = self.config.num_attention_heads // steps
        ranks = runtime.attention.kv_ring.size
        return (
            f"METP attention, {steps} steps of {heads} heads, K/V of {ranks} ranks pass by, "
            f"kernel {kernel.name}"
        )


class METPCoreAttentionBuilder:
    """Builds the core attention of each layer around one shared runtime; stands in a spec."""

    def __init__(self, runtime: MetpRuntime) -> None:
        self.runtime = runtime

    def __call__(self, *, config: Any, **_unused: Any) -> "METPCoreAttention":
        return METPCoreAttention(config, self.runtime)


class METPCoreAttention(MegatronModule):
    """Attention of this rank's heads to all tokens, for micro-batches below the switch.

    Takes query, key and value in natural order, gives the output in the order of METP's tokens.
    With context parallelism keys and values pass around among its ranks.
    """

    def __init__(self, config: Any, runtime: MetpRuntime) -> None:
        super().__init__(config=config)
        self.runtime = runtime

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType,
        **_unused: Any,
    ) -> Tensor:
        """``[s, b, a / p, d]`` and ``[s, b, g / p, d]``, natural order, to ``[s, b, a d / p]``."""
        scale, ring = self.config.softmax_scale, self.runtime.context_ring
        mask = Mask(causal=attn_mask_type is AttnMaskType.causal)
        out = ring_attention(
            query,
            key,
            value,
            ring=ring,
            kernel=choose_kernel(self.runtime.kernel, query.dtype, query.device),
            plan=MaskPlan(mask, ring.size, len(query)),
            scale=self.config.kv_channels**-0.5 if scale is None else scale,
        )
        order = self.runtime.order(out.shape[0], out.device)
        return out.reshape(*out.shape[:2], -1)[order]
