"""2D attention: exact attention over head-parallel x ring ranks (LoongTrain, arXiv 2406.18485).

    forward     q, k, v   tokens -> heads, all-to-all in the head group
                out       ring of k, v among the head groups, merged by log-sum-exp
                          heads -> tokens
    backward    the same way: dO to heads; k, v round the ring again, dK, dV one hop behind, or
                q, dO and dQ where that is less; dQ, dK, dV to tokens

A head group of one rank makes it ring attention, a ring of one rank Ulysses. Tokens are in
Megatron's zigzag order over all ranks (:mod:`..token_layout`), which the exchange turns into the
ring's zigzag for any factorisation. The query heads of a head group are shared out, by one more or
less where they do not divide; a rank gets the key/value heads that its query heads look at, once
each: several ranks may work with the same one (:mod:`..softmax.shared_heads`).

Windows and packed documents are plans of rectangles (:mod:`..softmax.mask_plan`); where they leave
little of other blocks to be seen, those rows travel alone (:mod:`..communication.row_exchange`). A
sink enters after the ring (:mod:`..softmax.sink`).

Kept for the backward, per rank: q, k, v and out after the exchange, and the log-sum-exp. What is
sent: :mod:`.traffic`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..communication.agreement import GridAgreement
from ..communication.all_to_all import HeadExchange, Shares, even_shares, serving_shares
from ..communication.buffers import BufferPool
from ..communication.groups import GroupPlace
from ..communication.ring import GradientDtype, Ring
from ..communication.schedule import DoubleRing, Schedule
from ..communication.transport import DEFAULT_TIMEOUT_SECONDS, Staging
from ..errors import UserError, divisors, nearest_values
from ..memory.keep_attention import keep_rows_or_compute
from ..softmax.block_kernels import BlockKernel, choose_kernel
from ..softmax.mask_plan import Mask, MaskPlan
from ..softmax.ring_attention import (
    BackwardRing,
    ring_attention_backward,
    ring_attention_forward,
)
from ..softmax.score_edits import ScoreEdits
from ..softmax.shared_heads import StretchedKernel, stretches
from ..softmax.sink import sink_gradient
from ..token_layout import ZigzagGrid
from .changes import Dropout, ScoreChanges
from .inputs import check_inputs, check_sink, describe_inputs, describe_mask
from .masks import Boundaries, requested_mask

# Plans kept: of the rows of a micro-batch, and of layers with and without a window.
KEPT_PLANS = 16


class TwoDAttention:
    """2D attention over a fixed pair of process groups, with its buffers.

    Construction and every call are collective: all ranks of the grid make them in the same order.
    One object, or at least one pool, serves all layers; calls may be in flight at the same time.

    Args:
        head_group: the ranks that exchange heads for tokens, in order of their places; ``None`` for
            one rank.
        ring_group: the ranks among which keys and values circulate, in ring order; ``None`` for
            one rank. Rank ``c * hp + h`` of the sequence has place h and ring position c.
        gradient_group: a second group of the ring's ranks, on which dK and dV travel; over NCCL
            they then overlap with K and V.
        schedule: who sends which block to whom in the ring: a single ring if not given, or a
            :class:`~megatron_longseq.communication.DoubleRing`.
        lane_groups: groups for the lanes of the schedule, by lane, that share the ring's otherwise;
            over NCCL lanes on groups of their own are in flight side by side.
        buffers: a pool to share with other operators; an own one if not given.
        timeout_seconds: limit of every wait. NCCL waits on the GPU, not on the host: there the
            limit given to the process group when it was made applies.
        gradient_dtype: in which gradients add up and travel in the ring; fp32 (fp64 for fp64) if
            not given, ``"input"`` for the dtype of the inputs, which rounds once per hop.
        backward_ring: what goes round in the backward: ``"keys"``, with dK and dV behind them,
            ``"queries"``, with dO and dQ, or ``"auto"``, the one of fewer bytes.
        staging: CUDA tensors over gloo groups go through pinned host memory (``"auto"``).
        check_agreement: compare shapes and options across the ranks at every call. Turn it off only
            where something else guarantees that they agree.

    Raises:
        UserError: the groups do not form a grid, or the time limit is not positive.
    """

    def __init__(
        self,
        head_group: dist.ProcessGroup | None,
        ring_group: dist.ProcessGroup | None,
        *,
        gradient_group: dist.ProcessGroup | None = None,
        schedule: Schedule | None = None,
        lane_groups: Mapping[str, dist.ProcessGroup] | None = None,
        buffers: BufferPool | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        gradient_dtype: GradientDtype = None,
        backward_ring: BackwardRing = "auto",
        staging: Staging = "auto",
        check_agreement: bool = True,
    ) -> None:
        if not timeout_seconds > 0:
            raise UserError(f"timeout_seconds={timeout_seconds} must be a positive number")
        if backward_ring not in get_args(BackwardRing):
            raise UserError(
                f"backward_ring={backward_ring!r}: must be one of "
                f"{', '.join(get_args(BackwardRing))}"
            )
        self.buffers = buffers or BufferPool()
        self.heads = HeadExchange(
            head_group, self.buffers, timeout_seconds=timeout_seconds, staging=staging
        )
        self.ring = Ring(
            ring_group,
            self.buffers,
            schedule=schedule,
            lane_groups={
                **(lane_groups or {}),
                **({"gradients": gradient_group} if gradient_group is not None else {}),
            },
            timeout_seconds=timeout_seconds,
            gradient_dtype=gradient_dtype,
            staging=staging,
        )
        self.backward_ring: BackwardRing = backward_ring
        self._schedule = schedule
        self._agreement = GridAgreement(self.heads.place, self.ring.place, timeout_seconds)
        self._check_agreement = check_agreement
        self._plans: dict[tuple[Mask, int], MaskPlan] = {}
        if check_agreement:
            self._agreement.verify_grid()

    def __deepcopy__(self, _memo: dict[int, Any]) -> "TwoDAttention":
        # Copies of a model share groups and buffers, which cannot be copied.
        return self

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = True,
        window: int | None = None,
        prefix: int = 0,
        cu_seqlens: Boundaries | None = None,
        cu_seqlens_padded: Boundaries | None = None,
        sink: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        dropout: Dropout | None = None,
        softmax_scale: float | None = None,
        kernel: str = "auto",
    ) -> Tensor:
        """Attention of this rank's tokens to the whole sequence; see :func:`two_d_attention`."""
        ranks = self.heads.size * self.ring.size
        tokens, batch = (*query.shape, 1, 1)[:2]
        mask: Mask | UserError
        try:
            mask = requested_mask(
                causal=causal,
                window=window,
                prefix=prefix,
                cu_seqlens=cu_seqlens,
                cu_seqlens_padded=cu_seqlens_padded,
                total=tokens * ranks,
                batch=batch,
                ranks=ranks,
            )
        except UserError as error:
            mask = error
        changes = ScoreChanges(alibi_slopes, dropout)
        chosen = self._prepare(query, key, value, mask, sink, softmax_scale, kernel, changes)
        assert isinstance(mask, Mask)
        heads, kv_heads = query.shape[2], key.shape[2]
        query_shares = even_shares(heads, self.heads.size)
        parts = stretches(query_shares[self.heads.place.position], heads, kv_heads)
        how = _How(
            operator=self,
            kernel=chosen if len(parts) == 1 else StretchedKernel(chosen, parts),
            plan=self._plan(mask, tokens * self.heads.size),
            scale=query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale,
            query_shares=query_shares,
            key_shares=serving_shares(query_shares, heads, kv_heads),
            edits=changes.edits(query_shares[self.heads.place.position], heads, kv_heads, query),
        )
        return _TwoDAttentionFunction.apply(query, key, value, sink, how)

    def _plan(self, mask: Mask, rows: int) -> MaskPlan:
        """The plan of a mask for blocks of so many rows; layers of a batch share one."""
        known = (mask, rows)
        if known not in self._plans:
            while len(self._plans) >= KEPT_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[known] = MaskPlan(mask, self.ring.size, rows)
        return self._plans[known]

    def _prepare(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | UserError,
        sink: Tensor | None,
        softmax_scale: float | None,
        kernel: str,
        changes: ScoreChanges,
    ) -> BlockKernel:
        """Checks the inputs, here and across the ranks; all ranks raise or none does."""
        problem: UserError | None = None
        chosen: BlockKernel | None = None
        try:
            check_inputs(query, key, value, self.heads.size, softmax_scale)
            check_sink(sink, query)
            changes.check(query, kernel)
            if isinstance(mask, UserError):
                raise mask
            chosen = choose_kernel(kernel, query.dtype, query.device)
        except UserError as error:
            problem = error
        if self._check_agreement:
            self._agreement.verify(
                describe_inputs(query, key, value, sink)
                | describe_mask(mask)
                | changes.describe()
                | {
                    "softmax_scale": softmax_scale,
                    "kernel": chosen.name if chosen else kernel,
                    "schedule": self._schedule or "single ring",
                    "backward_ring": self.backward_ring,
                    "gradient_dtype": self.ring.gradient_dtype,
                    "problem": problem or "none",
                }
            )
        if problem is not None:
            raise problem
        assert chosen is not None
        return chosen


