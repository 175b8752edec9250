"""Calls of the Triton kernels on runs of tokens: shapes, tiles and buffers.

Tensors: q ``[B, n, hq, d]``, k ``[B, n, hk, d]``, v ``[B, n, hv, e]``; states
``[B, h, chunks, d, e]``. Programs run over the heads of the output, or over the states alone; a
head of a tensor that has fewer serves several neighbours. Inputs may be views with any strides as
long as the last dimension is adjacent; others are copied. New buffers are contiguous and written in
full.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .channel_scores import score_gradients_kernel, scores_backward_kernel, scores_kernel
from .decay import Decay
from .intra import intra_backward_kernel, intra_kernel
from .states import add_product_kernel, carry_states_kernel, written_states_kernel

# Tokens of a block inside a chunk, with a decay per channel: the least that a matrix unit takes.
BLOCK = 16


def interpreting() -> bool:
    """Whether Triton was imported with ``TRITON_INTERPRET=1``: kernels run on CPU tensors."""
    return not isinstance(intra_kernel, triton.runtime.JITFunction)


def written_states(
    x: Tensor, y: Tensor, decay: Decay, heads: int, *, to_start: bool, scale: float = 1.0
) -> Tensor:
    """``scale (weight * x)^T y`` of each chunk, ``[B, heads, chunks, d, e]``, fp32 (fp64 for fp64).

    X of keys and values, the weight carrying a token to its chunk's end; Y of queries and output
    gradients, ``to_start``.
    """
    batch, tokens, _, d = x.shape
    e = y.shape[3]
    states = x.new_empty(batch, heads, decay.chunks, d, e, dtype=decay.dtype)
    arithmetic = _arithmetic(x.dtype)
    tile_d, tile_e = _tile(d, arithmetic), _tile(e, arithmetic)
    _launch(
        written_states_kernel,
        (batch * heads * decay.chunks, triton.cdiv(d, tile_d) * triton.cdiv(e, tile_e)),
        *(*_part(x, heads), *_part(y, heads), *_part(decay.log, heads), decay.documents, states),
        *(tokens, heads, decay.chunks),
        D=d,
        E=e,
        TILE_D=tile_d,
        TILE_E=tile_e,
        SCALE=scale,
        TO_START=to_start,
        **_forms(decay),
        **arithmetic,
    )
    return states


def carry_states_(
    states: Tensor, decay: Decay, initial: Tensor | None = None, *, reverse: bool = False
) -> Tensor:
    """What chunks write becomes the state before (``reverse``: its gradient after) each, in place.

    Args:
        states: ``[B, h, chunks, d, e]``.
        initial: ``[B, h, d, e]``, before the first chunk (``reverse``: after the last).

    Returns:
        The state after the last chunk (``reverse``: gradient before the first), ``[B, h, d, e]``.
    """
    batch, heads, _, d, e = states.shape
    final = states.new_empty(batch, heads, d, e)
    arithmetic = _arithmetic(states.dtype)
    # Nothing but loads and stores, one after another: small tiles, so that many run at once.
    tile_d, tile_e = 16, _tile(e, arithmetic)
    _launch(
        carry_states_kernel,
        (batch * heads, triton.cdiv(d, tile_d) * triton.cdiv(e, tile_e)),
        *(states, decay.transitions, None if initial is None else initial.contiguous(), final),
        decay.chunks,
        D=d,
        E=e,
        TILE_D=tile_d,
        TILE_E=tile_e,
        REVERSE=reverse,
        HAS_INITIAL=initial is not None,
        DECAY_PER_CHANNEL=decay.per_channel,
        ACC=arithmetic["ACC"],
    )
    return final


def intra(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Decay,
    states: Tensor,
    *,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """Outputs ``[B, n, max(hq, hv), e]``, given the states before each chunk."""
    batch, tokens, heads, d = *q.shape[:2], max(q.shape[2], v.shape[2]), q.shape[3]
    e = v.shape[3]
    out = v.new_empty(batch, tokens, heads, e, dtype=dtype)
    _launch(
        intra_kernel,
        (batch * heads * decay.chunks,),
        *(*_part(q, heads), *_part(k, heads), *_part(v, heads), *_part(decay.log, heads)),
        *(_scores(q, k, decay, heads, scale), states, decay.documents, out),
        *(tokens, heads, decay.chunks),
        num_warps=8,
        **_widths(d, e, q.dtype),
        SCALE=scale,
        **_forms(decay),
        **_arithmetic(q.dtype),
    )
    return out


def intra_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Decay,
    out_gradient: Tensor,
    states: Tensor,
    state_gradients: Tensor,
    *,
    scale: float,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the running sum b of the log decay, per head of the output.

    Args:
        states: before each chunk; state_gradients: of the states after each chunk.
        dtypes: of dq, dk, dv.

    Returns:
        dq and dk ``[B, n, ho, d]``, dv ``[B, n, ho, e]``; db ``[B, n, ho]`` or ``[B, n, ho, d]`` in
        fp32 (fp64 for fp64), without the boundary term. The gradient of what serves several heads
        is the sum over them.
    """
    batch, tokens, heads, d = *q.shape[:2], out_gradient.shape[2], q.shape[3]
    e = v.shape[3]
    shapes = (batch, tokens, heads, d), (batch, tokens, heads, d), (batch, tokens, heads, e)
    dq, dk, dv = (q.new_empty(s, dtype=t) for s, t in zip(shapes, dtypes, strict=True))
    width = (d,) if decay.per_channel else ()
    db = q.new_empty(batch, tokens, heads, *width, dtype=decay.dtype)
    scores = _scores(q, k, decay, heads, scale)
    terms = _scores_backward(q, k, v, decay, out_gradient, scale)
    _launch(
        intra_backward_kernel,
        (batch * heads * decay.chunks,),
        *(*_part(q, heads), *_part(k, heads), *_part(v, heads), *_part(decay.log, heads)),
        *(*_part(out_gradient, heads), scores, *terms, states, state_gradients, decay.documents),
        *(dq, dk, dv, db, tokens, heads, decay.chunks),
        num_warps=8,
        **_widths(d, e, q.dtype),
        SCALE=scale,
        **_forms(decay),
        **_arithmetic(q.dtype),
    )
    return dq, dk, dv, db


