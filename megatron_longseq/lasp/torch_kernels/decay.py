"""Decay inside chunks: what reaches which token, by how much, and the adjoint of all that.

With ``b`` the running sum of the log decay in a chunk of ``c`` tokens, token i reads what token
``j <= i`` wrote with weight ``exp(b_i - b_j)`` (all of it, or channel by channel), the chunk's
incoming state with ``exp(b_i)``, and leaves what it wrote to the outgoing state with
``exp(b_c - b_j)``. All of these are <= 1: differences are taken before the exponential. Where
documents start, weights across a start are zero; ``b`` itself runs on, as differences inside a
document do not feel it. It is summed and subtracted in fp64: where one token forgets all, the
difference of two later ones is small beside the sums it is taken of.

Tensors are ``[..., c, width]``, leading dims over segments, heads and chunks. The rows of a query
are ``repeats`` times those of the chunk, where several query heads read one state.
"""

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ..segments import LEAST_LOG_DECAY

# Above this many rows, decay per channel goes through a reference token in between, whose two
# factors are both <= 1; inside, every pair of rows has its own exponential per channel.
SUB_BLOCK = 16


class Decay(Protocol):
    """The decay of a run of chunks.

    Attributes:
        from_start: ``exp(b_i)``, ``[..., c, 1 or d]``; zero behind a document's start.
        to_end: ``exp(b_c - b_j)``, likewise; zero before the last document.
        across: ``exp(b_c)``, ``[..., 1 or d, 1]``, factor of the state; zero if a document starts.
    """

    from_start: Tensor
    to_end: Tensor
    across: Tensor

    def pairs(self, x: Tensor, y: Tensor, *, strict: bool = False) -> Tensor:
        """``sum_m x_im y_jm exp(b_im - b_jm)`` for ``i >= j`` (``i > j`` if strict), else 0.

        Args:
            x: ``[..., repeats * c, d]``; y: ``[..., c, d]``.

        Returns:
            ``[..., repeats * c, c]``.
        """

    def pairs_gradient(
        self, gradient: Tensor, x: Tensor, y: Tensor, *, strict: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The gradients of x and y of :meth:`pairs`, given that of its result."""

    def per_gate(self, product: Tensor) -> Tensor:
        """Sums ``[..., rows, d]`` over what shares a gate: ``[..., rows, 1 or d]``."""

    def gate_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of the log decay, from that of b: both ``[..., c, 1 or d]``."""


def rows(tensor: Tensor, repeats: int) -> Tensor:
    """``[..., c, w]`` to ``[..., repeats * c, w]``: the chunk's rows again for each query head."""
    if repeats == 1:
        return tensor
    return tensor.unsqueeze(-3).expand(*tensor.shape[:-2], repeats, -1, -1).flatten(-3, -2)


class _Windows:
    """What tokens of a chunk see of one another, of the state before it and of the one after."""

    def __init__(self, log_decay: Tensor, starts: Tensor | None) -> None:
        self.starts = starts
        self._log_decay = log_decay
        self._least = LEAST_LOG_DECAY[log_decay.dtype]
        self.total = log_decay.clamp(min=self._least).cumsum(-2, dtype=torch.float64)
        self.from_start = self._exp(self.total)
        self.to_end = self._exp(self.total[..., -1:, :] - self.total)
        self.across = self.from_start[..., -1:, :].mT
        if starts is not None:
            document = starts.cumsum(-1)
            last = document[..., -1:]
            self.from_start = self.from_start * (document == 0)[..., None]
            self.to_end = self.to_end * (document == last)[..., None]
            self.across = self.across * (last == 0)[..., None]

    def _exp(self, difference: Tensor) -> Tensor:
        """The factor, in the dtype of the gates, of a log decay that is in fp64."""
        return difference.to(self._log_decay.dtype).exp()

    @cached_property
    def visible(self) -> Tensor:
        """Boolean ``[..., c, c]``: which tokens j <= i of its document token i sees."""
        chunk = self.total.shape[-2]
        visible = torch.ones(chunk, chunk, dtype=torch.bool, device=self.total.device).tril()
        if self.starts is None:
            return visible
        document = self.starts.cumsum(-1)
        return visible & (document[..., :, None] == document[..., None, :])

    def gate_gradient(self, gradient: Tensor) -> Tensor:
        """Token i's gate is in b of all tokens from i on; behind its document they cancel.

        One that forgets all has no gradient: nothing passes that it could let through.
        """
        gate = self.visible.to(gradient.dtype).mT @ gradient
        gate = gate.masked_fill(self._log_decay <= self._least, 0)
        if self.starts is not None:
            gate = gate.masked_fill(self.starts[..., None], 0)
        return gate


class ScalarDecay(_Windows):
    """One log decay per token and head.

    Args:
        log_decay: ``[..., c, 1]``.
        starts: boolean ``[..., c]``, where documents start.
    """

    @cached_property
    def _weights(self) -> Tensor:
        # Above the diagonal the difference is positive: never let it reach the exponential.
        return self._exp((self.total - self.total.mT).clamp_(max=0)) * self.visible

    def _rows(self, repeats: int, strict: bool) -> Tensor:
        return rows(self._weights.tril(-1) if strict else self._weights, repeats)

    def pairs(self, x: Tensor, y: Tensor, *, strict: bool = False) -> Tensor:
        return (x @ y.mT).mul_(self._rows(x.shape[-2] // y.shape[-2], strict))

    def pairs_gradient(
        self, gradient: Tensor, x: Tensor, y: Tensor, *, strict: bool = False
    ) -> tuple[Tensor, Tensor]:
        weighted = gradient * self._rows(x.shape[-2] // y.shape[-2], strict)
        return weighted @ y, weighted.mT @ x

    def per_gate(self, product: Tensor) -> Tensor:
        return product.sum(-1, keepdim=True)


class ChannelDecay(_Windows):
    """One log decay per token, head and key channel.

    Args:
        log_decay: ``[..., c, d]``.
        starts: boolean ``[..., c]``, where documents start.
    """

    def _blocks(self) -> list[slice]:
        chunk = self.total.shape[-2]
        return [slice(low, min(low + SUB_BLOCK, chunk)) for low in range(0, chunk, SUB_BLOCK)]

    def _through_reference(self, block: slice) -> tuple[Tensor, Tensor]:
        """Factors of the block's rows, and of all earlier rows, by way of the row in between."""
        reference = self.total[..., block.start - 1 : block.start, :]
        after = self._exp(self.total[..., block, :] - reference).unsqueeze(-3)
        return after, self._exp(reference - self.total[..., : block.start, :])

    def _within(self, block: slice) -> Tensor:
        """``exp(b_im - b_jm)`` of the rows of a block: ``[..., i, j, m]``."""
        first = slice(block.start, block.start + 1)
        # Sums of a few gates only: fp64 for every pair of rows would take half as long again.
        total = (self.total[..., block, :] - self.total[..., first, :]).to(self._log_decay.dtype)
        return (total.unsqueeze(-2) - total.unsqueeze(-3)).clamp_(max=0).exp_()

    def _mask(self, tensor: Tensor, strict: bool) -> Tensor:
        return tensor * (self.visible.tril(-1) if strict else self.visible).unsqueeze(-3)

    def pairs(self, x: Tensor, y: Tensor, *, strict: bool = False) -> Tensor:
        chunk = y.shape[-2]
        x = x.unflatten(-2, (-1, chunk))
        result = x.new_zeros(*x.shape[:-1], chunk)
        for block in self._blocks():
            if block.start:
                after, before = self._through_reference(block)
                earlier = (y[..., : block.start, :] * before).unsqueeze(-3)
                result[..., block, : block.start] = (x[..., block, :] * after) @ earlier.mT
            weighted = y[..., block, :].unsqueeze(-3) * self._within(block)
            result[..., block, block] = torch.einsum(
                "...rim,...ijm->...rij", x[..., block, :], weighted
            )
        return self._mask(result, strict).flatten(-3, -2)

    def pairs_gradient(
        self, gradient: Tensor, x: Tensor, y: Tensor, *, strict: bool = False
    ) -> tuple[Tensor, Tensor]:
        chunk = y.shape[-2]
        x = x.unflatten(-2, (-1, chunk))
        gradient = self._mask(gradient.unflatten(-2, (-1, chunk)), strict)
        dx, dy = torch.zeros_like(x), torch.zeros_like(y)
        for block in self._blocks():
            own = gradient[..., block, block]
            within = self._within(block)
            weighted = y[..., block, :].unsqueeze(-3) * within
            dx[..., block, :] = torch.einsum("...rij,...ijm->...rim", own, weighted)
            reached = torch.einsum("...rij,...rim->...ijm", own, x[..., block, :])
            dy[..., block, :] += (reached * within).sum(-3)
            if block.start:
                after, before = self._through_reference(block)
                earlier = (y[..., : block.start, :] * before).unsqueeze(-3)
                part = gradient[..., block, : block.start]
                dx[..., block, :] += after * (part @ earlier)
                later = part.mT @ (x[..., block, :] * after)
                dy[..., : block.start, :] += before * later.sum(-3)
        return dx.flatten(-3, -2), dy

    def per_gate(self, product: Tensor) -> Tensor:
        return product
