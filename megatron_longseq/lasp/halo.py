"""A short causal convolution along a sequence that is split among ranks.

    y_i = sum_{j = 0 .. w-1} weight[:, j] * x_{i - w + 1 + j}         per channel

A segment's first tokens need the last ``w - 1`` rows of the segment before it in the chain, its
halo: zeros before the first segment, unless rows are given. A rank sends ``b (w - 1) c`` elements
per segment to at most two neighbours, and as many gradients back, whatever the sequence's length.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..communication.buffers import BufferPool
from ..communication.collectives import Collectives
from ..communication.groups import GroupPlace
from ..communication.transport import DEFAULT_TIMEOUT_SECONDS, Channel, Message, Staging, Stream
from ..errors import UserError
from ..memory.keep_attention import keep_or_compute
from ..token_layout import Layout, SegmentChain

HALO = Stream("convolution halo", 5)


class CausalConvolution:
    """Depthwise causal convolutions over the ranks of a group. Make one and share it.

    All ranks of the group make every call, forward and backward, in the same order.

    Args:
        group: the ranks that share the sequence, in its order; ``None`` for a single process.
        layout: which segments a rank holds, see :class:`~megatron_longseq.token_layout.Layout`.
        timeout_seconds, staging: see :class:`~megatron_longseq.communication.transport.Channel`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        layout: Layout = "zigzag",
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        staging: Staging = "auto",
    ) -> None:
        self.place = GroupPlace.of(group)
        # One rank has the whole sequence: one segment, whatever the layout.
        whole = self.place.size == 1
        self.chain = SegmentChain(self.place.size, "contiguous" if whole else layout)
        self._channel = Channel(
            self.place, HALO, BufferPool(), timeout_seconds=timeout_seconds, staging=staging
        )
        self._collectives = Collectives(self.place, "convolution state", timeout_seconds)

    def __deepcopy__(self, _memo: dict[int, Any]) -> "CausalConvolution":
        # Copies of a model share groups and buffers, which cannot be copied.
        return self

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        initial_rows: Tensor | None = None,
        output_final_rows: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Convolves this rank's tokens.

        Args:
            x: ``[b, n, c]``: batch, this rank's tokens in its order, channels.
            weight: ``[c, w]``, of the dtype of ``x``; its last column is the token's own.
            initial_rows: ``[b, w - 1, c]`` before the first token; all ranks pass them or none,
                those of the rank with the first token count and have the gradient.
            output_final_rows: return the last ``w - 1`` rows of the sequence of ``x``.

        Returns:
            ``[b, n, c]``, and ``[b, w - 1, c]`` or ``None``: on every rank, differentiable on the
            one that has the last token.

        Raises:
            UserError: the inputs do not fit, or a segment is shorter than ``w - 1``.
            CommunicationError: a transfer failed or took too long.
        """
        halo = weight.shape[1] - 1
        self._check(x, weight, initial_rows)
        segments = x.unflatten(1, (self.chain.segments_per_rank, -1))
        extended = _Extend.apply(segments, initial_rows, halo, self)
        flat = extended.flatten(0, 1).transpose(1, 2)
        out = F.conv1d(flat, weight[:, None], groups=x.shape[2]).transpose(1, 2)
        final = self._final_rows(extended, halo) if output_final_rows else None
        return out.unflatten(0, segments.shape[:2]).flatten(1, 2), final

    def _final_rows(self, extended: Tensor, halo: int) -> Tensor:
        holder, index = self.chain.holder(self.chain.length - 1)
        rows = extended[:, index if self.place.position == holder else 0]
        # A copy: these rows are kept on, and a view would keep all tokens with them.
        rows = rows[:, rows.shape[1] - halo :].clone()
        if self.place.size == 1:
            return rows
        copy = self._collectives.broadcast(rows.detach().clone(), holder)
        return rows if self.place.position == holder else copy

    def _check(self, x: Tensor, weight: Tensor, initial_rows: Tensor | None) -> None:
        if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2]:
            raise UserError(
                f"x of shape {tuple(x.shape)} and weight of shape {tuple(weight.shape)}: expected "
                "[batch, tokens, channels] and [channels, width]"
            )
        halo, pieces = weight.shape[1] - 1, self.chain.segments_per_rank
        if x.shape[1] % pieces:
            raise UserError(
                f"{x.shape[1]} tokens on each rank: the zigzag layout gives a rank two segments of "
                f"equal length, so it must be even; nearest: {[x.shape[1] - 1, x.shape[1] + 1]}"
            )
        if self.chain.length > 1 and x.shape[1] // pieces < halo:
            raise UserError(
                f"a convolution of width {halo + 1} over segments of {x.shape[1] // pieces} tokens "
                f"({self.chain.length} in the sequence): a segment must have at least {halo}, so "
                f"the sequence at least {halo * self.chain.length} tokens; use fewer "
                "context-parallel ranks or a longer sequence"
            )
        expected = (x.shape[0], halo, x.shape[2])
        if initial_rows is not None and tuple(initial_rows.shape) != expected:
            raise UserError(
                f"initial_rows of shape {tuple(initial_rows.shape)}: expected [batch, width - 1, "
                f"channels] = {list(expected)}"
            )

    def pass_on(self, rows: Tensor, *, reverse: bool = False) -> Tensor:
        """Each segment's ``rows`` go to the next one in the chain, or to the one before.

        Args:
            rows: ``[b, m, w - 1, c]``, per segment of this rank.
            reverse: against time.

        Returns:
            What arrived, in the same shape; zeros where the chain begins (or ends).
        """
        chain, here = self.chain, self.place.position
        arrived = torch.zeros_like(rows)
        incoming: list[tuple[int, Tensor]] = []
        receives, sends = [], []
        step = -1 if reverse else 1
        for index, position in enumerate(chain.positions(here)):
            source, target = position - step, position + step
            if 0 <= source < chain.length:
                rank, other = chain.holder(source)
                if rank == here:
                    arrived[:, index] = rows[:, other]
                else:
                    buffer = torch.empty_like(rows[:, index], memory_format=torch.contiguous_format)
                    incoming.append((index, buffer))
                    receives.append(Message(buffer, self.place.ranks[rank]))
            if 0 <= target < chain.length and chain.holder(target)[0] != here:
                rank = chain.holder(target)[0]
                sends.append(Message(rows[:, index].contiguous(), self.place.ranks[rank]))
        where = "the way back" if reverse else "the way forward"
        exchange = self._channel.exchange(receives=receives, sends=sends, step=where)
        exchange.wait_received()
        for index, buffer in incoming:
            arrived[:, index] = buffer
        exchange.wait_sent()
        return arrived


class _Extend(torch.autograd.Function):
    """``[b, m, n, c]`` to ``[b, m, w - 1 + n, c]``: each segment behind its halo."""

    @staticmethod
    def forward(
        ctx: Any,
        segments: Tensor,
        initial_rows: Tensor | None,
        halo: int,
        convolution: CausalConvolution,
    ) -> Tensor:
        ctx.halo, ctx.convolution = halo, convolution
        chain, here = convolution.chain, convolution.place.position
        length = segments.shape[2]
        ctx.first = next((i for i, p in enumerate(chain.positions(here)) if p == 0), None)
        ctx.initial_dtype = None if initial_rows is None else initial_rows.dtype
        if chain.length == 1 or halo == 0:
            before = segments.new_zeros(*segments.shape[:2], halo, segments.shape[3])
        else:
            # Where a layer is recomputed its halo may have been kept: then it is not passed again.
            (before,) = keep_or_compute(
                lambda: (convolution.pass_on(segments[:, :, length - halo :]),)
            )
        if initial_rows is not None and ctx.first is not None:
            before = before.clone()
            before[:, ctx.first] = initial_rows
        return torch.cat((before, segments), 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        halo, convolution = ctx.halo, ctx.convolution
        before, own = gradient[:, :, :halo], gradient[:, :, halo:]
        initial = None
        if ctx.initial_dtype is not None:
            initial = torch.zeros_like(before[:, 0], dtype=ctx.initial_dtype)
            if ctx.first is not None:
                initial.copy_(before[:, ctx.first])
        if convolution.chain.length > 1 and halo > 0:
            back = convolution.pass_on(before, reverse=True)
            own = own.clone()
            own[:, :, own.shape[2] - halo :] += back
        return own, initial, None, None
