"""Sequence accumulation: a sequence goes through the model chunk by chunk, states carried across.

    forward     for chunk 0, 1, ..: losses of the chunk from the states that the last one left;
                nothing is kept but the states between chunks
    backward    for the last chunk, .., 0: its forward again, from its states; its gradients; the
                gradients of its states go to the chunk before

Memory of activations is that of one chunk, whatever the length; the gradients are those of the
whole sequence. It costs one more forward, as full recompute does.

The loop stands in the model's ``forward``, so that data parallelism, the distributed optimizer and
the training loop see one micro-batch. A parameter's gradient adds up over the chunks in fp32 (fp64
for fp64) and reaches ``.grad`` once.

Source: Sun et al., "Sequence Accumulation and Beyond: Infinite Context Length on Single GPU and
Large Clusters" (AAAI 2025).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..communication.collectives import Collectives
from ..communication.ring import accumulation_dtype
from ..errors import UserError
from .runtime import LinearRuntime, LinearState, Passage, follow_positions

# Inputs of Megatron's model with a row of tokens along dimension 1, by their place in its
# signature. The loop cuts these, hands `attention_mask` on as it is, and refuses all others.
_CUT = {"input_ids": 0, "position_ids": 1, "labels": 4, "loss_mask": None}
_PASSED = {"attention_mask": 2}
_NAMES = (
    "input_ids",
    "position_ids",
    "attention_mask",
    "decoder_input",
    "labels",
    "inference_context",
    "packed_seq_params",
    "extra_block_kwargs",
    "runtime_gather_output",
)


class InstallSequenceChunks:
    """A ``pre_wrap_hook`` of Megatron's model config: makes built models loop over chunks.

    Equal to another with the same runtime, so that it is told apart from what stands there already.

    Args:
        runtime: of the model's linear layers.
        chunks: of a sequence.
    """

    def __init__(self, runtime: LinearRuntime, chunks: int) -> None:
        self.runtime = runtime
        self.chunks = chunks

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InstallSequenceChunks) and other.runtime is self.runtime

    def __hash__(self) -> int:
        return id(self.runtime)

    def __call__(self, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        for model in models:
            if type(model) is not GPTModel:
                raise UserError(
                    f"--longseq-sequence-chunks {self.chunks}: the model is a "
                    f"{type(model).__name__}; it knows Megatron's GPTModel"
                )
            # Parameters, names and checkpoints stay: the subclass overrides forward alone.
            model.__class__ = ChunkedGPTModel
            object.__setattr__(model, "sequence_chunks", SequenceChunks(self.runtime, self.chunks))
            follow_positions(model, self.runtime)
        return models


class ChunkedGPTModel(GPTModel):
    """Megatron's GPT model, whose forward goes through a sequence chunk by chunk."""

    sequence_chunks: "SequenceChunks"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Losses ``[b, n]`` of this rank's tokens, or logits ``[b, n, vocabulary]``, as stock.

        The tokens are in chunks, one after the other, each in this rank's order of its chunk.
        """
        given = dict(zip(_NAMES, args, strict=False)) | kwargs
        refused = {n for n, v in given.items() if v is not None} - {*_CUT, *_PASSED}
        if refused:
            raise UserError(
                f"--longseq-sequence-chunks: the model was given {', '.join(sorted(refused))}, "
                "which cannot be cut into chunks"
            )
        return self.sequence_chunks.run(super().forward, list(self.parameters()), given)


class SequenceChunks:
    """The loop over the chunks of a sequence. Collective wherever the layers are.

    Args:
        runtime: of the model's linear layers, which tell it their states.
        chunks: of a sequence.
    """

    def __init__(self, runtime: LinearRuntime, chunks: int) -> None:
        self.runtime = runtime
        self.chunks = chunks
        operator = runtime.operator
        # Where the first and the last token of a chunk are on one rank, that rank's gradient of a
        # state is needed nowhere else.
        self._apart = (
            operator.chain.holder(0)[0] != operator.chain.holder(operator.chain.length - 1)[0]
        )
        self._ranks = operator.place.size
        self._states = Collectives(
            operator.place, "gradients of states between chunks", runtime.timeout_seconds
        )

    def run(self, forward: Any, parameters: list[torch.nn.Parameter], given: dict) -> Tensor:
        """The model's output for all tokens; ``forward`` is that of one chunk.

        Args:
            forward: the model's, with ``given``'s names.
            parameters: that it reads.
            given: its inputs for all tokens.

        Raises:
            UserError: the tokens do not split into the chunks.
        """
        tokens = given["input_ids"].shape[1]
        if tokens % self.chunks:
            raise UserError(
                f"--longseq-sequence-chunks {self.chunks}: does not divide the {tokens} tokens of "
                "a rank"
            )
        cut = {
            name: value.chunk(self.chunks, 1)
            for name, value in given.items()
            if name in _CUT and value is not None
        }
        whole = {name: given.get(name) for name in _PASSED}
        inputs = [
            whole | {name: pieces[index] for name, pieces in cut.items()}
            for index in range(self.chunks)
        ]
        learned = [p for p in parameters if p.requires_grad]
        if torch.is_grad_enabled() and learned:
            return _Chunks.apply(self, forward, inputs, *learned)
        return torch.cat([out for out, _ in self.forward(forward, inputs)], 1)

    def forward(self, forward: Any, inputs: Sequence[dict]):
        """Yields the output of every chunk and the states that entered it, without gradients."""
        states: dict[int, LinearState] = {}
        for index, chunk in enumerate(inputs):
            entered = states
            with torch.no_grad():
                out, states = self.one(forward, chunk, index, entered)
            yield out, entered

    def one(
        self, forward: Any, chunk: dict, index: int, states: dict[int, LinearState]
    ) -> tuple[Tensor, dict[int, LinearState]]:
        """One chunk from the states before it: its output and the states after it."""
        first = index * chunk["input_ids"].shape[1] * self._ranks
        with self.runtime.carrying(Passage(states, first)) as passage:
            return forward(**chunk), passage.leaving

    def hand_back(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the states that entered a chunk, to the rank that made those states."""
        if not self._apart:
            return gradients
        return [g if g is None else self._states.broadcast(g.contiguous(), 0) for g in gradients]


