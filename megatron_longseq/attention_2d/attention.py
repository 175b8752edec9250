"""2D attention: exact attention over head-parallel x ring ranks (LoongTrain, arXiv 2406.18485).

    forward     q, k, v   tokens -> heads, all-to-all in the head group
                out       ring of k, v among the head groups, merged by log-sum-exp
                          heads -> tokens
    backward    the same way: dO to heads; k, v round the ring again, dK, dV one hop behind;
                dQ, dK, dV to tokens

A head group of one rank makes it ring attention, a ring of one rank Ulysses. Tokens are in
Megatron's zigzag order over all ranks (:mod:`..token_layout`), which the exchange turns into the
ring's zigzag for any factorisation. Fewer key/value heads than head-parallel ranks: each counts
``lcm(g, hp) / g`` times, and no query head is parted from its own.

Kept for the backward, per rank: q, k, v and out after the exchange, and the log-sum-exp. What is
sent: :mod:`.traffic`.
"""

from collections.abc import Mapping
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..communication.agreement import GridAgreement
from ..communication.all_to_all import HeadExchange
from ..communication.buffers import BufferPool
from ..communication.groups import GroupPlace
from ..communication.ring import Ring
from ..communication.schedule import DoubleRing, Schedule
from ..communication.transport import DEFAULT_TIMEOUT_SECONDS, Staging
from ..errors import UserError, divisors, nearest_values
from ..memory.keep_attention import keep_rows_or_compute
from ..softmax.block_kernels import BlockKernel, choose_kernel
from ..softmax.ring_attention import ring_attention_backward, ring_attention_forward
from .inputs import check_inputs, describe_inputs


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
        gradient_dtype: in which dK and dV add up and travel; fp32 (fp64 for fp64) if not given.
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
        gradient_dtype: torch.dtype | None = None,
        staging: Staging = "auto",
        check_agreement: bool = True,
    ) -> None:
        if not timeout_seconds > 0:
            raise UserError(f"timeout_seconds={timeout_seconds} must be a positive number")
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
        self._schedule = schedule
        self._agreement = GridAgreement(self.heads.place, self.ring.place, timeout_seconds)
        self._check_agreement = check_agreement
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
        softmax_scale: float | None = None,
        kernel: str = "auto",
    ) -> Tensor:
        """Attention of this rank's tokens to the whole sequence; see :func:`two_d_attention`."""
        chosen = self._prepare(query, key, value, causal, softmax_scale, kernel)
        scale = query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        return _TwoDAttentionFunction.apply(query, key, value, self, chosen, causal, scale)

    def copies(self, key: Tensor) -> int:
        """How often each head of ``key`` counts, so that every rank of a head group gets some."""
        return lcm(key.shape[2], self.heads.size) // key.shape[2]

    def _prepare(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        softmax_scale: float | None,
        kernel: str,
    ) -> BlockKernel:
        """Checks the inputs, here and across the ranks; all ranks raise or none does."""
        problem: UserError | None = None
        chosen: BlockKernel | None = None
        try:
            check_inputs(query, key, value, self.heads.size, softmax_scale)
            chosen = choose_kernel(kernel, query.dtype, query.device)
        except UserError as error:
            problem = error
        if self._check_agreement:
            self._agreement.verify(
                describe_inputs(query, key, value)
                | {
                    "causal": causal,
                    "softmax_scale": softmax_scale,
                    "kernel": chosen.name if chosen else kernel,
                    "schedule": self._schedule or "single ring",
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
        head_group: this rank's head group; its size hp divides a. ``None`` for one rank.
        ring_group: this rank's ring. ``None`` for one rank.
        causal: a token sees itself and what comes before it; otherwise the whole sequence.
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
    return operator(query, key, value, causal=causal, softmax_scale=softmax_scale, kernel=kernel)


class _TwoDAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        operator: TwoDAttention,
        kernel: BlockKernel,
        causal: bool,
        scale: float,
    ) -> Tensor:
        copies = operator.copies(key)
        q, k, v = operator.heads.to_heads(query, key, value, copies=(1, copies, copies))
        out, lse = keep_rows_or_compute(
            lambda rows: ring_attention_forward(
                q,
                k,
                v,
                ring=operator.ring,
                kernel=kernel,
                causal=causal,
                scale=scale,
                query_rows=rows,
            ),
            q.shape[0],
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.operator, ctx.kernel, ctx.copies = operator, kernel, copies
        ctx.causal, ctx.scale = causal, scale
        return operator.heads.to_tokens(out)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        heads, ring = ctx.operator.heads, ctx.operator.ring
        (dout,) = heads.to_heads(out_gradient)
        dq, dk, dv = ring_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            ring=ring,
            kernel=ctx.kernel,
            causal=ctx.causal,
            scale=ctx.scale,
        )
        gradients = heads.to_tokens(dq, dk, dv, copies=(1, ctx.copies, ctx.copies))
        return *gradients, None, None, None, None
