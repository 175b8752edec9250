"""Linear attention that looks both ways, without decay: one state for the whole sequence.

    M = sum K^T V over all ranks, O = scale Q M        dM = scale sum Q^T dO over all ranks,
                                                       dQ = scale dO M^T, dK = V dM^T, dV = K dM

An all-reduce of one state each way (LASP-2, arXiv 2502.07563, gathers the states of all ranks
instead). The order of the tokens does not matter, nor which rank holds which.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..communication.collectives import Collectives
from .segments import Segments
from .torch_kernels.tiles import tiles

CHUNK, CHUNKS = 64, 16


class BidirectionalFunction(torch.autograd.Function):
    """``(query, key, value, collectives, scale, out dtype) -> out``; ``[b, tokens, heads, w]``."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        collectives: Collectives,
        scale: float,
        out_dtype: torch.dtype,
    ) -> Tensor:
        segments = _whole(query, key, value, scale)
        state = query.new_zeros(_state_shape(segments), dtype=segments.state_dtype)
        for tile in tiles(segments, CHUNK, CHUNKS):
            state += (tile.key.mT @ tile.value).sum(2, keepdim=True)
        state = collectives.sum(state)
        out = query.new_empty(*query.shape[:2], segments.out_heads, value.shape[3], dtype=out_dtype)
        for tile in tiles(segments, CHUNK, CHUNKS):
            out[:, tile.tokens] = tile.store(tile.query @ state, segments.out_heads).squeeze(1)
        ctx.save_for_backward(query, key, value, state)
        ctx.collectives, ctx.scale = collectives, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        # As in forward, whatever encloses the call of backward.
        with torch.autocast(out_gradient.device.type, enabled=False):
            return _backward(ctx, out_gradient)


def _backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, state = ctx.saved_tensors
    segments = _whole(query, key, value, ctx.scale)
    dout = out_gradient.unsqueeze(1)
    dstate = torch.zeros_like(state)
    for tile in tiles(segments, CHUNK, CHUNKS):
        dstate += (tile.query.mT @ tile.load(dout)).sum(2, keepdim=True)
    dstate = ctx.collectives.sum(dstate)
    gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
    for tile in tiles(segments, CHUNK, CHUNKS):
        parts = (
            ctx.scale * (tile.load(dout) @ state.mT),
            tile.value @ dstate.mT,
            tile.key @ dstate,
        )
        for gradient, part in zip(gradients, parts, strict=True):
            gradient[:, tile.tokens] = tile.store(part, gradient.shape[2]).squeeze(1)
    return *gradients, None, None, None


def _whole(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Segments:
    """All tokens of the rank as one segment."""
    return Segments(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), scale=scale)


def _state_shape(segments: Segments) -> tuple[int, ...]:
    """``[b, h, 1, d, e]``: a state, to be multiplied with chunks."""
    batch, _, heads, width, value_width = segments.state_shape
    return batch, heads, 1, width, value_width
