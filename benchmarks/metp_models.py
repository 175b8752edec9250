"""What ``benchmarks/metp.py`` compares: Megatron's GPT model under METP and under stock layers.

Every contender is Megatron's own model, DDP, optimizer and schedule; they differ by what a flag
would change. The stock layers compute attention with this package's block kernel, which keeps no
s x s scores, or with Megatron's ``DotProductAttention``, which does.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron_step import FULL_RECOMPUTE, MegatronStep, mean_loss, start_groups
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from megatron_longseq.config import LongSeqTransformerConfig
from megatron_longseq.layer_specs import longseq_layer_spec
from megatron_longseq.model_builder import LongSeqGPTModelConfig

HIDDEN, HEADS, FFN, VOCABULARY = 512, 8, 2048, 2048
# Rows of a rank's tokens whose logits the tiled loss holds at a time.
TILE_ROWS = 128


@dataclass(frozen=True)
class Contender:
    """One way to compute the same model.

    Attributes:
        method: ``METP``, ``TP+SP`` or ``TP``.
        core: attention of the stock layers: ``ours``, this package's kernel without s x s scores,
            or ``stock``, Megatron's ``DotProductAttention``.
        loss: ``ring`` (METP's), ``tiled`` or ``stock``.
        recompute: ``none``, ``norm`` (both norms of a layer) or ``full`` (every layer).
        kernel: ``--longseq-attention-kernel``.
    """

    method: str
    core: str = "ours"
    loss: str = "stock"
    recompute: str = "none"
    kernel: str = "auto"
    mlp_tiles: int = 1

    @property
    def name(self) -> str:
        parts = [self.method]
        if self.core == "stock":
            parts.append("DotProductAttention")
        parts.append(f"{self.loss} loss")
        if self.recompute != "none":
            parts.append(f"{self.recompute} recompute")
        if self.mlp_tiles > 1:
            parts.append(f"MLP in {self.mlp_tiles} tiles")
        return ", ".join(parts)


METP = Contender("METP", loss="ring")
TP_SP = Contender("TP+SP")
TP = Contender("TP")
STOCK_CORE = replace(TP_SP, core="stock")


def start(ranks: int) -> None:
    """Megatron's groups of one tensor-parallel group of all ranks; ends what there was before."""
    start_groups(tensor_model_parallel_size=ranks)


def model_config(
    contender: Contender, *, layers: int, sequence: int, dtype: torch.dtype = torch.bfloat16
) -> LongSeqGPTModelConfig:
    """Megatron's config of the contender's model; needs :func:`start` before."""
    recompute: dict[str, Any] = {}
    if contender.recompute == "norm":
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    elif contender.recompute == "full":
        recompute = dict(FULL_RECOMPUTE)
    transformer = LongSeqTransformerConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=FFN,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=contender.method != "TP",
        transformer_impl="local",
        use_cpu_initialization=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
        longseq_tensor_parallel="metp" if contender.method == "METP" else "megatron",
        longseq_context_parallel=(
            "2d" if contender.method != "METP" and contender.core == "ours" else "megatron"
        ),
        longseq_attention_kernel=contender.kernel,
        longseq_mlp_tiles=contender.mlp_tiles,
        **recompute,
    )
    return LongSeqGPTModelConfig(
        transformer=transformer,
        transformer_layer_spec=longseq_layer_spec,
        vocab_size=VOCABULARY,
        seq_length=sequence,
        position_embedding_type="none",
    )


