"""2D attention as Megatron's core attention: the one module that differs in the layer spec.

Megatron hands over query, key and value of this rank's tokens, RoPE applied; what comes back has
the same tokens. Everything between is :class:`..attention_2d.attention.TwoDAttention`, of which
all layers of a model share one, with its buffers.
"""

from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from ..errors import UserError
from ..process_groups import ContextParallelGroups
from .attention import TwoDAttention

CAUSAL = (AttnMaskType.causal,)
FULL = (AttnMaskType.no_mask,)


class TwoDCoreAttentionBuilder:
    """Builds the core attention of each layer around one shared operator.

    Stands in a layer spec where a class would; called with what Megatron's ``CoreAttention``
    protocol gives.

    Args:
        groups: of this rank.
        kernel: ``--longseq-attention-kernel``.
        timeout_seconds: ``--longseq-comm-timeout-seconds``.
    """

    def __init__(
        self, groups: ContextParallelGroups, *, kernel: str, timeout_seconds: float
    ) -> None:
        self.operator = TwoDAttention(
            groups.head,
            groups.ring,
            gradient_group=groups.gradients,
            schedule=groups.schedule,
            lane_groups=groups.lanes,
            timeout_seconds=timeout_seconds,
            # All ranks have read the same flags; comparing shapes at every call of every layer
            # would stop a GPU each time.
            check_agreement=False,
        )
        self.kernel = kernel

    def __call__(self, **arguments: Any) -> "TwoDCoreAttention":
        return TwoDCoreAttention(operator=self.operator, kernel=self.kernel, **arguments)

    def __deepcopy__(self, _memo: dict) -> "TwoDCoreAttentionBuilder":
        # Megatron copies specs; process groups and their buffers are one for all copies.
        return self


class TwoDCoreAttention(MegatronModule):
    """Softmax attention of this rank's tokens to the whole sequence.

    Has no parameters, so that a checkpoint moves between this and stock attention by a flag.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        operator: TwoDAttention,
        kernel: str,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout > 0.0:
            raise UserError(
                f"--attention-dropout {dropout}: 2D attention has none; use --attention-dropout 0"
            )
        if attention_type != "self":
            raise UserError(f"2D attention is self attention, not {attention_type} attention")
        grid = operator.heads.size * operator.ring.size
        group = getattr(pg_collection, "cp", None)
        if group is not None and group.size() != grid:
            raise UserError(
                f"2D attention was made for {grid} context-parallel ranks, and this layer's group "
                f"has {group.size()}; build both from the same process groups"
            )
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.kernel = kernel
        # Not a submodule: it is shared by all layers, and holds groups and buffers, no state.
        self.operator = operator

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_unused: Any,
    ) -> Tensor:
        """Attention as Megatron's ``CoreAttention`` protocol has it.

        Args:
            query: ``[n, b, a, d]``, this rank's tokens and heads.
            key, value: ``[n, b, g, d]``.
            attention_mask: not read: the mask follows from ``attn_mask_type``.
            attn_mask_type: causal, or none; default: what the layer was built with.

        Returns:
            ``[n, b, a * d]``.

        Raises:
            UserError: a mask, a bias or packed samples that 2D attention does not know.
        """
        mask_type = attn_mask_type or self.attn_mask_type
        if mask_type not in CAUSAL + FULL:
            raise UserError(
                f"--longseq-context-parallel 2d: attention mask {mask_type.name}; it knows causal "
                "and no_mask"
            )
        if attention_bias is not None or packed_seq_params is not None:
            what = "an attention bias" if attention_bias is not None else "packed samples"
            raise UserError(f"--longseq-context-parallel 2d: {what}: not supported")
        out = self.operator(
            query,
            key,
            value,
            causal=mask_type in CAUSAL,
            softmax_scale=self.softmax_scale,
            kernel=self.kernel,
        )
        return out.reshape(*out.shape[:2], -1)

    def describe(self) -> str:
        """For the start-up lines: factorisation and kernel."""
        from ..softmax.block_kernels import choose_kernel

        device = torch.device(torch.cuda.current_device())  # the CPU's, on the CPU platform
        kernel = choose_kernel(self.kernel, self.config.params_dtype, device)
        heads, ring = self.operator.heads.size, self.operator.ring.size
        return f"2D attention, {heads} head-parallel x {ring} ring, kernel {kernel.name}"
