"""Cross entropy with the output embedding circulating: no logits of all tokens, ever.

    for owner, (weight,) in ring.circulate(weight):          # the vocabulary of one rank
        for a tile of its rows: z = x weight_tile^T          # this rank's tokens, some columns
            merge max and sum of exponentials; keep z[label]
    loss = lse - z[label]

Saved for backward: x, the log-sum-exp and the labels. Backward recomputes z; the gradient of a
shard follows it one hop behind. Agrees with Megatron's ``vocab_parallel_cross_entropy``: rows that
only pad the vocabulary are not masked; a label outside of it has the loss ``lse - max``, and the
softmax as the gradient of its logits.

Not part of the published method. With stock cross entropy the logits use up about half of what the
layers save; see ``docs/metp.md``.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..communication.collectives import CollectiveFlight
from ..communication.ring import Ring, accumulation_dtype
from ..communication.transport import Stream
from .products import add_product, returned_gradient, without_autocast

# Logits of a tile, in columns for each of a rank's tokens. As wide as a usual hidden state is the
# fp32 sum of x's gradient, which is alive anyway; wider tiles gain no speed.
TILE_COLUMNS = 1024

LOSSES = Stream("losses", 0)


def ring_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    order: Tensor,
    *,
    ring: Ring,
    tile_columns: int = TILE_COLUMNS,
    fused_gradients: bool = False,
) -> Tensor:
    """Cross entropy of every token, from hidden states and an output embedding that are both split.

    A collective call of the ring's ranks.

    Args:
        x: ``[rows, b, h]``, hidden states of this rank's tokens.
        weight: ``[V / p, h]``, this rank's rows of the output embedding, in order of rank.
        labels: ``[b, s]`` int64, of all tokens of the ring's ranks in natural order; the same on
            every rank.
        order: ``[s]`` int64, which token stands in each row when the ``x`` of the ranks are side by
            side; the same on every rank.
        ring: over the ranks that share the vocabulary.
        tile_columns: of the vocabulary at a time.
        fused_gradients: add the weight's gradient to ``main_grad``.

    Returns:
        ``[b, s]``, the losses in natural order, the same on every rank; fp32, or fp64 for fp64.
        The gradient that flows back into it must be the same on every rank: each takes its own
        tokens' part.
    """
    return _RingCrossEntropy.apply(x, weight, labels, order, ring, tile_columns, fused_gradients)


class _RingCrossEntropy(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        order: Tensor,
        ring: Ring,
        tile_columns: int,
        fused: bool,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        # A copy: kept for backward, it must not keep the order of all ranks.
        positions = order.view(ring.size, -1)[ring.position].clone()
        own = labels[:, positions].t().reshape(-1)
        wide = accumulation_dtype(x.dtype)
        lse = rows.new_full((len(rows),), -torch.inf, dtype=wide)
        largest, label_logit = lse.clone(), torch.zeros_like(lse)
        for owner, (shard,) in ring.circulate(weight):
            for start, tile in _tiles(shard, tile_columns):
                logits = (rows @ tile.t()).to(wide)
                inside, column = _within(own, owner * len(shard) + start, len(tile))
                picked = logits.gather(1, column.unsqueeze(1)).squeeze(1)
                label_logit = torch.where(inside, picked, label_logit)
                peak = logits.amax(1)
                largest = torch.maximum(largest, peak)
                total = logits.sub_(peak.unsqueeze(1)).exp_().sum(1)
                lse = torch.logaddexp(lse, total.log_().add_(peak))
                del logits
        nowhere = (own < 0) | (own >= ring.size * len(weight))
        label_logit = torch.where(nowhere, largest, label_logit)
        ctx.save_for_backward(x, weight, own, positions, lse)
        ctx.ring, ctx.tile_columns, ctx.fused = ring, tile_columns, fused
        losses = (lse - label_logit).view(x.shape[0], x.shape[1])
        return _in_natural_order(losses, order, ring)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, own, positions, lse = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        dloss = loss_gradient[:, positions].t().reshape(-1, 1)
        dx = torch.zeros_like(rows, dtype=accumulation_dtype(x.dtype))
        if ctx.needs_input_grad[1]:
            with ctx.ring.circulate_with_gradients(weight) as rotation:
                for owner, (shard,), gradient in rotation:
                    for start, tile in _tiles(shard, ctx.tile_columns):
                        first = owner * len(shard) + start
                        dz = _logit_gradient(rows, tile, own, first, lse, dloss)
                        add_product(dx, dz, tile, first=False)
                        gradient.add(dz.t() @ rows, at=slice(start, start + len(tile)))
                        del dz
                (home,) = rotation.gradients(accumulated=True)
            returned = returned_gradient(weight, home, fused=ctx.fused)
        else:
            returned = None
            for owner, (shard,) in ctx.ring.circulate(weight):
                for start, tile in _tiles(shard, ctx.tile_columns):
                    first = owner * len(shard) + start
                    dz = _logit_gradient(rows, tile, own, first, lse, dloss)
                    add_product(dx, dz, tile, first=False)
        return dx.to(x.dtype).view_as(x), returned, *[None] * 5


def _tiles(shard: Tensor, columns: int) -> list[tuple[int, Tensor]]:
    return [(start, shard[start : start + columns]) for start in range(0, len(shard), columns)]


def _within(labels: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Which labels are among ``first .. first + count - 1``, and their column there (else 0)."""
    column = labels - first
    inside = (column >= 0) & (column < count)
    return inside, column.masked_fill(~inside, 0)


def _logit_gradient(
    rows: Tensor, tile: Tensor, labels: Tensor, first: int, lse: Tensor, dloss: Tensor
) -> Tensor:
    """``(softmax - one-hot) * dloss`` of a tile of logits, in the dtype of the hidden states."""
    dz = (rows @ tile.t()).to(lse.dtype).sub_(lse.unsqueeze(1)).exp_()
    inside, column = _within(labels, first, len(tile))
    dz.scatter_add_(1, column.unsqueeze(1), -inside.to(dz.dtype).unsqueeze(1))
    return dz.mul_(dloss).to(rows.dtype)


def _in_natural_order(losses: Tensor, order: Tensor, ring: Ring) -> Tensor:
    """``[rows, b]`` of every rank to ``[b, s]`` in natural order."""
    place = ring.place
    if place.size > 1:
        parts = [torch.empty_like(losses) for _ in place.ranks]
        flight = CollectiveFlight(place, LOSSES, ring.timeout_seconds, "the last step", "gathering")
        flight.post(
            partial(dist.all_gather, parts, losses.contiguous(), group=place.group, async_op=True)
        )
        flight.wait()
        losses = torch.cat(parts)
    return torch.empty_like(losses).index_copy_(0, order, losses).t().contiguous()