def two_d_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    head_group: dist.ProcessGroup | None,
    ring_group: dist.ProcessGroup | None,
    causal: bool = True,
    window: int | None = None,
    prefix: int = 0,
    cu_seqlens: Boundaries | None = None,
    cu_seqlens_padded: Boundaries | None = None,
    sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout: Dropout | None = None,
    softmax_scale: float | None = None,
    kernel: str = "auto",
    window_size: int | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    buffers: BufferPool | None = None,
) -> Tensor:
    """Exact softmax attention over a sequence split among head-parallel x ring ranks.

    A collective call: all ranks of the grid make it, forward and backward. For repeated calls keep
    a :class:`TwoDAttention`, or at least a pool of buffers.

    Args:
        query: ``[n, b, a, d]``: this rank's tokens in Megatron's zigzag order, the rank being
            ``c * hp + h`` for ring position c and place h; micro-batch; heads; width. fp64, fp32,
            bf16 or fp16.
        key: ``[n, b, g, d]``; g divides a.
        value: ``[n, b, g, dv]``; dv may differ from d.
        head_group: this rank's head group, of at most a ranks; where its size hp does not divide a,
            some ranks work on one head more than others. ``None`` for one rank.
        ring_group: this rank's ring. ``None`` for one rank.
        causal: a token sees itself and what comes before it; otherwise the whole sequence.
        window: sliding window: of what comes before it, a token sees the last ``window`` tokens
            only (``window_size[0]`` in Megatron and flash-attention).
        prefix: the first ``prefix`` tokens, of each document if there are some, are seen by all of
            it, also by tokens before them.
        cu_seqlens: packed documents: where each begins in the row and the last one ends, the same
            on every rank; b is 1. A token sees nothing of other documents. Documents may be cut
            anywhere. A list or a CPU tensor; one on a GPU costs a synchronisation.
        cu_seqlens_padded: the row is not one zigzag but one for each document, as Megatron packs by
            default: boundaries with padding, each distance a multiple of 2 x hp x ring, while
            ``cu_seqlens`` has the real lengths. Padding has output and gradient 0. Without padding,
            give ``cu_seqlens`` twice.
        sink: ``[a]``, one logit per query head that takes part in the softmax and has no value.
            Its gradient on a rank is that of the rank's rows and heads: the sum over all ranks of
            the grid is the whole.
        alibi_slopes: ``[a]``: a score is less by the slope of its head times the distance of query
            and key (ALiBi). No gradient. The plain torch kernel computes it, in tiles.
        dropout: of attention weights; likewise. The same seed drops the same weights in every
            layout.
        softmax_scale: factor of the scores; ``d ** -0.5`` if not given.
        kernel: ``"aten"``, ``"flash"``, ``"reference"``, or ``"auto"``; see
            :mod:`..softmax.block_kernels`.
        window_size: ranks of the inner rings of a double ring; divides the ring's size. A single
            ring if not given.
        timeout_seconds: limit of every wait; see :class:`TwoDAttention`.
        buffers: receive buffers to keep from call to call.

    Returns:
        ``[n, b, a, dv]`` in the dtype of the query. Gradients are exact and, for fixed groups,
        the same bits in every run; they cannot be differentiated again.

    Raises:
        UserError: the inputs do not fit, here or on another rank; on every rank alike.
        CommunicationError: a transfer failed or took too long.

    Source:
        LoongTrain, arXiv 2406.18485. Token order, way home of dK and dV, and merge: see
        ``docs/attention-2d-operator.md``.
    """
    schedule = None
    if window_size is not None:
        size = GroupPlace.of(ring_group).size
        if window_size < 1 or size % window_size:
            raise UserError(
                f"window_size={window_size}: must divide the ring's size {size}; nearest: "
                f"{nearest_values(window_size, divisors(size))}"
            )
        schedule = DoubleRing(window_size)
    operator = TwoDAttention(
        head_group,
        ring_group,
        schedule=schedule,
        buffers=buffers,
        timeout_seconds=timeout_seconds,
    )
    return operator(
        query,
        key,
        value,
        causal=causal,
        window=window,
        prefix=prefix,
        cu_seqlens=cu_seqlens,
        cu_seqlens_padded=cu_seqlens_padded,
        sink=sink,
        alibi_slopes=alibi_slopes,
        dropout=dropout,
        softmax_scale=softmax_scale,
        kernel=kernel,
    )


