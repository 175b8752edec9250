"""The kernel of plain torch: chunks of 64 tokens, any kind of gate, any dtype and device.

A pass goes through the tiles of :mod:`.tiles` in order of time or against it and carries one state
per segment and head. A backward pass first goes forward, to know the state before each tile, so
nothing but the inputs and the incoming states has to be kept for it. Formulas: in :mod:`.rules`,
:mod:`.decay`, and ``docs/lasp-operator.md``.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..recurrence import Affine
from ..segments import Gradients, Segments
from .decay import rows
from .rules import InputGradients, rule_of
from .tiles import Tile, identity_transition, tiles


class TorchKernel:
    """A :class:`~..chunk_kernels.ChunkKernel` in plain torch.

    Args:
        chunk: tokens of a chunk. Inside a chunk all pairs of tokens are looked at.
        chunks: of a tile, which bounds what exists in fp32 at a time.
    """

    name = "torch"

    def __init__(self, chunk: int = 64, chunks: int = 16) -> None:
        self._chunk = chunk
        self._chunks = chunks

    def unusable(self, segments: Segments) -> str | None:
        """``None``: it can always be used."""
        return None

    def summary(self, segments: Segments) -> tuple[Affine, ...]:
        """The map of each segment; see :class:`~..chunk_kernels.ChunkKernel`."""
        transition, state = identity_transition(segments), _zero_states(segments)
        for tile in self._long_tiles(segments):
            rule = rule_of(tile)
            transition = rule.transition(transition)
            state = rule.after(state)
        return _pairs(segments, transition, state)

    def intra(
        self, segments: Segments, *, dtype: torch.dtype, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The output from a given state, or from zero; and the states after the segments."""
        out = _like_out(segments, dtype)
        carried = _entering(segments, state)
        for tile in self._tiles(segments):
            states, written, carried = rule_of(tile).advance(carried)
            assert written is not None
            out[:, :, tile.tokens] = tile.store(
                (tile.read_query @ states).add_(tile.scores @ written), segments.out_heads
            )
        return out, carried.view(segments.state_shape)

    def apply(self, segments: Segments, out: Tensor, state: Tensor) -> None:
        """Adds to ``out`` what the tokens read of the incoming state."""
        carried = _entering(segments, state)
        for tile in self._long_tiles(segments):
            states, written, carried = rule_of(tile).advance(carried, values=False)
            read = tile.read_query @ states
            if written is not None:
                read += tile.scores @ written
            out[:, :, tile.tokens] += tile.store(read, segments.out_heads)

    def d_summary(self, segments: Segments, out_gradient: Tensor) -> tuple[Affine, ...]:
        """The map of each segment for the scan in reverse."""
        transition, gradient = identity_transition(segments), _zero_states(segments)
        for tile in self._long_tiles(segments, reverse=True):
            rule, dout = rule_of(tile), tile.load(out_gradient)
            transition = rule.transposed_transition(transition)
            written = tile.scores.mT @ dout if segments.beta is not None else None
            gradient = rule.before(gradient, tile.read_query.mT @ dout, written)
        return _pairs(segments, transition, gradient)

    def d_intra(
        self,
        segments: Segments,
        out_gradient: Tensor,
        state: Tensor | None,
        *,
        dtype: torch.dtype,
        state_gradient: Tensor | None = None,
        gates: bool = True,
    ) -> Gradients:
        """All gradients, of the outputs and of the states after the segments."""
        result = _empty_gradients(segments, dtype, gates)
        self._backward(segments, result, out_gradient, state, state_gradient)
        return result

    def d_apply(
        self,
        segments: Segments,
        gradients: Gradients,
        state: Tensor | None,
        state_gradient: Tensor,
    ) -> None:
        """Adds to ``gradients`` the share of the states after the segments."""
        if segments.beta is None and gradients.log_decay is None:
            self._add_written(segments, gradients, state_gradient)
        else:
            self._backward(segments, gradients, None, state, state_gradient)

    def _add_written(self, segments: Segments, result: Gradients, state_gradient: Tensor) -> None:
        """Where states add up and no decay learns, what a token wrote needs no state before it."""
        gradient = _entering(segments, state_gradient)
        for tile in self._long_tiles(segments, reverse=True):
            rule = rule_of(tile)
            dstates, dwritten, gradient = rule.retreat(gradient, None, None)
            inputs = rule.input_gradients(None, None, dstates, dwritten)
            _give_input_gradients(tile, result, None, inputs)
        result.state += gradient.view(segments.state_shape)

    def _tiles(self, segments: Segments, *, reverse: bool = False) -> Iterator[Tile]:
        return tiles(segments, self._chunk, self._chunks, reverse=reverse)

    def _long_tiles(self, segments: Segments, *, reverse: bool = False) -> Iterator[Tile]:
        """The same tiles, as one chunk each where only states at their ends are asked for.

        Not where a chunk is looked at pair by pair, or its decays per channel would add up far.
        """
        whole = segments.beta is None and not segments.per_channel
        return tiles(segments, self._chunk, self._chunks, reverse=reverse, whole=whole)

    def _backward(
        self,
        segments: Segments,
        result: Gradients,
        out_gradient: Tensor | None,
        state: Tensor | None,
        state_gradient: Tensor | None,
    ) -> None:
        """The gradients of outputs and outgoing states; without those of outputs, added."""
        entering = []
        carried = _entering(segments, state)
        for tile in self._long_tiles(segments):
            entering.append(carried)
            # What follows the last tile, its own pass finds out.
            if tile.tokens.stop < segments.key.shape[2]:
                carried = rule_of(tile).after(carried)
        gradient = _entering(segments, state_gradient)
        for tile in self._tiles(segments, reverse=True):
            gradient = _tile_backward(tile, result, out_gradient, entering.pop(), gradient)
        result.state += gradient.view(segments.state_shape)


