"""The exchange of a sequence split over a head group for heads split over it, and back.

    to_heads    [n, b, heads, d]  ->  [hp * n, b, heads / hp, d]
    to_tokens   the inverse

A rank's early and late piece are contiguous rows of the ring block (``ZigzagGrid.piece_rows``), so
they are received where they belong and the token order of the ring costs nothing: one packing copy
on the way to heads, one unpacking copy on the way back, none on the other side.

Fewer key/value heads than ranks: each head counts ``copies`` times and rank ``h`` gets copies
``h * k .. (h + 1) * k - 1``, a copy ``s`` being of head ``s // copies``. What several ranks get is
packed once and sent from the same memory. On the way back the copies are summed, in fp32.

A rank sends, per tensor, ``(hp - 1) / hp`` of ``n * b * heads * copies * d`` elements in
``2 (hp - 1)`` messages, in either direction.
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

    def to_heads(self, *tensors: Tensor, copies: Sequence[int] | None = None) -> tuple[Tensor, ...]:
        """Gathers the tokens of the head group and keeps this rank's heads.

        Args:
            tensors: ``[n, b, heads, d]``; heads and d may differ between them.
            copies: how often each head of a tensor counts; 1 if not given. The size of the group
                divides ``heads * copies``.

        Returns:
            Contiguous ``[hp * n, b, heads * copies / hp, d]`` in the token order of the ring block;
            the tensors themselves if the group has one rank.

        Raises:
            CommunicationError: a transfer failed or took too long.
        """
        if self.size == 1:
            return tensors
        repeats = copies or [1] * len(tensors)
        whole = [self._empty_block(*pair) for pair in zip(tensors, repeats, strict=True)]
        packed = Slot((), ())
        exchange: Exchange | None = None
        try:
            receives, sends = [], []
            for tensor, block, repeat in zip(tensors, whole, repeats, strict=True):
                rows = tensor.shape[0]
                for place, rank in self._peers():
                    pieces = self._grid.piece_rows(place, rows)
                    receives += [Message(block[in_block], rank) for _, in_block in pieces]
                sends += self._pack(tensor, repeat, packed.buffers)
            exchange = self._channel.exchange(
                receives=receives, sends=sends, step="the way to heads"
            )
            packed.sending.append(exchange)
            for tensor, block, repeat in zip(tensors, whole, repeats, strict=True):
                own = _heads(tensor, self._heads_of(self.place.position, tensor.shape[2], repeat))
                for local, in_block in self._grid.piece_rows(self.place.position, tensor.shape[0]):
                    block[in_block] = own[local]
            exchange.wait()
            return tuple(whole)
        finally:
            release([packed], [exchange] if exchange else [])

    def to_tokens(
        self, *tensors: Tensor, copies: Sequence[int] | None = None
    ) -> tuple[Tensor, ...]:
        """Gathers the heads of this rank's tokens; the inverse of to_heads().

        Args:
            tensors: ``[hp * n, b, heads * copies / hp, d]``.
            copies: as given to to_heads(); the copies of a head are summed in fp32.

        Returns:
            Contiguous ``[n, b, heads, d]``; the tensors themselves if the group has one rank.

        Raises:
            CommunicationError: a transfer failed or took too long.
        """
        if self.size == 1:
            return tensors
        repeats = copies or [1] * len(tensors)
        sources = Slot.to_send(self._pool, tensors)
        landing = Slot((), ())
        exchange: Exchange | None = None
        try:
            arrived: list[list[Tensor]] = []
            receives, sends = [], []
            for source in sources.tensors:
                rows = source.shape[0] // self.size
                arrived.append([])
                for place, rank in self._peers():
                    buffer = self._pool.lease(
                        (rows, *source.shape[1:]), source.dtype, source.device
                    )
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
                self._unpack(source, parts, repeat)
                for source, parts, repeat in zip(sources.tensors, arrived, repeats, strict=True)
            )
        finally:
            release([sources, landing], [exchange] if exchange else [])

    def _peers(self) -> list[tuple[int, int]]:
        """(place, global rank) of the other members, the next one first."""
        order = [(self.place.position + step) % self.size for step in range(1, self.size)]
        return [(place, self.place.ranks[place]) for place in order]

    def _heads_of(self, place: int, heads: int, copies: int) -> tuple[int, ...]:
        """The heads, copies counted, that ``place`` works on."""
        count = heads * copies // self.size
        return tuple(copy // copies for copy in range(place * count, (place + 1) * count))

    def _empty_block(self, tensor: Tensor, copies: int) -> Tensor:
        rows, batch, heads, width = tensor.shape
        return tensor.new_empty(rows * self.size, batch, heads * copies // self.size, width)

    def _pack(self, tensor: Tensor, copies: int, buffers: list[Buffer]) -> list[Message]:
        """The messages with the peers' heads of this rank's tokens; equal ones share memory."""
        packed: dict[tuple[int, ...], Tensor] = {}
        messages = []
        for place, rank in self._peers():
            heads = self._heads_of(place, tensor.shape[2], copies)
            if heads not in packed:
                shape = (*tensor.shape[:2], len(heads), tensor.shape[3])
                buffers.append(self._pool.lease(shape, tensor.dtype, tensor.device))
                packed[heads] = buffers[-1].tensor.copy_(_heads(tensor, heads))
            pieces = self._grid.piece_rows(place, tensor.shape[0])
            messages += [Message(packed[heads][local], rank) for local, _ in pieces]
        return messages

    def _unpack(self, source: Tensor, parts: Sequence[Tensor], copies: int) -> Tensor:
        """Puts the heads of all ranks side by side, for this rank's tokens."""
        rows, (batch, count, width) = source.shape[0] // self.size, source.shape[1:]
        whole = source.new_empty(rows, batch, count * self.size, width)
        for (place, _), part in zip(self._peers(), parts, strict=True):
            whole[:, :, place * count : (place + 1) * count] = part
        here = self.place.position
        own = whole[:, :, here * count : (here + 1) * count]
        for local, in_block in self._grid.piece_rows(here, rows):
            own[local] = source[in_block]
        if copies == 1:
            return whole
        accumulate = torch.promote_types(source.dtype, torch.float32)
        apart = whole.view(rows, batch, count * self.size // copies, copies, width)
        return apart.sum(3, dtype=accumulate).to(source.dtype)


def _heads(tensor: Tensor, heads: Sequence[int]) -> Tensor:
    """The given heads of ``[n, b, heads, d]``; a view if they are neighbours, each once."""
    if list(heads) == list(range(heads[0], heads[0] + len(heads))):
        return tensor[:, :, heads[0] : heads[0] + len(heads)]
    return tensor[:, :, list(heads)]
