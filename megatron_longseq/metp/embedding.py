"""Embedding lookup with the table circulating: each rank looks up its own tokens alone.

    for owner, (table,) in ring.circulate(weight):           # the vocabulary of one rank
        copy the rows of this rank's tokens that lie in it

Backward, the table stays at home: the gradient does not depend on it. Only the sums of gradients go
round. Against a split lookup whose result is reduced and scattered, there is no tensor of all
tokens, and less to send where there are more tokens than vocabulary.

Not part of the published method; see ``docs/metp.md``.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..communication.ring import Ring
from .products import returned_gradient


def ring_embedding(
    tokens: Tensor, weight: Tensor, *, ring: Ring, fused_gradients: bool = False
) -> Tensor:
    """Rows of a table that is split over a ring. A collective call of its ranks.

    Args:
        tokens: ``[rows, b]`` int64, of this rank. A token outside the vocabulary gives zeros.
        weight: ``[V / p, h]``, this rank's rows of the table, in order of rank.
        ring: over the ranks that share the table.
        fused_gradients: add the weight's gradient to ``main_grad``.

    Returns:
        ``[rows, b, h]`` in the dtype of ``weight``.
    """
    return _RingEmbedding.apply(tokens, weight, ring, fused_gradients)


class _RingEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, ring: Ring, fused: bool) -> Tensor:
        flat = tokens.reshape(-1)
        # Tokens sorted by owner, once: then every step touches its own rows alone.
        owners = torch.where(flat < 0, ring.size, flat // len(weight)).clamp(max=ring.size)
        order = owners.argsort(stable=True)
        counts = torch.bincount(owners, minlength=ring.size + 1)
        bounds = [0, *counts.cumsum(0).tolist()]
        out = weight.new_zeros(len(flat), weight.shape[1])
        for owner, (table,) in ring.circulate(weight):
            rows = order[bounds[owner] : bounds[owner + 1]]
            column = flat[rows] - owner * len(table)
            out.index_copy_(0, rows, table.index_select(0, column))
        ctx.save_for_backward(flat, order, weight)
        ctx.ring, ctx.bounds, ctx.fused = ring, bounds, fused
        return out.view(*tokens.shape, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        flat, order, weight = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        dy = out_gradient.reshape(len(flat), -1)
        with ctx.ring.circulate_gradients(weight) as rotation:
            for owner, _, gradient in rotation:
                rows = order[ctx.bounds[owner] : ctx.bounds[owner + 1]]
                column = flat[rows] - owner * len(weight)
                (total,) = gradient.sums()
                total.index_add_(0, column, dy[rows].to(total.dtype))
            (home,) = rotation.gradients(accumulated=True)
        return None, returned_gradient(weight, home, fused=ctx.fused), None, None
