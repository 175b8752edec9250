"""Forward and backward of linear attention over the ranks of a group, in the order that overlaps.

    forward     1 the maps (A, X) of this rank's segments; 2 their scan starts; 3 what the tokens
                read of their own segment; 4 the incoming states are waited for; 5 what is read of
                them is added
    backward    the same with (A^T, Y), against time

What is kept for backward: the inputs, the state that entered each segment, and where documents
start. So backward scans once, as forward does; all other states are rebuilt from these.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..communication.collectives import Collectives
from ..communication.scan import Scan
from ..memory.keep_attention import keep_results, kept_results
from .chunk_kernels import ChunkKernel
from .segments import Segments


@dataclass(frozen=True)
class Plan:
    """What a call does, apart from its tensors.

    Attributes:
        kernel: does this rank's part.
        scan: over the chain of segments; ``None`` where no state passes a segment's end.
        collectives: of the same ranks.
        segments: on this rank.
        first, last: which of them is at the start, and at the end, of the chain; ``None``: none.
        last_holder: position in the group of the rank that has the end of the chain.
        starts: of documents, see :class:`~.segments.Segments`.
        scale: factor of the output.
        reverse: run against time: tokens of a segment in reverse order, and so the scan.
        out_dtype: of the output.
        output_final_state: whether the state after the last token is wanted, on every rank.
    """

    kernel: ChunkKernel
    scan: Scan | None
    collectives: Collectives
    segments: int
    first: int | None
    last: int | None
    last_holder: int
    starts: Tensor | None
    scale: float
    reverse: bool
    out_dtype: torch.dtype
    output_final_state: bool

    def cut(self, tensor: Tensor) -> Tensor:
        """``[b, tokens, ...]`` to ``[b, m, n, ...]``, in the order in which states pass."""
        cut = tensor.unflatten(1, (self.segments, -1))
        return cut.flip(2) if self.reverse else cut

    def join(self, tensor: Tensor) -> Tensor:
        """The inverse of :meth:`cut`."""
        return (tensor.flip(2) if self.reverse else tensor).flatten(1, 2)

    def inputs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
    ) -> Segments:
        """The tensors of a call, ``[b, tokens, ...]``, as segments."""
        if log_decay is not None and log_decay.dim() > 1:
            log_decay = self.cut(log_decay)
        return Segments(
            self.cut(query),
            self.cut(key),
            self.cut(value),
            log_decay,
            None if beta is None else self.cut(beta),
            self.starts,
            self.scale,
        )

    def hidden_seconds(self, flops: float) -> float | None:
        """How long the work beside a scan takes, by constants alone: the same on every rank."""
        assert self.scan is not None
        costs = self.scan.costs
        return flops / costs.flops_per_second if costs.hidden_seconds is None else None

    def final_everywhere(self, after: Tensor) -> Tensor:
        """The last of the chain's states ``after`` each segment, ``[b, m, h, d, e]``, for all."""
        last = after[:, 0 if self.last is None else self.last]
        return self.collectives.broadcast(last.contiguous(), self.last_holder)

    def at_end(self, state: Tensor | None, index: int | None, segments: Segments) -> Tensor | None:
        """``[b, m, h, d, e]``, zero but for ``state [b, h, d, e]`` at segment ``index``."""
        if state is None or index is None:
            return None
        states = state.new_zeros(segments.state_shape, dtype=segments.state_dtype)
        states[:, index] = state
        return states


