"""Rows of blocks on the straight way: from their owner to who uses them, and gradients back.

In a ring blocks travel whole, past everybody. Where a rank uses few rows of few blocks, as under a
short window or with packed documents, the rows go to it directly:

    for owner, (key, value) in exchange.circulate(key, value):
        ...                                     # of others: the rows that are used, side by side

    with exchange.circulate_with_gradients(key, value) as rotation:
        for owner, (key, value), gradient in rotation:
            gradient.add(key_part, value_part)  # goes straight to the owner
        key_gradient, value_gradient = rotation.gradients()

The rules are the ring's (:mod:`.ring`): what comes next is on its way while this is computed with,
buffers are leased from the pool and returned on every way out, all ranks post in the same order,
and gradients add up in the order of the offsets, never in that of arrival. Each row is sent once to
each rank that uses it, and its gradient once by each.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing

import torch
from torch import Tensor

from .gradient_chain import EVERYWHERE
from .ring import Ring
from .slots import Slot, release
from .transport import RING_BLOCKS, Channel, Exchange, Message

# Rows of the block of a ring position (the second) that another one (the first) uses, ascending.
RowsOf = Callable[[int, int], tuple[slice, ...]]


class RowExchange:
    """Exchange of rows among the ranks of a ring.

    Args:
        ring: whose ranks, pool and limits it shares.
        offsets: how many positions down the ring rows of a block are used, ascending, the own one
            (0) first; the same on all ranks.
        rows: which rows; the same on all ranks.
    """

    def __init__(self, ring: Ring, offsets: Sequence[int], rows: RowsOf) -> None:
        self.ring = ring
        self.offsets = tuple(offsets)
        self.rows = rows
        self._channel = Channel(
            ring.place,
            RING_BLOCKS,
            ring.pool,
            timeout_seconds=ring.timeout_seconds,
            staging=ring.staging,
        )

    def owner(self, offset: int) -> int:
        """Whose rows arrive here by an offset."""
        return (self.ring.position - offset) % self.ring.size

    def user(self, offset: int) -> int:
        """Who uses rows of this rank by an offset."""
        return (self.ring.position + offset) % self.ring.size

    def circulate(self, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yields ``(owner, rows)``, the own block first, whole.

        Args:
            tensors: this rank's block; of the same shapes and dtypes on every rank.

        Yields:
            The ring position of the owner, and of its tensors the rows that are used here. They are
            valid until the next step and must not be changed.

        Raises:
            CommunicationError: a transfer failed or took too long.
        """
        with closing(self.visit(tensors)) as visits:
            for offset, block in visits:
                yield self.owner(offset), block

    def circulate_with_gradients(self, *tensors: Tensor) -> "RowRotation":
        """Like circulate(), with the gradients of the rows going back to their owners."""
        return RowRotation(self, tensors)

    def visit(
        self, tensors: Sequence[Tensor]
    ) -> Generator[tuple[int, tuple[Tensor, ...]], None, None]:
        """Yields ``(offset, rows)``."""
        given = tuple(tensor.detach() for tensor in tensors)
        slots: list[Slot] = []
        arriving: list[Exchange] = []
        try:
            source = Slot.to_send(self.ring.pool, given)
            slots.append(source)
            for index, offset in enumerate(self.offsets):
                block = given if index == 0 else slots[-1].tensors
                while arriving:
                    arriving[0].wait_received()
                    del arriving[0]
                if index + 1 < len(self.offsets):
                    then = self.offsets[index + 1]
                    slots.append(self.landing(given, self.ring.position, self.owner(then)))
                    arriving.append(self._send_rows(source, slots[-1], then))
                yield offset, block
                if index > 0:
                    release([slots.pop(1)], [])
            source.wait_sent()
        finally:
            release(slots, arriving)

    def landing(
        self, like: Sequence[Tensor], user: int, owner: int, dtype: torch.dtype | None = None
    ) -> Slot:
        """Leased memory for the rows that ``user`` uses of the block of ``owner``."""
        count = sum(rows.stop - rows.start for rows in self.rows(user, owner))
        kinds = [((count, *t.shape[1:]), dtype or t.dtype) for t in like]
        buffers = self.ring.pool.lease_all(kinds, like[0].device)
        return Slot([buffer.tensor for buffer in buffers], buffers)

    def _send_rows(self, source: Slot, target: Slot, offset: int) -> Exchange:
        user, owner = self.user(offset), self.owner(offset)
        exchange = self._channel.exchange(
            receives=_messages(target.tensors, self.ring.rank_at(owner)),
            sends=_messages(self._outgoing(source, user), self.ring.rank_at(user)),
            step=f"offset {offset} of {self.offsets}",
        )
        source.sending.append(exchange)
        return exchange

    def _outgoing(self, source: Slot, user: int) -> list[Tensor]:
        """The rows that a user needs, side by side: of one run the tensors' own memory."""
        wanted = self.rows(user, self.ring.position)
        if len(wanted) <= 1:
            return [tensor[rows] for tensor in source.tensors for rows in wanted]
        count = sum(rows.stop - rows.start for rows in wanted)
        kinds = [((count, *tensor.shape[1:]), tensor.dtype) for tensor in source.tensors]
        buffers = self.ring.pool.lease_all(kinds, source.tensors[0].device)
        source.buffers += buffers  # returned with the source
        for buffer, tensor in zip(buffers, source.tensors, strict=True):
            torch.cat([tensor[rows] for rows in wanted], out=buffer.tensor)
        return [buffer.tensor for buffer in buffers]