class _Chunks(torch.autograd.Function):
    """``(loop, forward, inputs of each chunk, *parameters) -> output of all tokens``."""

    @staticmethod
    def forward(
        ctx: Any, loop: SequenceChunks, forward: Any, inputs: list[dict], *parameters: Tensor
    ) -> Tensor:
        outs, entered = zip(*loop.forward(forward, inputs), strict=True)
        ctx.loop, ctx.model_forward, ctx.inputs = loop, forward, inputs
        ctx.parameters = parameters
        # The same layers, in the same order, leave states at every chunk.
        ctx.layers = list(entered[-1])
        ctx.has_rows = [state.rows is not None for state in entered[-1].values()]
        ctx.entered = [len(_flat(states)) for states in entered]
        ctx.save_for_backward(*(t for states in entered for t in _flat(states)))
        ctx.sizes = [out.shape[1] for out in outs]
        return torch.cat(outs, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        loop, parameters = ctx.loop, ctx.parameters
        sums = _Sums(parameters)
        saved = list(ctx.saved_tensors)
        state_gradients: list[Tensor | None] = []  # of the states that leave a chunk
        inputs = zip(ctx.inputs, gradient.split(ctx.sizes, 1), ctx.entered, strict=True)
        for index, (chunk, out_gradient, count) in reversed(list(enumerate(inputs))):
            entering = [saved.pop().detach().requires_grad_() for _ in range(count)][::-1]
            states = _states(ctx.layers, ctx.has_rows, entering) if entering else {}
            with torch.enable_grad():
                out, leaving = loop.one(ctx.model_forward, chunk, index, states)
            # Of the last chunk nobody reads the states; a rank's copies have no gradient.
            followed = [
                (state, its)
                for state, its in zip(_flat(leaving), state_gradients, strict=False)
                if its is not None and state.requires_grad
            ]
            del leaving
            found = torch.autograd.grad(
                [out, *(state for state, _ in followed)],
                [*parameters, *entering],
                [out_gradient, *(its for _, its in followed)],
                allow_unused=True,
            )
            sums.add(found[: len(parameters)])
            state_gradients = loop.hand_back(list(found[len(parameters) :]))
            del out, followed, found
        return None, None, None, *sums.finished()


class _Sums:
    """Gradients of parameters, added up in fp32 (fp64 for fp64)."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, parts: Sequence[Tensor | None]) -> None:
        """Adds a part of each; ``None`` for a parameter that was not used."""
        for place, part in enumerate(parts):
            total = self._sums[place]
            if total is not None and part is not None:
                total += part
            elif part is not None:
                self._sums[place] = part.to(accumulation_dtype(part.dtype), copy=True)

    def finished(self) -> Iterator[Tensor | None]:
        """The sums in the parameters' dtypes; ``None`` for a parameter that was never used."""
        for total, parameter in zip(self._sums, self._parameters, strict=True):
            yield None if total is None else total.to(parameter.dtype)


def _flat(states: dict[int, LinearState]) -> list[Tensor]:
    return [tensor for state in states.values() for tensor in state if tensor is not None]


def _states(
    layers: list[int], has_rows: list[bool], tensors: Sequence[Tensor]
) -> dict[int, LinearState]:
    """The inverse of :func:`_flat`."""
    rest = iter(tensors)
    return {
        layer: LinearState(next(rest), next(rest) if rows else None)
        for layer, rows in zip(layers, has_rows, strict=True)
    }