def _tile_backward(
    tile: Tile, result: Gradients, out_gradient: Tensor | None, state: Tensor, gradient: Tensor
) -> Tensor:
    """Gives one tile's gradients to ``result``; returns that of the state before the tile.

    Args:
        out_gradient: ``[b, m, n, ho, e]``; ``None``: only add the share of the outgoing state.
        state: before the tile; gradient: of the state after it.
    """
    rule = rule_of(tile)
    states, written, after = rule.advance(state)
    assert written is not None
    reads = dwritten = dquery = key_scores = None
    if out_gradient is not None:
        dout = tile.load(out_gradient)
        reads, dwritten = tile.read_query.mT @ dout, tile.scores.mT @ dout
        dquery, key_scores = tile.decay.pairs_gradient(dout @ written.mT, tile.query, tile.key)
        dquery.addcmul_(rows(tile.decay.from_start, tile.repeats), dout @ states.mT)
    dstates, dwritten, gradient = rule.retreat(gradient, reads, dwritten)
    inputs = rule.input_gradients(states, written, dstates, dwritten)
    if key_scores is not None:
        inputs.key_written += key_scores
    if result.log_decay is not None:
        states_after = torch.cat((states[:, :, 1:], after.unsqueeze(2)), 2)
        _add_gate_gradient(tile, result.log_decay, dquery, inputs, states_after, dstates)
    _give_input_gradients(tile, result, dquery, inputs)
    return gradient


def _add_gate_gradient(
    tile: Tile,
    result: Tensor,
    dquery: Tensor | None,
    inputs: InputGradients,
    states_after: Tensor,
    dstates: Tensor,
) -> None:
    """The decay's: +x dx where it enters as exp(b), -x dx as exp(-b), and the boundary term."""
    product = -(tile.key * inputs.key_written)
    if inputs.key_read is not None:
        product += tile.key * inputs.key_read
    if dquery is not None:
        product += (tile.query * dquery).unflatten(-2, (tile.repeats, tile.chunk)).sum(-3)
    gradient = tile.decay.per_gate(product)
    # <S_out, dS_out> of the chunk belongs to its last token.
    boundary = (states_after * dstates).sum(-1).unsqueeze(-2)
    gradient[..., -1:, :] += tile.decay.per_gate(boundary)
    gate = tile.decay.gate_gradient(gradient)
    segments = tile.segments
    if result.dim() == 1:
        result += gate.sum((0, 2, 3, 4))
        return
    stored = tile.store(gate, segments.state_heads)
    result[:, :, tile.tokens] += stored if segments.per_channel else stored.squeeze(-1)


def _give_input_gradients(
    tile: Tile, result: Gradients, dquery: Tensor | None, inputs: InputGradients
) -> None:
    """Sets the tile's gradients, or adds to them where there is none of the query."""
    segments = tile.segments

    def give(target: Tensor, gradient: Tensor, heads: int) -> None:
        part = target[:, :, tile.tokens]
        stored = tile.store(gradient, heads).reshape(part.shape)
        if dquery is None:
            part += stored
        else:
            part.copy_(stored)

    if dquery is not None:
        if segments.scale != 1:
            dquery *= segments.scale
        give(result.query, dquery, segments.query.shape[3])
    dkey = inputs.key_written
    if inputs.key_read is not None:
        dkey += inputs.key_read
    give(result.key, dkey, segments.key.shape[3])
    give(result.value, inputs.value, segments.value.shape[3])
    if result.beta is not None and inputs.beta is not None:
        give(result.beta, inputs.beta, segments.state_heads)


def _zero_states(segments: Segments) -> Tensor:
    batch, count, *rest = segments.state_shape
    return segments.key.new_zeros(batch * count, *rest, dtype=segments.state_dtype)


def _entering(segments: Segments, state: Tensor | None) -> Tensor:
    """``[b, m, h, d, e]`` as tiles carry it, ``[bm, h, d, e]``; zero if there is none."""
    return _zero_states(segments) if state is None else state.flatten(0, 1)


def _like_out(segments: Segments, dtype: torch.dtype) -> Tensor:
    batch, count, tokens = segments.key.shape[:3]
    shape = batch, count, tokens, segments.out_heads, segments.value.shape[4]
    return segments.key.new_empty(shape, dtype=dtype)


def _empty_gradients(segments: Segments, dtype: torch.dtype, gates: bool) -> Gradients:
    def empty(tensor: Tensor, dtype: torch.dtype = segments.state_dtype) -> Tensor:
        return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)

    log_decay, beta = segments.log_decay, segments.beta
    return Gradients(
        query=empty(segments.query, dtype),
        key=empty(segments.key, dtype),
        value=empty(segments.value, dtype),
        log_decay=None if log_decay is None or not gates else empty(log_decay).zero_(),
        beta=None if beta is None else empty(beta),
        state=_zero_states(segments).view(segments.state_shape),
    )


def _pairs(segments: Segments, transition: Tensor, state: Tensor) -> tuple[Affine, ...]:
    """The pair of each segment from A ``[1 or bm, h, ..]`` and X ``[bm, h, d, e]``."""
    batch, count = segments.key.shape[:2]
    transition = transition.expand(-1, segments.state_heads, *transition.shape[2:])
    if transition.shape[0] == 1:
        transitions = [transition] * count
    else:
        transitions = list(transition.unflatten(0, (batch, count)).unbind(1))
    states = state.view(segments.state_shape).unbind(1)
    return tuple(Affine(a, x) for a, x in zip(transitions, states, strict=True))
