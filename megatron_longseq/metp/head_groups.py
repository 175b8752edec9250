"""Self attention with its weights circulating: one head group after the other, on all ranks alike.

Every rank keeps its tokens. The outer loop brings the weights of one head group to all ranks; each
computes query, key and value of its own tokens for these heads; in the inner loop keys and values
of that group go round, as in ring attention; the output projection of the group is added up.

    for the head group of each weight shard g:               outer, in lock-step
        q, k, v = to_heads(x W_qkv,g)                         local tokens, heads of group g
        o, lse  = ring attention of q to all k, v             inner ring
        y += o W_proj,g

Saved for backward: x, and o and lse of every group. Backward recomputes q, k, v of a group and
never attention itself; keys and values go round again with their gradients one hop behind, and the
weight gradients of a group are summed at its owner while the next group is worked on.

Nothing of the whole sequence or of all heads exists at a time but x, o, y and their gradients. With
``p`` ranks, q, k and v are ``1 / p^2`` of those of one process, a block of scores ``1 / p^3``.

Source: P. Liang et al., FITEE 26(5), 2025, doi 10.1631/FITEE.2400602; causal balance, grouped
queries, position embeddings and backward are derived in ``docs/metp.md``.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from ..communication.buffers import BufferPool
from ..communication.ring import Ring, accumulation_dtype
from ..communication.transport import DEFAULT_TIMEOUT_SECONDS, Staging
from ..memory.keep_attention import keep_or_compute
from ..softmax.block_kernels import BlockKernel
from ..softmax.mask_plan import Mask, MaskPlan
from ..softmax.ring_attention import ring_attention_backward, ring_attention_forward
from .lockstep import OwnerReduce, ShardBroadcast
from .products import add_product, returned_gradient, without_autocast

# Mixed query, key and value of a head group [rows, b, width] -> query, key, value [rows, b, .., d]
ToHeads = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class HeadGroups:
    """How one call computes.

    Attributes:
        to_heads: mixed query, key and value ``[rows, b, width]`` of the heads of one step ->
            query ``[rows, b, a, d]``, key ``[rows, b, g, d]`` and value ``[rows, b, g, dv]``, with
            norms and position embeddings of this rank's tokens applied. Differentiable.
        kernel: of one block.
        causal: a token sees itself and what comes before it; otherwise everything.
        scale: factor of the scores.
        per_step: weight shards per outer step; divides the number of ranks. Key/value heads must
            not be torn: at least ``ranks / kv_heads`` if there are fewer of them than ranks.
        fused_gradients: add the weight gradients to ``main_grad``.
        parameters: what ``to_heads`` reads that needs a gradient (norm weights). They are
            replicated; their gradients are those of this rank's tokens.
    """

    to_heads: ToHeads
    kernel: BlockKernel
    causal: bool
    scale: float
    per_step: int = 1
    fused_gradients: bool = False
    parameters: tuple[Tensor, ...] = ()


class HeadGroupAttention:
    """The operator over fixed groups, with its buffers; one serves all layers.

    Args:
        weight_group: the ranks that own a weight shard each; ``None`` for one rank.
        kv_group: the ranks among which the tokens are split, in zigzag order: rank i of N holds
            pieces i and ``2 N - 1 - i`` of ``2 N``. Usually the same ranks as ``weight_group``.
        reduce_group: the ranks of ``weight_group`` once more, for sums of weight gradients.
        kv_gradient_group: the ranks of ``kv_group`` once more, for dK and dV; over NCCL they then
            overlap with K and V.
        buffers, timeout_seconds, staging: see :class:`.matmul_chain.RingMatmulChain`.
        gradient_dtype: of the weight gradients and of dK and dV on their way; fp32 if not given.
    """

    def __init__(
        self,
        weight_group: dist.ProcessGroup | None,
        kv_group: dist.ProcessGroup | None,
        reduce_group: dist.ProcessGroup | None,
        *,
        kv_gradient_group: dist.ProcessGroup | None = None,
        buffers: BufferPool | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        gradient_dtype: torch.dtype | None = None,
        staging: Staging = "auto",
    ) -> None:
        self.buffers = buffers or BufferPool()
        self.shards = ShardBroadcast(weight_group, self.buffers, timeout_seconds=timeout_seconds)
        self.kv_ring = Ring(
            kv_group,
            self.buffers,
            lane_groups={"gradients": kv_gradient_group} if kv_gradient_group is not None else None,
            timeout_seconds=timeout_seconds,
            gradient_dtype=gradient_dtype,
            staging=staging,
        )
        self._reduce_group = reduce_group
        self._gradient_dtype = gradient_dtype
        self._timeout_seconds = timeout_seconds

    def __deepcopy__(self, _memo: dict[int, Any]) -> "HeadGroupAttention":
        # Copies of a model share groups and buffers, which cannot be copied.
        return self

    def __call__(
        self,
        x: Tensor,
        qkv_weight: Tensor,
        qkv_bias: Tensor | None,
        projection_weight: Tensor,
        heads: HeadGroups,
    ) -> Tensor:
        """Self attention of this rank's tokens to the whole sequence, projected.

        Args:
            x: ``[rows, b, h]``, this rank's tokens: its early piece, then its late piece.
            qkv_weight: ``[width, h]``, this rank's shard of the weight of query, key and value.
            qkv_bias: ``[width]``, travels with it.
            projection_weight: ``[h, a d / p]``, this rank's columns of the output projection.
            heads: how to compute.

        Returns:
            ``[rows, b, h]`` in the dtype of ``x``, without the bias of the projection.
        """
        return _HeadGroupFunction.apply(
            x, qkv_weight, qkv_bias, projection_weight, self, heads, *heads.parameters
        )

    def reduce(self, like: Sequence[Tensor]) -> OwnerReduce:
        """The sums of weight gradients of one backward."""
        return OwnerReduce(
            self._reduce_group,
            self.buffers,
            like,
            timeout_seconds=self._timeout_seconds,
            dtype=self._gradient_dtype,
        )


class _HeadGroupFunction(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        qkv_weight: Tensor,
        qkv_bias: Tensor | None,
        projection: Tensor,
        operator: HeadGroupAttention,
        heads: HeadGroups,
        *parameters: Tensor,
    ) -> Tensor:
        # Where a layer is recomputed this may have been kept: then nothing circulates again.
        total, *kept = keep_or_compute(
            lambda: _attend(x, qkv_weight, qkv_bias, projection, operator, heads)
        )
        outputs, sums = kept[: len(kept) // 2], kept[len(kept) // 2 :]
        # The input as it came: Megatron's norm recompute frees and refills its very storage.
        ctx.save_for_backward(x, qkv_weight, qkv_bias, projection, *outputs, *sums)
        ctx.operator, ctx.heads, ctx.steps = operator, heads, len(outputs)
        return total.view(*x.shape[:2], -1)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, qkv_weight, qkv_bias, projection, *rest = ctx.saved_tensors
        operator: HeadGroupAttention = ctx.operator
        heads: HeadGroups = ctx.heads
        outputs, sums = rest[: ctx.steps], rest[ctx.steps :]
        needed = ctx.needs_input_grad
        # The very tensors that to_heads uses: what is saved may come back as another object.
        parameters = [p for p, need in zip(heads.parameters, needed[6:], strict=True) if need]
        rows = x.reshape(-1, x.shape[-1])
        dy = out_gradient.reshape(len(rows), -1)
        dx = torch.empty_like(rows, dtype=accumulation_dtype(x.dtype))
        parameter_sums = [torch.zeros_like(p, dtype=dx.dtype) for p in parameters]
        shard = _shard(qkv_weight, qkv_bias, projection)
        width, columns = qkv_weight.shape[0], projection.shape[1]
        trains = any(needed[1:4])
        with operator.reduce(shard) if trains else nullcontext() as reduce:
            for step, (first, shards) in enumerate(
                operator.shards.visit(*shard, per_step=heads.per_step)
            ):
                out, lse = outputs[step], sums[step]
                mixed = _mixed(x, shards, qkv_bias).requires_grad_()
                with torch.enable_grad():
                    query, key, value = heads.to_heads(mixed)
                dout = _side_by_side([dy @ weight for *_, weight in shards]).view_as(out)
                dq, dk, dv = ring_attention_backward(
                    dout,
                    query.detach(),
                    key.detach(),
                    value.detach(),
                    out,
                    lse,
                    ring=operator.kv_ring,
                    kernel=heads.kernel,
                    plan=MaskPlan(Mask(heads.causal), operator.kv_ring.size, len(query)),
                    scale=heads.scale,
                )
                del dout
                dmixed, *dparameters = torch.autograd.grad(
                    (query, key, value), (mixed, *parameters), (dq, dk, dv)
                )
                del query, key, value, dq, dk, dv, mixed
                for sum_, part in zip(parameter_sums, dparameters, strict=True):
                    sum_ += part
                dmixed = dmixed.view(len(rows), -1)
                flat = out.reshape(len(rows), -1)
                for index, (weight, *_) in enumerate(shards):
                    part = dmixed[:, index * width : (index + 1) * width]
                    add_product(dx, part, weight, first=first + index == 0)
                    if reduce is not None:
                        gradients = [
                            part.t() @ rows,
                            dy.t() @ flat[:, index * columns : (index + 1) * columns],
                        ]
                        if qkv_bias is not None:
                            gradients.insert(1, part.sum(0, dtype=dx.dtype))
                        reduce.add(first + index, *gradients)
            home = reduce.home() if reduce is not None else ()
        fused, totals = heads.fused_gradients, iter(parameter_sums)
        return (
            dx.to(x.dtype).view_as(x),
            returned_gradient(qkv_weight, home[0], fused=fused) if needed[1] else None,
            home[1].to(qkv_bias.dtype) if qkv_bias is not None and needed[2] else None,
            returned_gradient(projection, home[-1], fused=fused) if needed[3] else None,
            None,
            None,
            *(
                next(totals).to(parameter.dtype) if need else None
                for parameter, need in zip(heads.parameters, needed[6:], strict=True)
            ),
        )


def _attend(
    x: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    projection: Tensor,
    operator: HeadGroupAttention,
    heads: HeadGroups,
) -> tuple[Tensor, ...]:
    """The projected output ``[rows b, h]``; attention's output, then its log-sum-exp, per step."""
    columns = projection.shape[1]
    total = x.new_empty(
        x.shape[0] * x.shape[1], projection.shape[0], dtype=accumulation_dtype(x.dtype)
    )
    outputs: list[Tensor] = []
    sums: list[Tensor] = []
    shard = _shard(qkv_weight, qkv_bias, projection)
    for first, shards in operator.shards.visit(*shard, per_step=heads.per_step):
        query, key, value = heads.to_heads(_mixed(x, shards, qkv_bias))
        out, lse = ring_attention_forward(
            query,
            key,
            value,
            ring=operator.kv_ring,
            kernel=heads.kernel,
            plan=MaskPlan(Mask(heads.causal), operator.kv_ring.size, len(query)),
            scale=heads.scale,
        )
        del query, key, value
        flat = out.reshape(total.shape[0], -1)
        for index, (*_, weight) in enumerate(shards):
            part = flat[:, index * columns : (index + 1) * columns]
            add_product(total, part, weight.t(), first=first + index == 0)
        outputs.append(out)
        sums.append(lse)
    return total.to(x.dtype), *outputs, *sums


def _shard(qkv_weight: Tensor, qkv_bias: Tensor | None, projection: Tensor) -> tuple[Tensor, ...]:
    if qkv_bias is None:
        return qkv_weight, projection
    return qkv_weight, qkv_bias, projection


def _mixed(x: Tensor, shards: Sequence[tuple[Tensor, ...]], qkv_bias: Tensor | None) -> Tensor:
    """``[rows, b, width * shards]``: query, key and value of the heads of these shards, mixed."""
    biased = qkv_bias is not None
    return _side_by_side([linear(x, s[0], s[1] if biased else None) for s in shards])


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
