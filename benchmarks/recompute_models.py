"""The model of ``attention_at_scale.py``'s recompute part: a GPT of 2D attention, DDP and Adam."""

from collections.abc import Callable
from typing import Any

import at_scale_parts as parts
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron_step import FULL_RECOMPUTE, MegatronStep, mean_loss, start_groups
from torch import Tensor

from megatron_longseq.attention_2d import attention
from megatron_longseq.config import LongSeqTransformerConfig
from megatron_longseq.layer_specs import longseq_layer_spec
from megatron_longseq.memory.keep_attention import Kept
from megatron_longseq.model_builder import LongSeqGPTModelConfig
from megatron_longseq.token_layout import zigzag_tokens


def start(ranks: int) -> None:
    """Megatron's groups: one ring of all ranks."""
    torch.set_num_threads(1)
    start_groups(context_parallel_size=ranks, hierarchical_context_parallel_sizes=[1, ranks])


class Training(MegatronStep):
    """Two layers under full recompute, and a step of training them.

    Args:
        keep: keep what attention has computed.
    """

    def __init__(self, *, keep: bool) -> None:
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        transformer = LongSeqTransformerConfig(
            num_layers=parts.KEEP_LAYERS,
            hidden_size=parts.KEEP_HIDDEN,
            num_attention_heads=parts.KEEP_HEADS,
            context_parallel_size=dist.get_world_size(),
            transformer_impl="local",
            use_cpu_initialization=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            params_dtype=torch.bfloat16,
            bf16=True,
            gradient_accumulation_fusion=False,
            finalize_model_grads_func=finalize_model_grads,
            longseq_context_parallel="2d",
            longseq_head_parallel_size=1,
            longseq_keep_attention_output=keep,
            **FULL_RECOMPUTE,
        )
        config = LongSeqGPTModelConfig(
            transformer=transformer,
            transformer_layer_spec=longseq_layer_spec,
            vocab_size=parts.KEEP_VOCABULARY,
            seq_length=parts.KEEP_TOKENS,
            position_embedding_type="none",
        )
        super().__init__(config)
        generator = torch.Generator().manual_seed(2)
        text = torch.randint(0, 257, (1, parts.KEEP_TOKENS + 1), generator=generator)
        own = zigzag_tokens(dist.get_rank(), dist.get_world_size(), parts.KEEP_TOKENS)
        self._batch = text[:, :-1][:, own], own[None], text[:, 1:][:, own]

    def batch(self, sequence: int) -> tuple[Tensor, ...]:
        """This rank's tokens, positions and labels: always the same."""
        assert sequence == parts.KEEP_TOKENS
        return self._batch

    def _forward_step(self, batches: Any, model: torch.nn.Module) -> tuple[Tensor, Callable]:
        tokens, positions, labels = next(batches)
        return model(tokens, positions, None, labels=labels), mean_loss

    def counted(self) -> tuple[float, int]:
        """Of one more step: passes of attention per layer, and bytes checkpoints keep of it."""
        plain, keep = attention.ring_attention_forward, Kept.keep
        calls, held = [], []

        def counted_pass(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return plain(*args, **kwargs)

        def counted_keep(kept: Kept, tensors: tuple[Tensor, ...]) -> None:
            held.append(sum(t.numel() * t.element_size() for t in tensors))
            keep(kept, tensors)

        attention.ring_attention_forward = counted_pass
        Kept.keep = counted_keep  # type: ignore[method-assign]
        try:
            self.step(parts.KEEP_TOKENS)
        finally:
            attention.ring_attention_forward = plain
            Kept.keep = keep  # type: ignore[method-assign]
        return len(calls) / parts.KEEP_LAYERS, sum(held)
