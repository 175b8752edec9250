"""2D attention as Megatron's core attention: the one module that differs in the layer spec.

Megatron hands over query, key and value of this rank's tokens, RoPE applied; what comes back has
the same tokens. Everything between is :class:`..attention_2d.attention.TwoDAttention`, of which
all layers of a model share one, with its buffers.
"""

import dataclasses
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from ..communication.all_to_all import even_shares, serving_shares
from ..communication.ring import accumulation_dtype
from ..errors import UserError
from ..packed_rows import PackedRows
from ..process_groups import ContextParallelGroups
from ..softmax.ring_attention import BackwardRing, backward_bytes
from ..split_parameters import device_of, per_head
from .attention import TwoDAttention
from .changes import Dropout

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
        backward_ring: ``--longseq-backward-ring``.
        gradient_dtype: ``--longseq-ring-gradient-dtype``.
    """

    def __init__(
        self,
        groups: ContextParallelGroups,
        *,
        kernel: str,
        timeout_seconds: float,
        backward_ring: BackwardRing = "auto",
        gradient_dtype: Literal["fp32", "input"] = "fp32",
    ) -> None:
        self.operator = TwoDAttention(
            groups.head,
            groups.ring,
            gradient_group=groups.gradients,
            schedule=groups.schedule,
            lane_groups=groups.lanes,
            timeout_seconds=timeout_seconds,
            backward_ring=backward_ring,
            gradient_dtype="input" if gradient_dtype == "input" else None,
            # All ranks have read the same flags; comparing shapes at every call of every layer
            # would stop a GPU each time.
            check_agreement=False,
        )
        self.kernel = kernel

    def __call__(self, **arguments: Any) -> "TwoDCoreAttention":
        return TwoDCoreAttention(operator=self.operator, kernel=self.kernel, **arguments)

    def as_spec(self) -> ModuleSpec:
        """The same as a spec, for attention of Megatron's that takes no other builder."""
        params = {"operator": self.operator, "kernel": self.kernel}
        return ModuleSpec(module=TwoDCoreAttention, params=params)

    def __deepcopy__(self, _memo: dict) -> "TwoDCoreAttentionBuilder":
        # Megatron copies specs; process groups and their buffers are one for all copies.
        return self


