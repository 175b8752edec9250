"""What ``benchmarks/lasp_model.py`` compares: one GPT model under the ways to split a sequence.

Every contender is Megatron's GPT model, DDP with the distributed optimizer, Adam and schedule,
built from this package's layer specs; they differ by what flags would change. All start from the
same weights, whatever their layout. A micro-batch is one sequence, made whole on every rank and cut
for it as the entry point does.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron_step import FULL_RECOMPUTE, MegatronStep, start_groups
from torch import Tensor

from megatron_longseq.config import LongSeqTransformerConfig
from megatron_longseq.gpt_training import tokens_of_this_rank
from megatron_longseq.layer_specs import longseq_layer_spec
from megatron_longseq.model_builder import LongSeqGPTModelConfig
from megatron_longseq.verification.pieces import Piece, assemble, fill_parameters, parameter_pieces

Method = Literal["LASP", "TP+SP", "Ulysses", "ring attention"]
STD = 0.02


@dataclass(frozen=True)
class Shape:
    """Sizes of the model.

    Attributes:
        linear_attention: the preset of the linear models; softmax models have none.
        vocabulary: a multiple of the largest tensor-parallel size.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    linear_attention: str


@dataclass(frozen=True)
class Contender:
    """One way to train on a sequence that is split over all ranks.

    Attributes:
        method: ``LASP`` (linear attention over context-parallel ranks) and ``TP+SP`` (Megatron's
            tensor and sequence parallelism) compute the same linear model; ``Ulysses`` (2D
            attention, head-parallel alone) and ``ring attention`` (2D attention, ring alone) the
            softmax model of the same sizes.
        recompute: ``none``; ``full``, of every layer; ``chunks``, sequence accumulation, which
            computes every forward twice as well.
        chunk_tokens: of the whole sequence, for ``chunks``.
    """

    method: Method
    recompute: Literal["none", "full", "chunks"] = "none"
    chunk_tokens: int | None = None

    @property
    def name(self) -> str:
        recompute = {
            "none": "no recompute",
            "full": "full recompute",
            "chunks": f"chunks of {self.chunk_tokens} tokens",
        }
        return f"{self.method}, {recompute[self.recompute]}"

    def chunks(self, sequence: int) -> int:
        """Into how many chunks the sequence is cut."""
        return 1 if self.chunk_tokens is None else sequence // self.chunk_tokens

    def head_parallel(self, ranks: int) -> int | None:
        """Head-parallel size of 2D attention; ``None`` without it."""
        return {"Ulysses": ranks, "ring attention": 1}.get(self.method)