class RowGradient:
    """This rank's part of the gradient of the rows of one step."""

    def __init__(self, sums: Sequence[Tensor]) -> None:
        self._sums = sums

    def add(self, *parts: Tensor, at: slice = EVERYWHERE) -> None:
        """Adds to the gradients of the step's tensors; see :meth:`.ring.Gradient.add`."""
        for total, part in zip(self._sums, parts, strict=True):
            total[at] += part


class RowRotation:
    """One exchange of rows and of their gradients."""

    def __init__(self, exchange: RowExchange, tensors: Sequence[Tensor]) -> None:
        self._exchange = exchange
        self._tensors = tuple(tensor.detach() for tensor in tensors)
        self._dtype = exchange.ring.sum_dtype(tensors[0].dtype)
        self._own: Slot | None = None
        # Parts on their way home, what arrives for this rank's rows, and whose part that is.
        self._moving: tuple[Slot, Slot, Exchange, int] | None = None
        self._complete = False

    def __enter__(self) -> "RowRotation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[int, tuple[Tensor, ...], RowGradient]]:
        """Yields ``(owner, rows, gradient)``; add this rank's part to the gradient."""
        exchange, position = self._exchange, self._exchange.ring.position
        pool, device = exchange.ring.pool, self._tensors[0].device
        kinds = [(tensor.shape, self._dtype) for tensor in self._tensors]
        buffers = pool.lease_all(kinds, device)
        self._own = Slot([buffer.tensor.zero_() for buffer in buffers], buffers)
        with closing(exchange.visit(self._tensors)) as visits:
            for offset, block in visits:
                owner = exchange.owner(offset)
                if offset == 0:
                    yield owner, block, RowGradient(self._own.tensors)
                    continue
                part = exchange.landing(self._tensors, position, owner, self._dtype)
                sent = False
                try:
                    for tensor in part.tensors:
                        tensor.zero_()
                    yield owner, block, RowGradient(part.tensors)
                    self._arrive()
                    self._send(part, offset)
                    sent = True
                finally:
                    if not sent:
                        release([part], [])
        self._complete = True

    def _send(self, part: Slot, offset: int) -> None:
        """Sends a part to its owner, and posts the receive for that of the rows' other user."""
        exchange, ring = self._exchange, self._exchange.ring
        user, owner = exchange.user(offset), exchange.owner(offset)
        landing = exchange.landing(self._tensors, user, ring.position, self._dtype)
        try:
            moving = ring.gradient_channel.exchange(
                receives=_messages(landing.tensors, ring.rank_at(user)),
                sends=_messages(part.tensors, ring.rank_at(owner)),
                step=f"offset {offset} of {exchange.offsets}",
            )
        except BaseException:
            release([landing], [])
            raise
        part.sending.append(moving)
        self._moving = part, landing, moving, user

    def _arrive(self) -> None:
        """Adds what another rank has sent for this rank's rows, if something is on its way."""
        if self._moving is None or self._own is None:
            return
        part, landing, moving, user = self._moving
        moving.wait_received()
        begin = 0
        for rows in self._exchange.rows(user, self._exchange.ring.position):
            count = rows.stop - rows.start
            for total, arrived in zip(self._own.tensors, landing.tensors, strict=True):
                total[rows] += arrived[begin : begin + count]
            begin += count
        part.wait_sent()
        self._moving = None
        release([part, landing], [])

    def gradients(self) -> tuple[Tensor, ...]:
        """The finished gradients of this rank's own tensors, in their shapes and dtypes.

        Raises:
            RuntimeError: the rotation has not been iterated to its end, or is closed.
            CommunicationError: the last part failed or took too long.
        """
        if not self._complete or self._own is None:
            raise RuntimeError("gradients() before the rotation has gone through all its blocks")
        try:
            self._arrive()
            return tuple(
                total.to(tensor.dtype, copy=True)
                for total, tensor in zip(self._own.tensors, self._tensors, strict=True)
            )
        finally:
            self.close()

    def close(self) -> None:
        """Returns the buffers, after the transfers that touch them."""
        moving, self._moving = self._moving, None
        own, self._own = self._own, None
        if moving is not None:
            part, landing, exchange, _ = moving
            release([part, landing], [exchange])
        if own is not None:
            release([own], [])


def _messages(tensors: Sequence[Tensor], peer: int) -> list[Message]:
    """A message for each tensor; none for those without rows."""
    return [Message(tensor, peer) for tensor in tensors if tensor.numel()]