class TwoDCoreAttention(MegatronModule):
    """Softmax attention of this rank's tokens to the whole sequence.

    Its one parameter, with ``--softmax-type learnable``, is stock attention's ``softmax_offset``,
    so that a checkpoint moves between the two by a flag.
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
        given = attention_dropout
        self.dropout = config.attention_dropout if given is None else given
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
        self.window = _window(config, self.layer_number)
        self.tp_group = getattr(pg_collection, "tp", None)
        if self.tp_group is None:
            self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self._build_sink(config)
        # Not a submodule: it is shared by all layers, and holds groups and buffers, no state.
        self.operator = operator

    def _build_sink(self, config: Any) -> None:
        """A logit per query head of this rank that takes part in the softmax; ``None`` without."""
        self.softmax_offset: Tensor | None = None
        if config.softmax_type == "vanilla":
            return
        whole = torch.zeros(config.num_attention_heads, device=device_of(config))
        if config.softmax_type == "off-by-one":
            self.softmax_offset = whole.chunk(self.tp_group.size())[0].to(config.params_dtype)
            return
        if config.perform_initialization:
            # Of the whole model, so that it does not depend on the tensor-parallel size.
            config.init_method(whole)
        # Marked as split: a norm of gradients then counts the heads of all ranks.
        self.softmax_offset = per_head(config, whole, self.tp_group)

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
            key, value: ``[n, b, g, d]``. Of documents in Megatron's ``"thd"`` format ``[n, a, d]``
                and ``[n, g, d]``.
            attention_mask: not read: the mask follows from ``attn_mask_type``.
            attn_mask_type: causal, or none; default: what the layer was built with.
            packed_seq_params: documents: :class:`~megatron_longseq.packed_rows.PackedRows`, or
                Megatron's ``"thd"`` format, in which each document is a zigzag by itself.

        Returns:
            ``[n, b, a * d]``; ``[n, a * d]`` in the ``"thd"`` format.

        Raises:
            UserError: a mask or a bias that 2D attention does not know, or documents in another
                token order.
        """
        mask_type = attn_mask_type or self.attn_mask_type
        if mask_type not in CAUSAL + FULL:
            raise UserError(
                f"--longseq-context-parallel 2d: attention mask {mask_type.name}; it knows causal "
                "and no_mask"
            )
        if attention_bias is not None:
            raise UserError("--longseq-context-parallel 2d: an attention bias: not supported")
        options: dict[str, Any] = {
            "causal": mask_type in CAUSAL,
            "window": self.window,
            "sink": self.softmax_offset,
            "dropout": self._dropout(query.shape[-2]),
            "softmax_scale": self.softmax_scale,
            "kernel": self.kernel,
        }
        if packed_seq_params is None:
            out = self.operator(query, key, value, **options)
        elif isinstance(packed_seq_params, PackedRows):
            # Documents differ from row to row.
            parts = []
            for row, boundaries in enumerate(packed_seq_params.boundaries):
                if options["dropout"] is not None:  # each row drops weights of its own
                    options["dropout"] = dataclasses.replace(options["dropout"], first_row=row)
                tensors = (tensor[:, row : row + 1] for tensor in (query, key, value))
                parts.append(self.operator(*tensors, cu_seqlens=boundaries, **options))
            out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        else:
            documents = self._documents(packed_seq_params)
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
            return self.operator(query, key, value, **documents, **options).flatten(1)
        return out.reshape(*out.shape[:2], -1)

    def _dropout(self, heads: int) -> Dropout | None:
        """Of this call, in training.

        Its seed is the next number of PyTorch's generator on the CPU, whose state Megatron's
        checkpoints bring back: a recomputed layer drops what it has dropped.
        """
        if self.dropout == 0 or not self.training:
            return None
        seed = int(torch.randint(2**62, (1,), device="cpu"))
        return Dropout(self.dropout, seed, first_head=self.tp_group.rank() * heads)

    def _documents(self, packed: Any) -> dict[str, Tensor]:
        """The operator's arguments for documents in Megatron's ``"thd"`` format."""
        if packed.qkv_format != "thd":
            raise UserError(
                f"--longseq-context-parallel 2d: packed samples in the format "
                f"{packed.qkv_format}: it knows thd"
            )
        ranks = self.operator.heads.size * self.operator.ring.size
        if ranks == 1 and packed.cu_seqlens_q_padded is None:
            return {"cu_seqlens": packed.cu_seqlens_q}
        if packed.cu_seqlens_q_padded is None:
            raise UserError(
                "--longseq-context-parallel 2d: packed samples without cu_seqlens_q_padded over "
                f"{ranks} ranks: their token order cannot be told. Where each document is a zigzag "
                "by itself, give its boundaries there too; for rows that are split as a whole use "
                "megatron_longseq.packed_rows.PackedRows, as `longseq train` does"
            )
        return {"cu_seqlens": packed.cu_seqlens_q, "cu_seqlens_padded": packed.cu_seqlens_q_padded}

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The sink, if it is learned, as stock attention describes it."""
        own = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def describe(self) -> str:
        """For the start-up lines: factorisation and kernel."""
        from ..softmax.block_kernels import choose_kernel

        # Where the CPU platform stands in for CUDA, it is the CPU that a tensor comes to lie on.
        device = torch.empty(0, device=torch.cuda.current_device()).device
        kernel = choose_kernel(self.kernel, self.config.params_dtype, device)
        heads, ring = self.operator.heads.size, self.operator.ring.size
        more = "" if self.window is None else f", window {self.window}"
        if self.dropout > 0:
            more += f", dropout {self.dropout}"
        if ring > 1 and self.window is None:  # of a short window rows of keys travel
            more += f", {self._moves()} go round backward"
        if self.softmax_offset is not None:
            more += f", {self.config.softmax_type} sinks"
        return f"2D attention, {heads} head-parallel x {ring} ring, kernel {kernel.name}{more}"

    def _moves(self) -> str:
        """What goes round the ring backward, keys or queries, of blocks that travel whole."""
        config, operator = self.config, self.operator
        if self.dropout > 0:
            return "keys"
        if operator.backward_ring != "auto":
            return operator.backward_ring
        tensor = self.tp_group.size()
        heads = config.num_attention_heads // tensor
        kv_heads = max(1, (config.num_query_groups or config.num_attention_heads) // tensor)
        width = value_width = config.kv_channels
        if config.multi_latent_attention:
            width = config.qk_head_dim + config.qk_pos_emb_head_dim
            value_width = config.v_head_dim
            kv_heads = heads
        queries = even_shares(heads, operator.heads.size)
        keys = serving_shares(queries, heads, kv_heads)
        here, dtype = operator.heads.place.position, config.params_dtype
        of_keys, of_queries = backward_bytes(
            operator.ring.size,
            queries=len(queries[here]),
            keys=len(keys[here]),
            width=width,
            value_width=value_width,
            element_bytes=dtype.itemsize,
            row_bytes=accumulation_dtype(dtype).itemsize,
            gradient_bytes=operator.ring.sum_dtype(dtype).itemsize,
        )
        return "queries" if of_queries < of_keys else "keys"


def _window(config: Any, layer_number: int) -> int | None:
    """How many earlier tokens a token of this layer sees; all: None. Checked by the config."""
    sizes = config.window_size
    if sizes is None or sizes[0] < 0:
        return None
    frequency = config.window_attn_skip_freq
    return sizes[0] if is_layer_window_attention(sizes, frequency, layer_number) else None
