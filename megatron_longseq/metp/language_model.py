"""METP outside the layers: order of tokens, embedding and loss of Megatron's GPT model.

Megatron builds the embedding and the output layer itself, where no layer spec reaches. So the class
of the built instance is exchanged for a subclass that overrides ``forward`` alone: parameters,
names and checkpoints stay. The data path stays too: tokens, labels and losses are in natural order
outside of the model.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from torch import Tensor

from ..errors import UserError
from .embedding import ring_embedding
from .runtime import MetpRuntime
from .vocab_loss import ring_cross_entropy


class InstallMetp:
    """A ``pre_wrap_hook`` of Megatron's model config: fits the built chunks of a model for METP.

    Equal to another with the same runtime, so that it is told apart from what stands there already.
    """

    def __init__(self, runtime: MetpRuntime) -> None:
        self.runtime = runtime

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InstallMetp) and other.runtime is self.runtime

    def __hash__(self) -> int:
        return id(self.runtime)

    def __call__(self, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        for model in models:
            install(model, self.runtime)
        return models


def install(model: torch.nn.Module, runtime: MetpRuntime) -> None:
    """Exchanges the embedding and the output layer of one chunk, before anything wraps it.

    Raises:
        UserError: the model is not Megatron's GPT model, or its embedding or output layer is of
            another class than those of which METP has a counterpart.
    """
    if not isinstance(model, GPTModel):
        raise UserError(
            f"--longseq-tensor-parallel metp: the model is a {type(model).__name__}; it knows "
            "Megatron's GPTModel"
        )
    if model.position_embedding_type == "mrope":
        raise UserError(
            "--longseq-tensor-parallel metp: position embeddings of the type mrope; it knows rope, "
            "yarn, learned_absolute and none"
        )
    if model.pre_process:
        _exchange(model.embedding, LanguageModelEmbedding, METPEmbedding, runtime)
        if not model.embedding.scatter_to_sequence_parallel:
            raise UserError(
                "--longseq-tensor-parallel metp: the model leaves it to others to split its "
                "embedded tokens, and they would not split them as METP does; build it with "
                "scatter_embedding_sequence_parallel=True"
            )
        words = model.embedding.word_embeddings
        _exchange(words, VocabParallelEmbedding, RingVocabEmbedding, runtime)
        if model.embedding.add_position_embedding:
            # Each rank now adds the positions of its own tokens: Megatron sums what it marks so.
            position = model.embedding.position_embeddings.weight
            position.sequence_parallel = True  # type: ignore[attr-defined]
    if model.post_process:
        _exchange(model.output_layer, ColumnParallelLinear, RingOutputLayer, runtime)
        model.register_forward_pre_hook(_ask_for_loss, with_kwargs=True)
    model.register_forward_pre_hook(_refuse_inputs, with_kwargs=True)
    if model.pre_process:  # once a micro-batch, however many chunks a pipeline has
        model.register_forward_pre_hook(_CountMicroBatches(runtime), with_kwargs=True)


def _exchange(
    module: torch.nn.Module, expected: type, replacement: type, runtime: MetpRuntime
) -> None:
    if type(module) is not expected:
        raise UserError(
            f"--longseq-tensor-parallel metp: the model has a {type(module).__name__} where it "
            f"knows {expected.__name__}"
        )
    module.__class__ = replacement  # type: ignore[assignment]
    object.__setattr__(module, "metp_runtime", runtime)


class RingVocabEmbedding(VocabParallelEmbedding):
    """Megatron's split word embedding, looked up by :func:`.embedding.ring_embedding`."""

    metp_runtime: MetpRuntime

    def forward(self, input_: Tensor) -> Tensor:
        """``[b, s / p]`` tokens of this rank to ``[s / p, b, h]``."""
        return ring_embedding(
            input_.t(),
            self.weight,
            ring=self.metp_runtime.vocabulary_ring,
            fused_gradients=self.config.gradient_accumulation_fusion,
        )


class METPEmbedding(LanguageModelEmbedding):
    """Megatron's embedding of this rank's tokens alone; dropout as under sequence parallelism."""

    metp_runtime: MetpRuntime

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, tokentype_ids: Tensor | None = None
    ) -> Tensor:
        """``[b, s]`` in natural order to ``[s / p, b, h]`` of this rank's tokens."""
        if tokentype_ids is not None:
            raise UserError("--longseq-tensor-parallel metp: token types are not supported")
        own = self.metp_runtime.positions(input_ids.shape[1], input_ids.device)
        embeddings = self.word_embeddings(input_ids[:, own])
        if self.add_position_embedding:
            positions = self.position_embeddings(position_ids[:, own])
            embeddings = embeddings + positions.transpose(0, 1)
        if self.config.fp32_residual_connection:
            embeddings = embeddings.float()
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return self.embedding_dropout(embeddings)


class RingOutputLayer(ColumnParallelLinear):
    """Megatron's output layer, which also computes the loss, by :mod:`.vocab_loss`."""

    metp_runtime: MetpRuntime

    def forward(  # type: ignore[override]
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """With labels ``[b, s]`` the losses ``[b, s]``; without, Megatron's logits ``[s, b, ..]``.

        Both are in natural order. Returned with a bias of None, as Megatron's layer does.
        """
        runtime = self.metp_runtime
        if labels is None:
            logits, bias = super().forward(input_, weight, runtime_gather_output)
            return logits[runtime.natural(logits.shape[0], logits.device)], bias
        losses = ring_cross_entropy(
            input_,
            self.weight if weight is None else weight,
            labels,
            runtime.order(labels.shape[1], labels.device),
            ring=runtime.vocabulary_ring,
            fused_gradients=self.gradient_accumulation_fusion,
        )
        return losses, None


class _CountMicroBatches:
    """A forward hook of a first chunk: tells the runtime of every training micro-batch."""

    def __init__(self, runtime: MetpRuntime) -> None:
        self.runtime = runtime

    def __call__(self, model: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        tokens = args[0] if args else kwargs.get("input_ids")
        if model.training and torch.is_grad_enabled() and tokens is not None:
            self.runtime.count(tokens.numel())


# Inputs of the model, by their place in its signature, that METP does not know: they belong to
# tokens in natural order, or to a model that does not train.
_REFUSED_INPUTS = {
    "decoder_input": 3,
    "inference_context": 5,
    "packed_seq_params": 6,
    "inference_params": None,
    "padding_mask": None,
}


def _refuse_inputs(model: torch.nn.Module, args: tuple, kwargs: dict) -> None:
    for name, place in _REFUSED_INPUTS.items():
        value = args[place] if place is not None and len(args) > place else kwargs.get(name)
        if value is not None:
            raise UserError(
                f"--longseq-tensor-parallel metp: the model was given {name}, which METP does not "
                "know; use --longseq-tensor-parallel megatron, which reads the same checkpoints"
            )


def _ask_for_loss(model: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Hands hidden states and labels to the output layer before any logits exist."""
    if kwargs.get("output_processor") is not None:
        raise UserError(
            "--longseq-tensor-parallel metp: its loss takes the place of an output_processor, and "
            "the model was given another one; leave one of the two out"
        )
    labels = args[4] if len(args) > 4 else kwargs.get("labels")
    if labels is None:
        return args, kwargs
    return args, {**kwargs, "output_processor": _ring_loss}


def _ring_loss(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Any, labels: Tensor, **_: Any
) -> Tensor:
    losses, _ = output_layer(hidden_states, weight=output_weight, labels=labels)
    return losses