def start(contender: Contender, ranks: int) -> None:
    """Megatron's groups of one sequence over all ranks; ends what there was before."""
    if contender.method == "TP+SP":
        start_groups(tensor_model_parallel_size=ranks)
        return
    head_parallel = contender.head_parallel(ranks)
    start_groups(
        context_parallel_size=ranks,
        hierarchical_context_parallel_sizes=(
            None if head_parallel is None else [head_parallel, ranks // head_parallel]
        ),
    )


def model_config(
    contender: Contender, shape: Shape, *, sequence: int, dtype: torch.dtype
) -> LongSeqGPTModelConfig:
    """Megatron's config of the contender's model; needs :func:`start` before."""
    options: dict[str, Any] = {}
    if contender.recompute == "full":
        options = dict(FULL_RECOMPUTE)
    context = parallel_state.get_context_parallel_world_size()
    head_parallel = contender.head_parallel(context)
    if head_parallel is None:
        options |= {
            "longseq_linear_attention": shape.linear_attention,
            "longseq_sequence_chunks": contender.chunks(sequence),
        }
    else:
        options |= {
            "longseq_context_parallel": "2d",
            "longseq_head_parallel_size": head_parallel,
            "hierarchical_context_parallel_sizes": [head_parallel, context // head_parallel],
        }
    transformer = LongSeqTransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        ffn_hidden_size=shape.ffn,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=contender.method == "TP+SP",
        context_parallel_size=context,
        transformer_impl="local",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
        deallocate_pipeline_outputs=True,  # as Megatron's entry points have it
        **options,
    )
    return LongSeqGPTModelConfig(
        transformer=transformer,
        transformer_layer_spec=longseq_layer_spec,
        vocab_size=shape.vocabulary,
        seq_length=sequence,
        position_embedding_type="none",
    )


class LinearTraining(MegatronStep):
    """A contender's model with DDP and Adam, and one step of training it; after :func:`start`.

    Args:
        contender, shape: what to build.
        sequence: of the model; steps of a contender with chunks have this one.
        optimizer: leave it out where a step is not asked for.
    """

    def __init__(
        self,
        contender: Contender,
        shape: Shape,
        *,
        sequence: int,
        dtype: torch.dtype = torch.bfloat16,
        optimizer: bool = True,
    ) -> None:
        self.shape = shape
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = model_config(contender, shape, sequence=sequence, dtype=dtype)
        config.pre_wrap_hooks.append(_fill)
        # Sharded over all ranks that have the same weights: of what tensor parallelism has in
        # shards, context parallelism would otherwise hold a copy on each. Without an optimizer
        # every rank gets the whole gradients.
        super().__init__(config, optimizer=optimizer, distributed=optimizer)
        self._cut = Namespace(
            longseq_sequence_chunks=contender.chunks(sequence), longseq_linear_layout="zigzag"
        )

    def batch(self, sequence: int) -> tuple[Tensor, ...]:
        """This rank's tokens, positions, labels and loss mask ``[1, s / cp]`` of one sequence."""
        generator = torch.Generator().manual_seed(2)
        text = torch.randint(0, self.shape.vocabulary, (1, sequence + 1), generator=generator)
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        del text  # as of a data loader, a sequence takes 28 bytes per token
        whole = {
            "tokens": tokens,
            "position_ids": torch.arange(sequence)[None],
            "labels": labels,
            "loss_mask": torch.ones(1, sequence),
        }
        self._cut.seq_length = sequence
        part = tokens_of_this_rank(self._cut, whole)
        return tuple(part[name] for name in whole)

    def _forward_step(
        self, batches: Iterator[tuple[Tensor, ...]], model: torch.nn.Module
    ) -> tuple[Tensor, Callable]:
        tokens, positions, labels, mask = next(batches)
        losses = model(tokens, positions, None, labels=labels, loss_mask=mask)
        return losses, _mean_over_ranks

    def gradient_pieces(self) -> list[Piece]:
        """This rank's finished gradients in global coordinates."""
        return list(parameter_pieces([self.model], lambda p: p.main_grad.detach().double()))


def _fill(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """A ``pre_wrap_hook``: weights that depend on a parameter's name and global place alone."""
    fill_parameters(models, std=STD, norm_weight=1.0)
    return models


def _mean_over_ranks(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean over the sequence's tokens, of which every context-parallel rank has equally many.

    The schedule multiplies a loss by the number of these ranks, over which gradients are averaged.
    """
    group = parallel_state.get_context_parallel_group()
    own = losses.float().mean() / group.size()
    total = own.detach().clone()
    dist.all_reduce(total, group=group)
    return own, {"loss": total}


def loss_and_gradients(
    contender: Contender, shape: Shape, *, sequence: int, dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    """Loss of a step, and on rank 0 the whole gradient of every parameter; after :func:`start`."""
    training = LinearTraining(contender, shape, sequence=sequence, dtype=dtype, optimizer=False)
    loss = training.step(sequence)
    return loss, whole_gradients(training)


def whole_gradients(training: LinearTraining) -> dict[str, Tensor]:
    """On rank 0 the finished gradient of every parameter put together; empty on the others."""
    pieces: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, training.gradient_pieces())
    if dist.get_rank() != 0:
        return {}
    return assemble([piece for rank in pieces for piece in rank])
