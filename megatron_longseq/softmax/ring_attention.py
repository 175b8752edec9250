"""Softmax attention of a query that stays to keys and values that circulate.

Forward: every (owner, block) of the ring is attended to where the plan of the mask says it is
visible, and merged by log-sum-exp. Backward: keys and values go round again, every block's term is
taken with the *final* output and log-sum-exp, dQ adds up here and dK, dV follow their block home.

Per rank and pass, with ring size R: ``R - 1`` hops of K and V forward; ``R - 1`` of K and V and
``R`` of dK and dV (fp32) backward; where the plan leaves little of other blocks to be seen, only
those rows. Held at a time, whatever R is: two receive buffers for K and V, two for dK and dV, one
block's partial results.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..communication.ring import Ring, accumulation_dtype
from ..communication.row_exchange import RowExchange
from ..memory.keep_attention import keep_rows_or_compute
from ..token_layout import Rectangle
from .block_kernels import BlockKernel
from .mask_plan import MaskPlan, tiles
from .online_softmax import OnlineSoftmax
from .sink import add_sink


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    ring: Ring,
    kernel: BlockKernel,
    plan: MaskPlan,
    scale: float,
) -> Tensor:
    """:func:`ring_attention_forward` with its gradients; returns the output alone."""
    return _RingAttention.apply(query, key, value, ring, kernel, plan, scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ring: Ring,
        kernel: BlockKernel,
        plan: MaskPlan,
        scale: float,
    ) -> Tensor:
        how: dict[str, Any] = {"ring": ring, "kernel": kernel, "plan": plan, "scale": scale}
        out, lse = keep_rows_or_compute(
            lambda rows: ring_attention_forward(query, key, value, query_rows=rows, **how),
            query.shape[0],
        )
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.how = how
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ring_attention_backward(out_gradient, *ctx.saved_tensors, **ctx.how)
        return *gradients, None, None, None, None


def ring_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    ring: Ring,
    kernel: BlockKernel,
    plan: MaskPlan,
    scale: float,
    sink: Tensor | None = None,
    query_rows: slice | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries to the keys and values of all ranks of the ring.

    Args:
        query: ``[rows, b, a, d]``, the early chunk and the late chunk of this ring position.
        key, value: ``[rows, b, g, d]`` and ``[rows, b, g, dv]``, likewise.
        plan: what sees what.
        scale: factor of the scores.
        sink: ``[a]``, a logit per query head that takes part in the softmax and has no value.
        query_rows: the first rows alone, ``slice(0, n)``; all if not given. The same on all ranks.

    Returns:
        The output ``[rows, b, a, dv]`` in the dtype of the query, and the log-sum-exp
        ``[b, a, rows]`` in fp32 (fp64 for fp64), with the sink; 0 and -inf in rows that see
        nothing.
    """
    rows, batch, heads, _ = query.shape
    wanted = rows if query_rows is None else query_rows.stop
    softmax = OnlineSoftmax(
        wanted,
        batch,
        heads,
        value.shape[3],
        dtype=accumulation_dtype(query.dtype),
        device=query.device,
    )
    nothing = True
    for owner, (k, v) in _way(ring, plan).circulate(key, value):
        for whole in _parts(plan, kernel, ring.position, owner):
            part = whole.up_to(wanted)
            if part is None:
                continue
            out, lse = kernel.forward(
                query[part.queries],
                k[part.keys],
                v[part.keys],
                causal=part.causal,
                band=part.band,
                scale=scale,
            )
            softmax.merge(out, lse, part.queries)
            nothing = False
            del out, lse  # one block's partial results at a time
    if nothing:  # all of these rows are padding
        out = query.new_zeros(wanted, batch, heads, value.shape[3], dtype=softmax.dtype)
        lse = out.new_full((batch, heads, wanted), -torch.inf)
    else:
        out, lse = softmax.result()
    if sink is not None:
        out, lse = add_sink(out, lse, sink)
    return out.to(query.dtype), lse


def _way(ring: Ring, plan: MaskPlan) -> Ring | RowExchange:
    """How blocks travel: round the ring; where few of their rows are used, these alone."""
    if plan.sparse:
        return RowExchange(ring, plan.offsets, plan.rows_used)
    return ring


def _parts(
    plan: MaskPlan, kernel: BlockKernel, position: int, owner: int
) -> tuple[Rectangle, ...] | list[Rectangle]:
    """The rectangles of the plan; bands in tiles for a kernel to which they are matrices."""
    if plan.sparse and owner != position:
        parts = plan.rectangles_of_used_rows(position, owner)
    else:
        parts = plan.rectangles(position, owner)
    if kernel.skips_outside_bands or all(part.band is None for part in parts):
        return parts
    return [tile for part in parts for tile in tiles(part)]


def ring_attention_backward(
    out_gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    ring: Ring,
    kernel: BlockKernel,
    plan: MaskPlan,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`ring_attention_forward`, but for that of its sink.

    Args:
        out_gradient: ``[rows, b, a, dv]``.
        out, lse: what the forward returned; the rest as given to it.

    Returns:
        dQ, dK, dV in the shapes and dtypes of query, key and value.
    """
    query_gradient: Tensor | None = None
    with _way(ring, plan).circulate_with_gradients(key, value) as rotation:
        for owner, (k, v), gradient in rotation:
            for part in _parts(plan, kernel, ring.position, owner):
                dq, dk, dv = kernel.backward(
                    out_gradient[part.queries],
                    query[part.queries],
                    k[part.keys],
                    v[part.keys],
                    out[part.queries],
                    lse[..., part.queries],
                    causal=part.causal,
                    band=part.band,
                    scale=scale,
                )
                if query_gradient is None and dq.shape == query.shape:
                    query_gradient = dq.to(accumulation_dtype(query.dtype))
                elif query_gradient is None:
                    query_gradient = torch.zeros_like(query, dtype=accumulation_dtype(query.dtype))
                    query_gradient[part.queries] += dq
                else:
                    query_gradient[part.queries] += dq
                gradient.add(dk, dv, at=part.keys)
                del dq, dk, dv
        dk, dv = rotation.gradients()
    if query_gradient is None:  # all rows are padding
        query_gradient = torch.zeros_like(query)
    return query_gradient.to(query.dtype), dk, dv
