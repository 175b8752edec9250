"""The exchange of a sequence split over a head group for heads split over it, and back.

    to_heads    [n, b, heads, d]  ->  [hp * n, b, this rank's share of the heads, d]
    to_tokens   the inverse

A rank's early and late piece are contiguous rows of the ring block (``ZigzagGrid.piece_rows``), so
they are received where they belong and the token order of the ring costs nothing: one packing copy
on the way to heads, one unpacking copy on the way back, none on the other side.

Shares need not be equal, and may overlap: of a few key/value heads, each rank gets those that its
query heads look at. What several ranks get is packed once and sent from the same memory; on the way
back, where those are gradients, their parts add up, in fp32.

A rank sends, per tensor, ``n * b * d`` elements for each head of each other rank's share to heads,
and for each head of its own share to each other rank to tokens; in ``2 (hp - 1)`` messages.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..token_layout import ZigzagGrid
from .buffers import Buffer, BufferPool
from .groups import GroupPlace
from .slots import Slot, release
from .transport import DEFAULT_TIMEOUT_SECONDS, HEAD_EXCHANGE, Channel, Exchange, Message, Staging

# The heads that each rank of a group works on, by place.
Shares = Sequence[range]


def even_shares(heads: int, size: int) -> tuple[range, ...]:
    """Shares of ``heads`` without overlap, whose sizes differ by one at most."""
    return tuple(range(place * heads // size, (place + 1) * heads // size) for place in range(size))


def serving_shares(shares: Shares, heads: int, kv_heads: int) -> tuple[range, ...]:
    """The key/value heads that shares of the query heads look at.

    Args:
        heads, kv_heads: of all ranks; the latter divide the former.
    """
    return tuple(
        range(share[0] * kv_heads // heads, share[-1] * kv_heads // heads + 1) for share in shares
    )


class HeadExchange:
    """Exchanges tokens for heads in a head group.

    Args:
        group: the head group, in order of its places; ``None`` for a single process.
        pool: memory for packed messages.
        timeout_seconds, staging: see :class:`~.transport.Channel`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        pool: BufferPool,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        staging: Staging = "auto",
    ) -> None:
        self.place = GroupPlace.of(group)
        self._pool = pool
        # Within a head group only its size matters to where pieces lie.
        self._grid = ZigzagGrid(self.place.size, 1)
        self._channel = Channel(
            self.place, HEAD_EXCHANGE, pool, timeout_seconds=timeout_seconds, staging=staging
        )

    @property
    def size(self) -> int:
        """Ranks in the head group."""
        return self.place.size

    def to_heads(
        self, *tensors: Tensor, shares: Sequence[Shares] | None = None
    ) -> tuple[Tensor, ...]:
        """Gathers the tokens of the head group and keeps this rank's heads.

        Args:
            tensors: ``[n, b, heads, d]``; heads and d may differ between them.
            shares: of the heads of each tensor; even ones if not given.

        Returns:
            Contiguous ``[hp * n, b, heads of this rank's share, d]`` in the token order of the ring
            block; the tensors themselves if the group has one rank.

        Raises:
            CommunicationError: a transfer failed or took too long.
        """
        if self.size == 1:
            return tensors
        shares = shares or [even_shares(tensor.shape[2], self.size) for tensor in tensors]
        whole = [self._empty_block(*pair) for pair in zip(tensors, shares, strict=True)]
        packed = Slot((), ())
        exchange: Exchange | None = None
        try:
            receives, sends = [], []
            for tensor, block, share in zip(tensors, whole, shares, strict=True):
                rows = tensor.shape[0]
                for place, rank in self._peers():
                    pieces = self._grid.piece_rows(place, rows)
                    receives += [Message(block[in_block], rank) for _, in_block in pieces]
                sends += self._pack(tensor, share, packed.buffers)
            exchange = self._channel.exchange(
                receives=receives, sends=sends, step="the way to heads"
            )
            packed.sending.append(exchange)
            for tensor, block, share in zip(tensors, whole, shares, strict=True):
                own = _heads(tensor, share[self.place.position])
                for local, in_block in self._grid.piece_rows(self.place.position, tensor.shape[0]):
                    block[in_block] = own[local]
            exchange.wait()
            return tuple(whole)
        finally:
            release([packed], [exchange] if exchange else [])

    def to_tokens(
        self, *tensors: Tensor, shares: Sequence[Shares] | None = None
    ) -> tuple[Tensor, ...]:
        """Gathers the heads of this rank's tokens; the inverse of to_heads().

        Args:
            tensors: ``[hp * n, b, heads of this rank's share, d]``.
            shares: as given to to_heads(); heads of several shares are summed in fp32.

        Returns:
            Contiguous ``[n, b, heads, d]``; the tensors themselves if the group has one rank.

        Raises:
            CommunicationError: a transfer failed or took too long.
        """
        if self.size == 1:
            return tensors
        if shares is None:
            shares = [even_shares(tensor.shape[2] * self.size, self.size) for tensor in tensors]
        sources = Slot.to_send(self._pool, tensors)
        landing = Slot((), ())
        exchange: Exchange | None = None
        try:
            arrived: list[list[Tensor]] = []
            receives, sends = [], []
            for source, share in zip(sources.tensors, shares, strict=True):
                rows, batch, _, width = source.shape
                rows //= self.size
                arrived.append([])
                for place, rank in self._peers():
                    shape = rows, batch, len(share[place]), width
                    buffer = self._pool.lease(shape, source.dtype, source.device)
                    landing.buffers.append(buffer)
                    arrived[-1].append(buffer.tensor)
                    for local, in_block in self._grid.piece_rows(place, rows):
                        receives.append(Message(buffer.tensor[local], rank))
                        sends.append(Message(source[in_block], rank))
            exchange = self._channel.exchange(
                receives=receives, sends=sends, step="the way to tokens"
            )
            sources.sending.append(exchange)
            exchange.wait()
            return tuple(
                self._unpack(source, parts, share)
                for source, parts, share in zip(sources.tensors, arrived, shares, strict=True)
            )
        finally:
            release([sources, landing], [exchange] if exchange else [])

    def _peers(self) -> list[tuple[int, int]]:
        """(place, global rank) of the other members, the next one first."""
        order = [(self.place.position + step) % self.size for step in range(1, self.size)]
        return [(place, self.place.ranks[place]) for place in order]

    def _empty_block(self, tensor: Tensor, shares: Shares) -> Tensor:
        rows, batch, _, width = tensor.shape
        heads = len(shares[self.place.position])
        return tensor.new_empty(rows * self.size, batch, heads, width)

    def _pack(self, tensor: Tensor, shares: Shares, buffers: list[Buffer]) -> list[Message]:
        """The messages with the peers' heads of this rank's tokens; equal ones share memory."""
        packed: dict[range, Tensor] = {}
        messages = []
        for place, rank in self._peers():
            heads = shares[place]
            if heads not in packed:
                shape = (*tensor.shape[:2], len(heads), tensor.shape[3])
                buffers.append(self._pool.lease(shape, tensor.dtype, tensor.device))
                packed[heads] = buffers[-1].tensor.copy_(_heads(tensor, heads))
            pieces = self._grid.piece_rows(place, tensor.shape[0])
            messages += [Message(packed[heads][local], rank) for local, _ in pieces]
        return messages

    def _unpack(self, source: Tensor, parts: Sequence[Tensor], shares: Shares) -> Tensor:
        """Puts the heads of all ranks side by side, or sums them, for this rank's tokens."""
        rows, (batch, _, width) = source.shape[0] // self.size, source.shape[1:]
        heads = shares[-1].stop
        if sum(map(len, shares)) == heads:
            whole = source.new_empty(rows, batch, heads, width)
            for (place, _), part in zip(self._peers(), parts, strict=True):
                _heads(whole, shares[place]).copy_(part)
            own = _heads(whole, shares[self.place.position])
            for local, in_block in self._grid.piece_rows(self.place.position, rows):
                own[local] = source[in_block]
            return whole
        wide = torch.promote_types(source.dtype, torch.float32)
        whole = source.new_zeros(rows, batch, heads, width, dtype=wide)
        by_place = {place: part for (place, _), part in zip(self._peers(), parts, strict=True)}
        for place, share in enumerate(shares):  # in this order on every rank
            total = _heads(whole, share)
            if place in by_place:
                total += by_place[place]
                continue
            for local, in_block in self._grid.piece_rows(place, rows):
                total[local] += source[in_block]
        return whole.to(source.dtype)


def _heads(tensor: Tensor, heads: range) -> Tensor:
    """The given heads of ``[n, b, heads, d]``, a view."""
    return tensor[:, :, heads.start : heads.stop]