def add_read_state_(
    out: Tensor,
    x: Tensor,
    state: Tensor,
    decay: Decay,
    *,
    to_start: bool,
    scale: float = 1.0,
) -> None:
    """``out += scale (weight * x) @ state``: what tokens read of a state at an end of their run.

    The outputs of queries and the incoming state (``to_start``); the gradients of the values of
    keys and the gradient of the outgoing state.

    Args:
        out: ``[B, n, heads, e]``, added to in place.
        x: ``[B, n, heads or fewer, d]``.
        state: ``[B, h, d, e]``.
    """
    strides = (state.shape[3], 1)
    _add_product(out, x, state, strides, decay, to_start=to_start, scale=scale)


def add_written_key_gradient_(
    out: Tensor, v: Tensor, state_gradient: Tensor, k: Tensor, decay: Decay
) -> Tensor:
    """``out += weight * (v @ state_gradient^T)``: dk of the gradient of the outgoing state.

    Args:
        out: ``[B, n, h, d]``, added to in place.

    Returns:
        k times what was added, ``[B, n, h]``, or channel by channel ``[B, n, h, d]``; fp32 or fp64.
    """
    batch, tokens, heads, d = out.shape
    width = (d,) if decay.per_channel else ()
    reached = out.new_empty(batch, tokens, heads, *width, dtype=state_gradient.dtype)
    strides = (1, state_gradient.shape[3])
    _add_product(out, v, state_gradient, strides, decay, to_start=False, other=k, reached=reached)
    return reached


def _add_product(
    out: Tensor,
    x: Tensor,
    matrix: Tensor,
    strides: tuple[int, int],
    decay: Decay,
    *,
    to_start: bool,
    scale: float = 1.0,
    other: Tensor | None = None,
    reached: Tensor | None = None,
) -> None:
    batch, tokens, heads, width_out = out.shape
    width = x.shape[3]
    arithmetic = _arithmetic(x.dtype)
    _launch(
        add_product_kernel,
        (batch * heads * decay.chunks,),
        *(*_part(x, heads), matrix.contiguous(), *strides, *_part(decay.log, heads)),
        *(decay.offsets(to_start), decay.documents, out, *out.stride()[:3]),
        *((None, 0, 0, 0, 1) if other is None else _part(other, heads)),
        *(reached, tokens, heads, decay.chunks),
        num_warps=8,
        D=matrix.shape[2],
        IN=width,
        OUT=width_out,
        TILE_IN=_tile(width, arithmetic),
        TILE_OUT=_tile(width_out, arithmetic),
        SCALE=scale,
        TO_START=to_start,
        WEIGHT_ON_INPUT=other is None,
        HAS_OTHER=other is not None,
        **_forms(decay),
        **arithmetic,
    )