class LinearAttentionFunction(torch.autograd.Function):
    """``(query, key, value, log_decay, beta, initial_state, plan) -> (out, final state or None)``.

    The final state is differentiable on the rank that has the end of the chain; elsewhere it is a
    copy that is not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        initial_state: Tensor | None,
        plan: Plan,
    ) -> tuple[Tensor, Tensor | None]:
        segments = plan.inputs(query, key, value, log_decay, beta)
        entering = plan.at_end(initial_state, plan.first, segments)
        if plan.scan is None:
            out, after = plan.kernel.intra(segments, dtype=plan.out_dtype, state=entering)
            final = plan.final_everywhere(after) if plan.output_final_state else None
        else:
            # Where a layer is recomputed its states may have been kept: then none travel again.
            kept = kept_results()
            if kept is None:
                scan = plan.scan.start(
                    plan.kernel.summary(segments),
                    reverse=plan.reverse,
                    initial_state=None if entering is None else entering[:, plan.first],
                    total="everywhere" if plan.output_final_state else "none",
                    hidden_seconds=plan.hidden_seconds(segments.intra_flops),
                )
            out, _ = plan.kernel.intra(segments, dtype=segments.state_dtype)
            if kept is None:
                scanned = scan.wait()
                total = () if scanned.total is None else (scanned.total,)
                kept = torch.stack(scanned.states, 1), *total
                keep_results(*kept)
            entering, final = kept[0], kept[1] if len(kept) > 1 else None
            plan.kernel.apply(segments, out, entering)
        ctx.save_for_backward(query, key, value, log_decay, beta, entering)
        ctx.plan, ctx.device_type = plan, query.device.type
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        ctx.set_materialize_grads(False)
        result = plan.join(out).to(plan.out_dtype)
        if final is not None and plan.last is None:
            ctx.mark_non_differentiable(final)
        return result, final

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, out_gradient: Tensor | None, final_gradient: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        # As in forward, whatever encloses the call of backward.
        with torch.autocast(ctx.device_type, enabled=False):
            return _backward(ctx, out_gradient, final_gradient)


def _backward(
    ctx: Any, out_gradient: Tensor | None, final_gradient: Tensor | None
) -> tuple[Tensor | None, ...]:
    plan: Plan = ctx.plan
    query, key, value, log_decay, beta, entering = ctx.saved_tensors
    segments = plan.inputs(query, key, value, log_decay, beta)
    if out_gradient is None:
        shape = *query.shape[:2], segments.out_heads, value.shape[3]
        out_gradient = query.new_zeros(()).expand(shape)
    dout = plan.cut(out_gradient)
    leaving = plan.at_end(final_gradient, plan.last, segments)
    gates = ctx.needs_input_grad[3]
    if plan.scan is None:
        result = plan.kernel.d_intra(
            segments, dout, entering, dtype=query.dtype, state_gradient=leaving, gates=gates
        )
    else:
        scan = plan.scan.start(
            plan.kernel.d_summary(segments, dout),
            reverse=not plan.reverse,
            initial_state=None if leaving is None else leaving[:, plan.last],
            # Five products with the scores and five with states, in place of two and two.
            hidden_seconds=plan.hidden_seconds(2.5 * segments.intra_flops),
        )
        result = plan.kernel.d_intra(
            segments, dout, entering, dtype=segments.state_dtype, gates=gates
        )
        arrived = torch.stack(scan.wait().states, 1)
        plan.kernel.d_apply(segments, result, entering, arrived)
    log_decay_gradient, initial_gradient = result.log_decay, None
    if log_decay_gradient is not None and log_decay_gradient.dim() > 1:
        log_decay_gradient = plan.join(log_decay_gradient)
    if ctx.initial_dtype is not None:
        # It enters where the chain begins and nowhere else.
        initial_gradient = torch.zeros_like(result.state[:, 0], dtype=ctx.initial_dtype)
        if plan.first is not None:
            initial_gradient.copy_(result.state[:, plan.first])
    return (
        plan.join(result.query).to(query.dtype),
        plan.join(result.key).to(key.dtype),
        plan.join(result.value).to(value.dtype),
        None if log_decay_gradient is None else log_decay_gradient.to(log_decay.dtype),
        None if result.beta is None else plan.join(result.beta).to(beta.dtype),
        initial_gradient,
        None,
    )
