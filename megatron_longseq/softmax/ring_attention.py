"""Softmax attention over a ring: forward, keys and values circulate among queries that stay.

Forward: every (owner, block) of the ring is attended to where the plan of the mask says it is
visible, and merged by log-sum-exp. Backward: every block's term is taken with the *final* output
and log-sum-exp, and one side of attention goes round, its gradients one hop behind:

    keys      K and V travel, dK and dV follow them home, dQ adds up here
    queries   Q, dO and two numbers per row, log-sum-exp and Delta = rowsum(dO o O), travel, dQ
              follows them home, dK and dV add up here

Queries are the smaller side unless several of them share a key/value head: with as many of either,
16-bit inputs and sums in fp32, two thirds of the bytes.

Per rank and pass, with ring size R: ``R - 1`` hops of what travels, ``R`` of its gradients (fp32)
backward; where the plan leaves little of other blocks to be seen, only those rows of K and V. Held
at a time, whatever R is: two receive buffers for what travels, two for its gradients, one block's
partial results.

Source: what circulates backward, BurstAttention, arXiv 2403.09347.
"""

from collections.abc import Callable
from typing import Any, Literal

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
from .score_edits import ScoreEdits, small_parts
from .sink import add_sink

# Which side of attention goes round the ring in its backward; "auto": the one of fewer bytes.
BackwardRing = Literal["auto", "keys", "queries"]


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
    edits: ScoreEdits | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries to the keys and values of all ranks of the ring.

    Args:
        query: ``[rows, b, a, d]``, the early chunk and the late chunk of this ring position.
        key, value: ``[rows, b, g, d]`` and ``[rows, b, g, dv]``, likewise.
        plan: what sees what.
        scale: factor of the scores.
        sink: ``[a]``, a logit per query head that takes part in the softmax and has no value.
        query_rows: the first rows alone, ``slice(0, n)``; all if not given. The same on all ranks.
        edits: ALiBi and dropout; they bring a kernel of their own.

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
        kernel_of = _kernels(plan, kernel, edits, ring.position, owner, query.device)
        for whole in _parts(plan, kernel, ring.position, owner, edits):
            part = whole.up_to(wanted)
            if part is None:
                continue
            out, lse = kernel_of(part).forward(
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


def _kernels(
    plan: MaskPlan,
    kernel: BlockKernel,
    edits: ScoreEdits | None,
    position: int,
    owner: int,
    device: torch.device,
) -> Callable[[Rectangle], BlockKernel]:
    """The kernel of each part of what ``position`` sees of ``owner``."""
    if edits is None:
        return lambda _: kernel
    queries, keys = plan.places(position), plan.places(owner)
    if plan.sparse and owner != position:
        keys = torch.cat([keys[rows] for rows in plan.rows_used(position, owner)] or [keys[:0]])
    queries, keys = queries.to(device), keys.to(device)
    return lambda part: edits.kernel(queries[part.queries], keys[part.keys])


def _parts(
    plan: MaskPlan,
    kernel: BlockKernel,
    position: int,
    owner: int,
    edits: ScoreEdits | None = None,
) -> tuple[Rectangle, ...] | list[Rectangle]:
    """The rectangles of the plan; in tiles for a kernel to which they, or bands, are matrices."""
    if plan.sparse and owner != position:
        parts = plan.rectangles_of_used_rows(position, owner)
    else:
        parts = plan.rectangles(position, owner)
    if edits is not None:
        return [small for part in parts for small in small_parts(part)]
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
    moves: BackwardRing = "keys",
    edits: ScoreEdits | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`ring_attention_forward`, but for that of its sink.

    Args:
        out_gradient: ``[rows, b, a, dv]``.
        out, lse: what the forward returned; the rest as given to it.
        moves: what goes round. Rows that travel alone, because the plan leaves little of other
            blocks to be seen, are those of keys and values; with edits keys go round, as each rank
            knows the seed of its own queries.

    Returns:
        dQ, dK, dV in the shapes and dtypes of query, key and value.
    """
    if edits is None and queries_move(query, key, value, ring=ring, plan=plan, moves=moves):
        return _queries_round(
            out_gradient,
            query,
            key,
            value,
            out,
            lse,
            ring=ring,
            kernel=kernel,
            plan=plan,
            scale=scale,
        )
    query_gradient: Tensor | None = None
    with _way(ring, plan).circulate_with_gradients(key, value) as rotation:
        for owner, (k, v), gradient in rotation:
            kernel_of = _kernels(plan, kernel, edits, ring.position, owner, query.device)
            for part in _parts(plan, kernel, ring.position, owner, edits):
                dq, dk, dv = kernel_of(part).backward(
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


def queries_move(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    ring: Ring,
    plan: MaskPlan,
    moves: BackwardRing,
) -> bool:
    """Whether queries go round in the backward of such tensors; the same on every rank."""
    if moves == "keys" or ring.size == 1 or plan.sparse:
        return False
    if moves == "queries":
        return True
    of_keys, of_queries = backward_bytes(
        ring.size,
        queries=query.numel() // query.shape[3],
        keys=key.numel() // key.shape[3],
        width=key.shape[3],
        value_width=value.shape[3],
        element_bytes=query.element_size(),
        row_bytes=accumulation_dtype(query.dtype).itemsize,
        gradient_bytes=ring.sum_dtype(query.dtype).itemsize,
    )
    return of_queries < of_keys


def backward_bytes(
    ring: int,
    *,
    queries: int,
    keys: int,
    width: int,
    value_width: int,
    element_bytes: int,
    row_bytes: int,
    gradient_bytes: int,
) -> tuple[int, int]:
    """What a rank sends in a backward in which keys go round, and in one in which queries do.

    Args:
        queries, keys: rows times heads of each, on one rank.
        width, value_width: of queries and keys, and of values.
        row_bytes: of a log-sum-exp, or a Delta.
        gradient_bytes: per element of the gradients on their way.
    """
    both = width + value_width
    of_keys = keys * both * ((ring - 1) * element_bytes + ring * gradient_bytes)
    of_queries = queries * (
        (ring - 1) * (both * element_bytes + 2 * row_bytes) + ring * width * gradient_bytes
    )
    return of_keys, of_queries


def _queries_round(
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
    """:func:`ring_attention_backward` with queries that circulate and keys that stay."""
    wide = accumulation_dtype(query.dtype)
    dk, dv = (torch.zeros_like(tensor, dtype=wide) for tensor in (key, value))
    delta = (out_gradient.to(wide) * out).sum(-1).permute(1, 2, 0).contiguous()
    block = query, out_gradient, lse, delta
    with ring.circulate_with_gradients(*block, differentiated=1) as rotation:
        for owner, (q, dout, its_lse, its_delta), gradient in rotation:
            # What the owner's queries see of the keys here.
            for part in _parts(plan, kernel, owner, ring.position):
                rows = part.queries
                dq, more_dk, more_dv = kernel.backward(
                    dout[rows],
                    q[rows],
                    key[part.keys],
                    value[part.keys],
                    output_of_delta(dout[rows], its_delta[..., rows]),
                    its_lse[..., rows],
                    causal=part.causal,
                    band=part.band,
                    scale=scale,
                )
                dk[part.keys] += more_dk
                dv[part.keys] += more_dv
                gradient.add(dq, at=rows)
                del dq, more_dk, more_dv
        (dq,) = rotation.gradients()
    return dq, dk.to(key.dtype), dv.to(value.dtype)


def output_of_delta(out_gradient: Tensor, delta: Tensor) -> Tensor:
    """An output whose product with its gradient is Delta: all of it that a kernel's backward reads.

    Kernels take the output and compute Delta = rowsum(dO o O) themselves. ``dO * Delta / |dO|^2``
    has the same, is no longer than the output, and need not travel. In 16 bits what rounding has
    changed of the product is made up for where the gradient is largest.

    Args:
        out_gradient: ``[rows, b, a, dv]``.
        delta: ``[b, a, rows]``.

    Returns:
        ``[rows, b, a, dv]`` in the dtype of ``out_gradient``; 0 where the gradient is 0.
    """
    largest = out_gradient.abs().amax(-1, keepdim=True).to(delta.dtype)
    largest = largest.where(largest > 0, 1)
    unit = out_gradient.to(delta.dtype) / largest  # squares of small gradients would be 0
    squares = unit.square().sum(-1, keepdim=True)
    squares = squares.where(squares > 0, 1)
    per_unit = delta.permute(2, 0, 1).unsqueeze(-1) / largest
    out = (unit * (per_unit / squares)).to(out_gradient.dtype)
    at = unit.abs().argmax(-1, keepdim=True)
    missing = per_unit - (unit * out).sum(-1, keepdim=True)
    top = unit.gather(-1, at)
    top = top.where(top != 0, 1)
    return out.scatter_(-1, at, (out.gather(-1, at) + missing / top).to(out.dtype))