def _scores(q: Tensor, k: Tensor, decay: Decay, heads: int, scale: float) -> Tensor | None:
    """P ``[B, heads, chunks, C, C]`` of a decay per channel; any other is found on the way."""
    if not decay.per_channel:
        return None
    batch, tokens, _, d = q.shape
    shape = (batch, heads, decay.chunks, decay.chunk, decay.chunk)
    scores = q.new_empty(shape, dtype=decay.dtype)
    arithmetic = _arithmetic(q.dtype)
    _launch(
        scores_kernel,
        (batch * heads * decay.chunks, (decay.chunk // BLOCK) ** 2),
        *(*_part(q, heads), *_part(k, heads), *_part(decay.log, heads), scores),
        *(tokens, heads, decay.chunks),
        C=decay.chunk,
        D=d,
        TILE_D=_tile(d, arithmetic),
        BLOCK=BLOCK,
        SCALE=scale,
        **arithmetic,
    )
    return scores


def _scores_backward(
    q: Tensor, k: Tensor, v: Tensor, decay: Decay, out_gradient: Tensor, scale: float
) -> tuple[Tensor | None, Tensor | None]:
    """What reaches the scaled query and the key through P, ``[B, n, ho, d]`` each."""
    if not decay.per_channel:
        return None, None
    batch, tokens, heads, e = out_gradient.shape
    d = q.shape[3]
    arithmetic = _arithmetic(q.dtype)
    programs = batch * heads * decay.chunks
    gradients = q.new_empty(batch, heads, decay.chunks, decay.chunk, decay.chunk, dtype=decay.dtype)
    _launch(
        score_gradients_kernel,
        (programs,),
        *(*_part(out_gradient, heads), *_part(v, heads), decay.documents, gradients),
        *(tokens, heads, decay.chunks),
        C=decay.chunk,
        E=e,
        TILE_E=_tile(e, arithmetic),
        HAS_DOCUMENTS=decay.documents is not None,
        **arithmetic,
    )
    dq, dk = (q.new_empty(batch, tokens, heads, d, dtype=decay.dtype) for _ in range(2))
    tile = _tile(d, arithmetic)
    _launch(
        scores_backward_kernel,
        (programs, decay.chunk // BLOCK * triton.cdiv(d, tile)),
        *(*_part(q, heads), *_part(k, heads), *_part(decay.log, heads), gradients, dq, dk),
        *(tokens, heads, decay.chunks),
        C=decay.chunk,
        D=d,
        TILE_D=tile,
        BLOCK=BLOCK,
        SCALE=scale,
        **arithmetic,
    )
    return dq, dk


def _arithmetic(dtype: torch.dtype) -> dict[str, Any]:
    """What products read and add up in.

    bf16 operands stay as they are on a GPU, but the interpreter's product of them is wrong. fp16
    is read as tf32, which holds it exactly, because states outgrow fp16.
    """
    if dtype == torch.float64:
        return {"ACC": tl.float64, "OPERAND": tl.float64, "PRECISION": "ieee"}
    if dtype == torch.bfloat16 and not interpreting():
        return {"ACC": tl.float32, "OPERAND": tl.bfloat16, "PRECISION": "ieee"}
    precision = "tf32" if dtype == torch.float16 else "ieee"
    return {"ACC": tl.float32, "OPERAND": tl.float32, "PRECISION": precision}


def _tile(width: int, arithmetic: dict[str, Any]) -> int:
    """Columns of a tile: a power of two from 16, the least that a matrix unit takes, to 64.

    Half of that for operands of 4 or 8 bytes, so that they take no more shared memory.
    """
    widest = 64 if arithmetic["OPERAND"] == tl.bfloat16 else 32
    return min(widest, max(16, triton.next_power_of_2(width)))


def _widths(d: int, e: int, dtype: torch.dtype) -> dict[str, int]:
    arithmetic = _arithmetic(dtype)
    return {"D": d, "E": e, "TILE_D": _tile(d, arithmetic), "TILE_E": _tile(e, arithmetic)}


def _forms(decay: Decay) -> dict[str, Any]:
    return {
        "C": decay.chunk,
        "DECAY_PER_CHANNEL": decay.per_channel,
        "HAS_DOCUMENTS": decay.documents is not None,
    }


def _part(tensor: Tensor, heads: int) -> tuple[Tensor, int, int, int, int]:
    """A tensor, its strides of batch, token and head, and how many of ``heads`` a head serves."""
    if tensor.dim() == 4 and tensor.stride(3) != 1:
        tensor = tensor.contiguous()
    stride = tensor.stride()
    return tensor, stride[0], stride[1], stride[2], heads // tensor.shape[2]


def _launch(
    kernel: Callable[..., Any],
    grid: tuple[int, ...],
    *arguments: Any,
    num_warps: int = 4,
    **meta: Any,
) -> None:
    """Starts a kernel's programs, if there are any.

    Two stages: with three the backward takes 144 KiB of shared memory, and 99 KiB are all there is
    on GPUs of compute capability 8.6, 8.9 and 12. Eight warps where four spill registers.
    """
    if 0 not in grid:
        kernel[grid](*arguments, num_warps=num_warps, num_stages=2, **meta)  # type: ignore[index]
