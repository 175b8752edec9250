"""How states are written, chunk by chunk: by adding up, or by the delta rule.

A chunk turns the state S before it into ``across * S + Kw^T U``, with ``Kw`` the keys as its end
sees them and ``U [c, e]`` what is written under them; its outputs read U too. What adds up writes
the values: ``U = V``. The delta rule writes what a key does not read yet (DeltaNet, arXiv
2406.06484; gated, 2412.06464; per channel, 2510.26692):

    U = (I + L)^-1 (beta * (V - Kr S)) = U0 - W S      Kr = exp(b) * K
    L_ij = beta_i k_i . k_j exp(b_i - b_j), i > j

so that a chunk's transition is the matrix ``across - Kw^T W``. Everything is in fp32 or fp64.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from .tiles import Tile


class Rule(Protocol):
    """The states of one tile. States are ``[bm, h, d, e]``; before chunks, stacked along dim 2."""

    def advance(
        self, state: Tensor, *, values: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Forward in time.

        Args:
            state: before the tile.
            values: whether the tile's own values are written; otherwise they count as zero.

        Returns:
            The states before each chunk ``[bm, h, chunks, d, e]``; U ``[bm, h, chunks, c, e]``,
            ``None`` for zero; the state after the tile.
        """

    def retreat(
        self, gradient: Tensor, reads: Tensor | None, written: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Back in time: the adjoint of :meth:`advance`.

        Args:
            gradient: of the state after the tile.
            reads: gradient of the states before each chunk from what the outputs read of them.
            written: gradient of U from what the outputs read of it.

        Returns:
            The gradients of the states after each chunk, that of U, and that of the state before
            the tile.
        """

    def after(self, state: Tensor) -> Tensor:
        """The state after the tile: the last of what :meth:`advance` returns."""

    def before(self, gradient: Tensor, reads: Tensor, written: Tensor | None) -> Tensor:
        """The gradient of the state before the tile: the last of what :meth:`retreat` returns."""

    def transition(self, before: Tensor) -> Tensor:
        """A of a run of tokens that ends with this tile, from A of what is before the tile."""

    def transposed_transition(self, after: Tensor) -> Tensor:
        """A^T of a run of tokens that starts with this tile, from A^T of what is after it."""

    def input_gradients(
        self, states: Tensor | None, written: Tensor | None, dstates: Tensor, dwritten: Tensor
    ) -> "InputGradients":
        """What follows for key, value and beta, except through the outputs' scores.

        Args:
            states: before each chunk; states that add up can do without.
            written: U; dstates: gradients of the states after each chunk; dwritten: that of U.
        """


class InputGradients:
    """Gradients of one tile's inputs, ``[bm, h, chunks, c, ...]``.

    Attributes:
        key_written: of the key where its decay counts to the end (``exp(-b)``).
        key_read: of the key where its decay counts from the start (``exp(b)``); ``None`` for zero.
        value, beta: of those; ``beta`` is ``[..., c, 1]``, ``None`` where there is none.
    """

    def __init__(
        self,
        key_written: Tensor,
        value: Tensor,
        key_read: Tensor | None = None,
        beta: Tensor | None = None,
    ) -> None:
        self.key_written = key_written
        self.key_read = key_read
        self.value = value
        self.beta = beta


class AddingUp:
    """``S <- exp(g) S + k^T v``."""

    def __init__(self, tile: Tile) -> None:
        self._tile = tile
        self._across = tile.decay.across.expand(-1, -1, tile.chunks, -1, -1)

    def _sums(self, first: Tensor, own: Tensor | None, order: Iterable[int]) -> list[Tensor]:
        """``first``, and after it what each chunk in turn makes of it."""
        across, sums = self._across.unbind(2), [first]
        for index in order:
            if own is None:
                sums.append(across[index] * sums[-1])
            else:
                sums.append(torch.addcmul(own[:, :, index], across[index], sums[-1]))
        return sums

    def advance(
        self, state: Tensor, *, values: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        tile = self._tile
        own = tile.written_key.mT @ tile.value if values else None
        *states, state = self._sums(state, own, range(tile.chunks))
        return torch.stack(states, 2), tile.value if values else None, state

    def after(self, state: Tensor) -> Tensor:
        own = self._tile.written_key.mT @ self._tile.value
        return self._sums(state, own, range(self._tile.chunks))[-1]

    def retreat(
        self, gradient: Tensor, reads: Tensor | None, written: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        *after, gradient = self._sums(gradient, reads, reversed(range(self._tile.chunks)))
        stacked = torch.stack(after[::-1], 2)
        dwritten = self._tile.written_key @ stacked
        return stacked, dwritten if written is None else dwritten.add_(written), gradient

    def before(self, gradient: Tensor, reads: Tensor, written: Tensor | None) -> Tensor:
        del written
        return self._sums(gradient, reads, reversed(range(self._tile.chunks)))[-1]

    def transition(self, before: Tensor) -> Tensor:
        # [.., chunks, 1 or d, 1]: linear space, where an underflow or a cut is 0.
        product = self._across.prod(2).squeeze(-1)
        return before * (product if before.dim() == 3 else product.squeeze(-1))

    def transposed_transition(self, after: Tensor) -> Tensor:
        return self.transition(after)

    def input_gradients(
        self, states: Tensor | None, written: Tensor | None, dstates: Tensor, dwritten: Tensor
    ) -> InputGradients:
        del states, written
        key_written = (self._tile.value @ dstates.mT).mul_(self._tile.decay.to_end)
        return InputGradients(key_written, dwritten)


class DeltaRule:
    """``S <- exp(g) S``, then ``S <- S + beta k^T (v - k S)``."""

    def __init__(self, tile: Tile) -> None:
        self._tile = tile
        self._across = tile.decay.across.expand(-1, -1, tile.chunks, -1, -1).unbind(2)
        self._key_products = tile.decay.pairs(tile.key, tile.key, strict=True)
        # The solver takes the diagonal for ones.
        self._lower = tile.beta * self._key_products
        self._read_key = tile.decay.from_start * tile.key
        self._erase = self._solve(tile.beta * self._read_key)  # W

    def _solve(self, right: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self._lower, right, upper=False, unitriangular=True)

    def advance(
        self, state: Tensor, *, values: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        tile = self._tile
        own = self._solve(tile.beta * tile.value).unbind(2) if values else None
        states, written = [], []
        for index, across in enumerate(self._across):
            u = -(self._erase[:, :, index] @ state)
            if own is not None:
                u += own[index]
            states.append(state)
            written.append(u)
            state = across * state + tile.written_key[:, :, index].mT @ u
        return torch.stack(states, 2), torch.stack(written, 2), state

    def retreat(
        self, gradient: Tensor, reads: Tensor | None, written: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        after, dwritten = [], []
        for index in reversed(range(len(self._across))):
            du = self._tile.written_key[:, :, index] @ gradient
            if written is not None:
                du += written[:, :, index]
            after.append(gradient)
            dwritten.append(du)
            gradient = self._across[index] * gradient - self._erase[:, :, index].mT @ du
            if reads is not None:
                gradient += reads[:, :, index]
        return torch.stack(after[::-1], 2), torch.stack(dwritten[::-1], 2), gradient

    def after(self, state: Tensor) -> Tensor:
        return self.advance(state)[2]

    def before(self, gradient: Tensor, reads: Tensor, written: Tensor | None) -> Tensor:
        return self.retreat(gradient, reads, written)[2]

    def transition(self, before: Tensor) -> Tensor:
        return self.advance(before, values=False)[2]

    def transposed_transition(self, after: Tensor) -> Tensor:
        return self.retreat(after, None, None)[2]

    def input_gradients(
        self, states: Tensor | None, written: Tensor | None, dstates: Tensor, dwritten: Tensor
    ) -> InputGradients:
        assert states is not None and written is not None
        tile, decay, beta = self._tile, self._tile.decay, self._tile.beta
        dright = torch.linalg.solve_triangular(
            self._lower.mT, dwritten, upper=True, unitriangular=True
        )
        dlower = -(dright @ written.mT)  # seen below the diagonal only
        missing = tile.value - self._read_key @ states
        dbeta = (dright * missing).sum(-1, keepdim=True)
        dbeta += (dlower * self._key_products).sum(-1, keepdim=True)
        key_read, key_written = decay.pairs_gradient(dlower * beta, tile.key, tile.key, strict=True)
        dright *= beta
        key_read -= decay.from_start * (dright @ states.mT)
        key_written += decay.to_end * (written @ dstates.mT)
        return InputGradients(key_written, dright, key_read, dbeta)


def rule_of(tile: Tile) -> Rule:
    """The rule of the segments the tile is of."""
    return AddingUp(tile) if tile.segments.beta is None else DeltaRule(tile)