class Training(MegatronStep):
    """A contender's model with DDP and Adam, and one step of training it.

    Every contender starts from the same weights: Megatron draws them by seed, in the same order.

    Args:
        contender: what to build.
        layers, sequence: of the model.
        optimizer: leave it out where a step is not asked for.
    """

    def __init__(
        self,
        contender: Contender,
        *,
        layers: int,
        sequence: int,
        dtype: torch.dtype = torch.bfloat16,
        optimizer: bool = True,
    ) -> None:
        self.contender = contender
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        config = model_config(contender, layers=layers, sequence=sequence, dtype=dtype)
        super().__init__(config, optimizer=optimizer)

    def batch(self, sequence: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions and labels ``[1, s]``, the same on every rank."""
        generator = torch.Generator().manual_seed(2)
        text = torch.randint(0, VOCABULARY, (1, sequence + 1), generator=generator)
        return text[:, :-1].contiguous(), torch.arange(sequence)[None], text[:, 1:].contiguous()

    def warm_up(self, sequence: int) -> None:
        """A step of the first layer alone: buffers have grown to this length after it."""
        block = self.inner.decoder
        layers, count = block.layers, block.num_layers_per_pipeline_rank
        block.layers, block.num_layers_per_pipeline_rank = layers[:1], 1
        try:
            self.step(sequence, update=False)
        finally:
            block.layers, block.num_layers_per_pipeline_rank = layers, count

    def _forward_step(self, batches: Any, model: torch.nn.Module) -> tuple[Tensor, Callable]:
        tokens, positions, labels = next(batches)
        extra = {}
        if self.contender.loss == "tiled":
            extra["output_processor"] = tiled_loss
        losses = model(tokens, positions, None, labels=labels, **extra)
        return losses, mean_loss

    def gradients(self) -> dict[str, Tensor]:
        """The finished gradient of every parameter, by name."""
        return {
            name: parameter.main_grad.detach().float().clone()
            for name, parameter in self.inner.named_parameters()
        }


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative difference of a parameter's gradient, in the Euclidean norm.

    Relative to the parameter's own gradient, or to a hundredth of the largest one if that is more:
    the gradient of a key's bias, say, is zero but for rounding.
    """
    least = 0.01 * max(float(reference.norm()) for reference in expected.values())
    worst = 0.0
    for name, reference in expected.items():
        error = float((found[name] - reference).norm()) / max(float(reference.norm()), least)
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def total_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative difference of all gradients together, in the Euclidean norm."""
    wrong = sum(float((found[name] - right).square().sum()) for name, right in expected.items())
    return math.sqrt(wrong / sum(float(right.square().sum()) for right in expected.values()))


def tiled_loss(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor, labels: Tensor, **_: Any
) -> Tensor:
    """Megatron's vocabulary-parallel cross entropy, some rows of every rank at a time.

    The best a baseline can do: neither logits nor hidden states of all tokens exist, forward or
    backward. An ``output_processor`` of Megatron's GPT model.
    """
    weight = output_layer.weight if output_weight is None else output_weight
    return _TiledLoss.apply(hidden_states, weight, labels, output_layer.sequence_parallel)


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, split: bool) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.split = split
        losses = torch.empty(labels.shape, dtype=torch.float32)
        for rows in hidden.split(TILE_ROWS):
            start = rows.storage_offset() // hidden.stride(0)
            own, at = _tile_labels(labels, hidden, start, len(rows), split)
            losses[:, at] = _tile(rows, weight, own, split)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        gradient = torch.empty_like(hidden)
        total = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), TILE_ROWS):
            rows = hidden[start : start + TILE_ROWS].detach().requires_grad_()
            shard = weight.detach().requires_grad_()
            own, at = _tile_labels(labels, hidden, start, len(rows), ctx.split)
            with torch.enable_grad():
                losses = _tile(rows, shard, own, ctx.split)
            parts = torch.autograd.grad(losses, (rows, shard), out_gradient[:, at])
            gradient[start : start + TILE_ROWS] = parts[0]
            total += parts[1]
        return gradient, total.to(weight.dtype), None, None


def _tile(rows: Tensor, weight: Tensor, labels: Tensor, split: bool) -> Tensor:
    if split:
        whole = gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=True)
    else:
        whole = copy_to_tensor_model_parallel_region(rows)
    losses = vocab_parallel_cross_entropy(linear(whole, weight).float(), labels.t().contiguous())
    return losses.t()


def _tile_labels(
    labels: Tensor, hidden: Tensor, start: int, count: int, split: bool
) -> tuple[Tensor, Tensor]:
    """Labels of the rows ``start ..`` of every rank, and their positions in the sequence."""
    ranks = parallel_state.get_tensor_model_parallel_world_size() if split else 1
    at = torch.cat([torch.arange(start, start + count) + r * len(hidden) for r in range(ranks)])
    return labels[:, at], at
