"""Runs a training run inside the ranks and records what it computes, in global coordinates.

The run is the real one, Megatron's ``pretrain`` with this package's entry point; only its weights
and its data are replaced by reproducible ones. Recorded on every rank: outputs of modules in the
first step, the loss of each step, every gradient of the first step (before clipping, after all
reductions), every parameter after the last step.
"""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..gpt_training import GPTTraining, tokens_of_this_rank
from ..sequence_padding import sample_length
from ..token_layout import zigzag_tokens
from .pieces import Piece, fill_parameters, parameter_pieces

# Modules of which a pipeline stage has a part: their output is another thing on each stage.
_SPREAD_OVER_STAGES = ("", "module", "decoder")
# Modules whose output columns are split over the tensor-parallel ranks.
_COLUMN_PARALLEL = ("output_layer", "core_attention")


@dataclass(frozen=True)
class OutputPiece:
    """Part of a module's output: rows are tokens, at ``positions`` of sample ``sample``.

    ``data`` is ``[rows, columns]``; its columns start at ``column`` of the whole. ``order`` is the
    module's place in the run: pipeline stage, then when its output was there first.
    """

    module: str
    order: tuple[int, int]
    sample: int
    positions: Tensor
    column: int
    data: Tensor


@dataclass
class Capture:
    """What one rank recorded."""

    outputs: list[OutputPiece] = field(default_factory=list)
    # Step, tensor-parallel rank, sum of the losses of a micro-batch, tokens in it.
    losses: list[tuple[int, int, float, int]] = field(default_factory=list)
    gradients: list[Piece] = field(default_factory=list)
    parameters: list[Piece] = field(default_factory=list)


def capture_run(argv: Sequence[str], seed: int, masked: bool) -> Capture:
    """Runs the entry point with this command line and returns this rank's record.

    Args:
        seed: of the random tokens.
        masked: leave one token in ten out of the loss, at random.
    """
    from .. import compat
    from ..arguments import extra_arguments
    from ..config import LongSeqTransformerConfig
    from ..layer_specs import longseq_layer_spec

    sys.argv = ["pretrain_gpt.py", *argv]
    args = compat.parse_and_validate(extra_arguments())
    config = compat.model_config(args, LongSeqTransformerConfig, longseq_layer_spec)
    run = CapturedTraining(args, seed, masked)
    config.pre_wrap_hooks.append(run.before_wrapping)
    config.post_wrap_hooks.append(run.after_wrapping)
    handle = register_optimizer_step_pre_hook(run.before_optimizer_step)
    try:
        with run:
            compat.pretrain(args, config, run.datasets, run.forward_step)
    finally:
        handle.remove()
    run.finish()
    return run.capture


