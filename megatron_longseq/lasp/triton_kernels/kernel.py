"""The kernel of linear attention in Triton: sums of states with any decay, fused, on a GPU.

The chunkwise parallel form in four steps: what each chunk of 64 tokens writes (``K^T V``), the
decayed sum of it over chunks, one after another, in fp32, the triangle inside each chunk together
with what its tokens read of the state before it, and what they read of the state that came in once
it is there. Backward is the same with queries and output gradients in place of keys and values.

Nothing is kept between the calls: ``intra`` and ``d_intra`` write the states of chunks again.
"""

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..recurrence import Affine
from ..segments import Gradients, Segments
from .decay import Decay


class TritonKernel:
    """A :class:`~..chunk_kernels.ChunkKernel` of Triton kernels.

    Args:
        chunk: tokens of a chunk, 16, 32 or 64.
    """

    name = "triton"

    def __init__(self, chunk: int = 64) -> None:
        if chunk not in (16, 32, 64):
            raise ValueError(f"chunk {chunk}: there are 16, 32, 64")
        self._chunk = chunk

    def unusable(self, segments: Segments) -> str | None:
        """Why this kernel cannot work on such segments here; ``None`` if it can."""
        device, dtype = segments.query.device, segments.query.dtype
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        if segments.beta is not None:
            return "the delta rule has no Triton kernel"
        if _calls().interpreting():
            return None if device.type == "cpu" else f"Triton interprets, which is not for {device}"
        if device.type != "cuda":
            return f"Triton compiles for CUDA, not for {device.type}"
        if dtype == torch.float64:
            return "in fp64 it only runs interpreted"
        if device.index != torch.cuda.current_device():
            return (
                f"Triton works on the current GPU, {torch.cuda.current_device()}, not on {device}"
            )
        return None

    def summary(self, segments: Segments) -> tuple[Affine, ...]:
        """The map of each segment; see :class:`~..chunk_kernels.ChunkKernel`."""
        decay = self._decay(segments)
        return _pairs(segments, decay, self._states(segments, decay, None)[1])

    def intra(
        self,
        segments: Segments,
        *,
        dtype: torch.dtype,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output from a given state, or from zero; and the states after the segments."""
        decay = self._decay(segments)
        states, final = self._states(segments, decay, state)
        q, k, v = _folded(segments)
        out = _calls().intra(q, k, v, decay, states, scale=segments.scale, dtype=dtype)
        return out.unflatten(0, segments.key.shape[:2]), final.view(segments.state_shape)

    def apply(self, segments: Segments, out: Tensor, state: Tensor) -> None:
        """Adds to ``out`` what the tokens read of the incoming state."""
        _calls().add_read_state_(
            out.view(out.shape[0] * out.shape[1], *out.shape[2:]),
            segments.query.flatten(0, 1),
            state.flatten(0, 1),
            self._decay(segments),
            to_start=True,
            scale=segments.scale,
        )

    def d_summary(self, segments: Segments, out_gradient: Tensor) -> tuple[Affine, ...]:
        """The map of each segment for the scan in reverse."""
        decay = self._decay(segments)
        return _pairs(segments, decay, _state_gradients(segments, decay, out_gradient)[1])

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
        decay = self._decay(segments)
        states = self._states(segments, decay, state)[0]
        state_gradients, incoming = _state_gradients(segments, decay, out_gradient)
        q, k, v = _folded(segments)
        heads = segments.out_heads
        # What is yet to be added up over heads stays in the dtype of sums.
        dtypes = tuple(dtype if t.shape[2] == heads else segments.state_dtype for t in (q, k, v))
        dq, dk, dv, db = _calls().intra_backward(
            *(q, k, v, decay, out_gradient.flatten(0, 1), states, state_gradients),
            scale=segments.scale,
            dtypes=dtypes,
        )
        inputs = segments.query, segments.key, segments.value
        dq, dk, dv = (
            _over_heads(gradient, tensor.shape[3]).to(dtype).view(tensor.shape)
            for gradient, tensor in zip((dq, dk, dv), inputs, strict=True)
        )
        log_decay = None
        if segments.log_decay is not None and gates:
            db = _over_heads(db, segments.state_heads)
            log_decay = _gate_gradient(segments, decay.gate_gradient(db))
        result = Gradients(dq, dk, dv, log_decay, None, incoming.view(segments.state_shape))
        if state_gradient is not None:
            self.d_apply(segments, result, state, state_gradient)
        return result

    def d_apply(
        self,
        segments: Segments,
        gradients: Gradients,
        state: Tensor | None,
        state_gradient: Tensor,
    ) -> None:
        """Adds to ``gradients`` the share of the states after the segments."""
        decay, calls = self._decay(segments), _calls()
        _, k, v = _folded(segments)
        dstate = state_gradient.flatten(0, 1)
        dk, dv = _per_state(segments, gradients.key), _per_state(segments, gradients.value)
        reached = calls.add_written_key_gradient_(dk, v, dstate, k, decay)
        calls.add_read_state_(dv, k, dstate, decay, to_start=False)
        _add_over_heads(gradients.key, dk)
        _add_over_heads(gradients.value, dv)
        transition = decay.transition
        transition = transition.view(*transition.shape, *[1] * (4 - transition.dim()))
        carried = transition * dstate
        gradients.state += carried.view(segments.state_shape)
        if gradients.log_decay is not None:
            through = None
            if state is not None:
                through = (carried * state.flatten(0, 1)).sum(-1)
                through = through if decay.per_channel else through.sum(-1)
            gate = decay.gate_gradient_of_end(through, reached)
            gradients.log_decay += _gate_gradient(segments, gate)

    def _decay(self, segments: Segments) -> Decay:
        """The gates of all segments, beside the batch."""
        batch, count, tokens = segments.key.shape[:3]
        heads, log = segments.state_heads, segments.log_decay
        if log is None:
            log = segments.key.new_zeros(1, dtype=segments.state_dtype)
        if log.dim() == 1:
            log = log.expand(batch * count, tokens, heads)
        else:
            log = log.flatten(0, 1)
        documents = None
        if segments.starts is not None:
            counted = segments.starts.cumsum(1, dtype=torch.int32)
            documents = pad(counted, (1, 0)).repeat(batch, 1)
        return Decay(log, self._chunk, segments.state_dtype, documents)

    def _states(
        self, segments: Segments, decay: Decay, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """States before each chunk ``[bm, h, chunks, d, e]``, and after the segments."""
        calls = _calls()
        _, k, v = _folded(segments)
        states = calls.written_states(k, v, decay, segments.state_heads, to_start=False)
        initial = None if state is None else state.flatten(0, 1)
        return states, calls.carry_states_(states, decay, initial)


def _calls() -> Any:
    """The module that needs Triton, imported when first used: Triton may not be installed."""
    return importlib.import_module(f"{__package__}.calls")


def _folded(segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with segments beside the batch: ``[b * m, n, heads, width]``."""
    return segments.query.flatten(0, 1), segments.key.flatten(0, 1), segments.value.flatten(0, 1)


def _state_gradients(
    segments: Segments, decay: Decay, out_gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the states after each chunk, through outputs, and of the incoming states."""
    calls = _calls()
    written = calls.written_states(
        *(segments.query.flatten(0, 1), out_gradient.flatten(0, 1), decay, segments.out_heads),
        to_start=True,
        scale=segments.scale,
    )
    heads = segments.state_heads
    written = written.unflatten(1, (heads, written.shape[1] // heads))
    written = written.squeeze(2) if written.shape[2] == 1 else written.sum(2)
    return written, calls.carry_states_(written, decay, reverse=True)


def _pairs(segments: Segments, decay: Decay, state: Tensor) -> tuple[Affine, ...]:
    batch, count = segments.key.shape[:2]
    transitions = decay.transition.unflatten(0, (batch, count))
    if segments.log_decay is None or segments.log_decay.dim() == 1:
        transitions = transitions[:1]  # of no data: the same for the whole batch
    states = state.view(segments.state_shape)
    return tuple(Affine(a, x) for a, x in zip(transitions.unbind(1), states.unbind(1), strict=True))


def _over_heads(gradient: Tensor, heads: int) -> Tensor:
    """``[bm, n, more heads, ...]`` summed to ``heads``, each of which served several neighbours."""
    if gradient.shape[2] == heads:
        return gradient
    return gradient.unflatten(2, (heads, -1)).sum(3)


def _per_state(segments: Segments, gradient: Tensor) -> Tensor:
    """Where the share of each state is added to a gradient ``[b, m, n, heads, width]``: itself, or,
    where its heads serve several states, zeros ``[bm, n, h, width]`` that are summed later."""
    folded = gradient.view(gradient.shape[0] * gradient.shape[1], *gradient.shape[2:])
    if folded.shape[2] == segments.state_heads:
        return folded
    shape = (*folded.shape[:2], segments.state_heads, folded.shape[3])
    return folded.new_zeros(shape, dtype=segments.state_dtype)


def _add_over_heads(gradient: Tensor, share: Tensor) -> None:
    """Adds the shares of :func:`_per_state`, unless they are there already."""
    if share.shape[2] != gradient.shape[3]:
        gradient += _over_heads(share, gradient.shape[3]).view(gradient.shape)


def _gate_gradient(segments: Segments, gradient: Tensor) -> Tensor:
    """``[bm, n, h(, d)]`` in the shape of the log decay."""
    assert segments.log_decay is not None
    if segments.log_decay.dim() == 1:
        return gradient.sum((0, 1))
    return gradient.unflatten(0, segments.key.shape[:2])