@dataclass(frozen=True)
class _How:
    """What one call computes by; the same in its backward.

    Attributes:
        query_shares, key_shares: the heads of each rank of the head group.
        edits: of the scores of this rank's heads.
    """

    operator: TwoDAttention
    kernel: BlockKernel
    plan: MaskPlan
    scale: float
    query_shares: Shares
    key_shares: Shares
    edits: ScoreEdits | None

    def to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """Exchanges heads for tokens; documents that are zigzags by themselves stay in turn.

        Args:
            tensors: of query heads; the second and the third, if there are such, of key heads.
        """
        exchanged = self.operator.heads.to_heads(*tensors, shares=self._shares(tensors))
        order = self._order(exchanged[0].device)
        return [t if order is None else t.index_select(0, order) for t in exchanged]

    def to_tokens(self, *tensors: Tensor) -> list[Tensor]:
        """The way back of :meth:`to_heads`; gradients of heads that several ranks used add up."""
        order = self._order(tensors[0].device)
        if order is not None:
            back = order.argsort()
            tensors = tuple(tensor.index_select(0, back) for tensor in tensors)
        return list(self.operator.heads.to_tokens(*tensors, shares=self._shares(tensors)))

    def _shares(self, tensors: tuple[Tensor, ...]) -> list[Shares]:
        return [self.query_shares, *[self.key_shares] * (len(tensors) - 1)]

    @property
    def heads_here(self) -> slice:
        """The query heads that this rank has after the exchange."""
        share = self.query_shares[self.operator.heads.place.position]
        return slice(share.start, share.stop)

    def _order(self, device: torch.device) -> Tensor | None:
        documents = self.plan.mask.documents
        if documents is None or not documents.zigzag:
            return None
        grid = ZigzagGrid(self.operator.heads.size, self.operator.ring.size)
        order = grid.documents_in_turn(documents.boundaries)
        return None if order is None else order.to(device)