class CapturedTraining(GPTTraining):
    """The training job with reproducible weights and data, and a record."""

    def __init__(self, args: Any, seed: int, masked: bool) -> None:
        super().__init__(args)
        self.capture = Capture()
        self._seed = seed
        self._masked = masked
        self._models: list[torch.nn.Module] = []
        self._gradient_buffers: list[Tensor] = []
        self._handles: list[Any] = []
        self._micro_batches = [0]
        self._current_batch = 0
        self._module_order: dict[str, tuple[int, int]] = {}
        self._recorded: Counter[tuple[str, int]] = Counter()

    # --- hooks of Megatron's model config -----------------------------------------------------

    def before_wrapping(self, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Fills the weights (before the optimizer copies them) and listens to the modules.

        Raises:
            RuntimeError: layers are missing; what is missing on both sides would compare as equal.
        """
        built = torch.tensor(sum(len(model.decoder.layers) for model in models))
        dist.all_reduce(built, group=mpu.get_pipeline_model_parallel_group())
        if int(built) != self.args.num_layers:
            raise RuntimeError(
                f"the model was built with {int(built)} of {self.args.num_layers} layers"
            )
        fill_parameters(
            models,
            std=self.args.init_method_std,
            norm_weight=0.0 if models[0].config.layernorm_zero_centered_gamma else 1.0,
        )
        self._micro_batches = [0] * len(models)
        for chunk, model in enumerate(models):
            for name, module in model.named_modules():
                # A column-parallel linear layer's output is split in an order of its own.
                split = "ColumnParallel" in type(module).__name__ and name != "output_layer"
                if name in _SPREAD_OVER_STAGES or split:
                    continue
                hook = self._output_hook(chunk, global_module_name(model, name))
                self._handles.append(module.register_forward_hook(hook))
        return models

    def after_wrapping(self, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Keeps the wrapped chunks, whose buffers hold the gradients."""
        self._models = models
        return models

    def before_optimizer_step(self, _optimizer, _args, _kwargs) -> None:
        """Copies the gradient buffers of the first step; the collectives wait for the end."""
        if not self._gradient_buffers:
            self._gradient_buffers = [b.grad_data.clone() for b in self._buffers()]
            self._stop_listening()

    def finish(self) -> None:
        """After the run: puts gradients together over the optimizer's shards, reads parameters."""
        buffers = self._buffers()
        captured = self._gradient_buffers or [torch.zeros_like(b.grad_data) for b in buffers]
        values: dict[torch.nn.Parameter, Tensor] = {}
        for buffer, gradients in zip(buffers, captured, strict=True):
            if self.args.use_distributed_optimizer:
                _gather_shards(buffer, gradients)
            for parameter, (start, end, _) in buffer.param_index_map.items():
                values[parameter] = gradients[start:end].view(parameter.shape)

        def gradient_of(parameter: torch.nn.Parameter) -> Tensor:
            return values.get(parameter, torch.zeros_like(parameter)).detach().double()

        def value_of(parameter: torch.nn.Parameter) -> Tensor:
            return parameter.detach().double()

        self.capture.gradients = list(parameter_pieces(self._models, gradient_of))
        self.capture.parameters = list(parameter_pieces(self._models, value_of))

    # --- the training job ---------------------------------------------------------------------

    def datasets(self, sample_counts: list[int], vp_stage: int | None = None):
        """Random tokens: sample i is the same in every layout."""
        if mpu.get_tensor_model_parallel_rank() != 0 or not self._reads_data(vp_stage):
            return None, None, None
        return RandomTokens(self.args, sample_counts[0], self._seed, self._masked), None, None

    def forward_step(self, data_iterator, model):
        chunk = self._chunk_of(model)
        self._current_batch = self._micro_batches[chunk]
        self._micro_batches[chunk] += 1
        return super().forward_step(data_iterator, model)

    def _loss(self, loss_mask: Tensor, training: bool, losses: Tensor):
        result = super()._loss(loss_mask, training, losses)
        rank = mpu.get_tensor_model_parallel_rank()
        total, count = result[2]["lm loss"].tolist()  # of this rank, whatever it is divided by
        record = (self.args.curr_iteration, rank, total, int(count))
        self.capture.losses.append(record)
        return result

    # --- outputs ------------------------------------------------------------------------------

    def _output_hook(self, chunk: int, name: str):
        stages = mpu.get_pipeline_model_parallel_world_size()
        stage = chunk * stages + mpu.get_pipeline_model_parallel_rank()

        def hook(module: torch.nn.Module, _inputs, output) -> None:
            tensor = output[0] if isinstance(output, tuple) and output else output
            if not isinstance(tensor, Tensor) or tensor.dim() != 3:
                return
            if tensor.shape[1] != self.args.micro_batch_size:
                return
            self._record_output(name, stage, tensor.detach())

        return hook

    def _record_output(self, name: str, stage: int, tensor: Tensor) -> None:
        """Records ``[rows, b, columns]`` if its rows are this rank's tokens."""
        args = self.args
        column, width = 0, args.hidden_size
        sequence_parallel = args.sequence_parallel
        if name.endswith(_COLUMN_PARALLEL):
            # Logits, or the output of some heads: all tokens of this context-parallel rank, and
            # a part of the columns.
            sequence_parallel = False
            column, width = mpu.get_tensor_model_parallel_rank() * tensor.shape[2], tensor.shape[2]
        chunks = local_positions(args, sequence_parallel=sequence_parallel)
        if tensor.shape[2] != width or tensor.shape[0] != len(chunks[0]):
            return
        order = self._module_order.setdefault(name, (stage, len(self._module_order)))
        for row in range(args.micro_batch_size):
            sample = self._sample(row)
            chunk = self._recorded[name, sample]
            if chunk == len(chunks):
                continue  # a recomputation in backward runs the module again
            self._recorded[name, sample] += 1
            real = chunks[chunk] < sample_length(args)
            positions, data = chunks[chunk][real], tensor[real, row].double()
            self.capture.outputs.append(OutputPiece(name, order, sample, positions, column, data))

    def _sample(self, row: int) -> int:
        """Global index of a row of the current micro-batch: Megatron's sampler deals them out."""
        replicas = mpu.get_data_parallel_world_size()
        block = self._current_batch * replicas + mpu.get_data_parallel_rank()
        return block * self.args.micro_batch_size + row

    def _stop_listening(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _buffers(self) -> list[Any]:
        return [
            buffer
            for model in self._models
            for buffer in [*model.buffers, *model.expert_parallel_buffers]
        ]

    def _chunk_of(self, model: torch.nn.Module) -> int:
        return next(i for i, chunk in enumerate(self._models) if chunk is model)


class RandomTokens(torch.utils.data.Dataset):
    """Samples of uniformly random tokens, each a function of the seed and its index alone."""

    def __init__(self, args: Any, count: int, seed: int, masked: bool) -> None:
        self._args = args
        self._count = count
        self._seed = seed
        self._masked = masked

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = sample_length(self._args)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        vocabulary = self._args.vocab_size or self._args.padded_vocab_size
        text = torch.randint(0, vocabulary, (length + 1,), generator=generator)
        mask = torch.ones(length)
        if self._masked:
            mask[torch.rand(length, generator=generator) < 0.1] = 0.0
        return {
            "tokens": text[:-1].contiguous(),
            "labels": text[1:].contiguous(),
            "loss_mask": mask,
            "position_ids": torch.arange(length),
        }


def local_positions(args: Any, *, sequence_parallel: bool) -> list[Tensor]:
    """Positions in the sequence of the rows of a hidden state on this rank, chunk by chunk.

    Asks the function that cuts the batches for the context-parallel part. One chunk without
    ``--longseq-sequence-chunks``.
    """
    whole = {"position_ids": torch.arange(args.seq_length)[None]}
    chunks = tokens_of_this_rank(args, whole)["position_ids"][0].chunk(args.longseq_sequence_chunks)
    ranks, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    if args.longseq_tensor_parallel == "metp":
        (positions,) = chunks
        order = [zigzag_tokens(each, ranks, len(positions)) for each in range(ranks)]
        return [positions[order[rank] if sequence_parallel else torch.cat(order)]]
    return [chunk.chunk(ranks)[rank] if sequence_parallel else chunk for chunk in chunks]


def global_module_name(model: torch.nn.Module, name: str) -> str:
    """The module's name with the layer's place in the whole model instead of in this stage."""
    match = re.match(r"(.*\blayers)\.(\d+)(.*)", name)
    if match is None:
        return name
    layer = model.get_submodule(f"{match[1]}.{match[2]}")
    if not isinstance(layer, TransformerLayer):
        return name
    return f"{match[1]}.{layer.layer_number - 1}{match[3]}"


def _gather_shards(buffer: Any, gradients: Tensor) -> None:
    """Each replica holds the reduced gradients of its own shard of every bucket: gather them."""
    group = buffer.data_parallel_group
    for bucket in buffer.buckets:
        length = bucket.grad_data.numel()
        part = gradients[bucket.offset : bucket.offset + length]
        shards = list(part.clone().chunk(group.size()))
        dist.all_gather(shards, shards[group.rank()].clone(), group=group)
        part.copy_(torch.cat(shards))