class _TwoDAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, how: _How
    ) -> Tensor:
        q, k, v = how.to_heads(query, key, value)
        own_sink = None if sink is None else sink[how.heads_here]
        out, lse = keep_rows_or_compute(
            lambda rows: ring_attention_forward(
                q,
                k,
                v,
                ring=how.operator.ring,
                kernel=how.kernel,
                plan=how.plan,
                scale=how.scale,
                sink=own_sink,
                query_rows=rows,
                edits=how.edits,
            ),
            q.shape[0],
        )
        ctx.save_for_backward(q, k, v, out, lse, sink)
        ctx.how = how
        return how.to_tokens(out)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sink = ctx.saved_tensors
        how: _How = ctx.how
        (dout,) = how.to_heads(out_gradient)
        dsink = None
        if sink is not None and ctx.needs_input_grad[3]:
            here = how.heads_here
            dsink = torch.zeros_like(sink)
            dsink[here] = sink_gradient(dout, out, lse, sink[here]).to(sink.dtype)
        dq, dk, dv = ring_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            ring=how.operator.ring,
            kernel=how.kernel,
            plan=how.plan,
            scale=how.scale,
            moves=how.operator.backward_ring,
            edits=how.edits,
        )
        return *how.to_tokens(dq, dk, dv), dsink, None
