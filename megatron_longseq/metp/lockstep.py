"""One owner's shard on all ranks at once, step by step; and its gradient back to the owner.

The attention of one head group needs the weights of that group on every rank in the same step, so
its shards cannot pass around in a ring. :class:`ShardBroadcast` has the shards of the next step on
their way while this one is worked with; :class:`OwnerReduce` adds the gradients of a step up at
their owner while the next is worked with. Both keep two sets of buffers, leased and returned.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from ..communication.buffers import BufferPool
from ..communication.collectives import CollectiveFlight
from ..communication.groups import GroupPlace
from ..communication.ring import accumulation_dtype
from ..communication.slots import Slot
from ..communication.transport import DEFAULT_TIMEOUT_SECONDS, Stream
from ..errors import UserError, divisors, nearest_values

SHARD_BROADCAST = Stream("weight shards", 0)
SHARD_REDUCE = Stream("weight gradients", 0)


class ShardBroadcast:
    """Visits the shards of all ranks in order of their owners, the same on all ranks at once.

    Args:
        group: the ranks that own a shard each; ``None`` for one rank.
        pool: receive buffers.
        timeout_seconds: limit of every wait.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        pool: BufferPool,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self.place = GroupPlace.of(group)
        self.timeout_seconds = timeout_seconds
        self._pool = pool

    def visit(
        self, *shard: Tensor, per_step: int = 1
    ) -> Iterator[tuple[int, list[tuple[Tensor, ...]]]]:
        """Yields ``(first owner, shards)`` with ``per_step`` consecutive shards a step.

        Args:
            shard: this rank's tensors; of the same shapes and dtypes on every rank.
            per_step: divides the number of ranks.

        The tensors of a step are valid until the next one and must not be changed. The own shard
        is sent from where it lies.

        Raises:
            UserError: ``per_step`` does not divide the number of ranks.
            CommunicationError: a broadcast failed or took too long.
        """
        if self.place.size % per_step:
            raise UserError(
                f"{per_step} weight shards per step do not divide {self.place.size} ranks; "
                f"nearest that do: {nearest_values(per_step, divisors(self.place.size))}"
            )
        with closing(self._visit([t.detach() for t in shard], per_step)) as visits:
            yield from visits

    def _visit(
        self, shard: Sequence[Tensor], per_step: int
    ) -> Generator[tuple[int, list[tuple[Tensor, ...]]], None, None]:
        steps = self.place.size // per_step
        sets: list[list[Slot]] = []
        own = Slot.to_send(self._pool, shard)
        flights: list[CollectiveFlight] = []
        try:
            received = per_step if self.place.size > 1 else 0
            for _ in range(min(2, steps)):
                sets.append([])
                for _ in range(received):
                    sets[-1].append(Slot.to_receive(self._pool, shard))
            flights.append(self._start(0, per_step, own, sets[0]))
            for step in range(steps):
                if step + 1 < steps:
                    following = sets[(step + 1) % 2]
                    flights.append(self._start(step + 1, per_step, own, following))
                flights[0].wait()
                del flights[0]
                first = step * per_step
                shards = [
                    tuple(shard) if owner == self.place.position else slot.tensors
                    for owner, slot in self._owners(step, per_step, sets[step % 2], own)
                ]
                yield first, shards
        finally:
            settled = [flight.settle() for flight in flights]
            for slot in [own, *chain.from_iterable(sets)]:
                for buffer in slot.buffers:
                    buffer.give_back() if all(settled) else buffer.discard()

    def _owners(
        self, step: int, per_step: int, slots: list[Slot], own: Slot
    ) -> list[tuple[int, Slot]]:
        owners = range(step * per_step, (step + 1) * per_step)
        return list(zip(owners, slots or [own] * per_step, strict=True))

    def _start(self, step: int, per_step: int, own: Slot, slots: list[Slot]) -> CollectiveFlight:
        flight = CollectiveFlight(
            self.place,
            SHARD_BROADCAST,
            self.timeout_seconds,
            f"step {step + 1} of {self.place.size // per_step}",
            f"broadcast from ranks {list(self.place.ranks[step * per_step :][:per_step])}",
        )
        if self.place.size == 1:
            return flight
        for owner, slot in self._owners(step, per_step, slots, own):
            source = own if owner == self.place.position else slot
            for tensor in source.tensors:
                flight.post(
                    lambda tensor=tensor, owner=owner: dist.broadcast(  # type: ignore[misc]
                        tensor, self.place.ranks[owner], group=self.place.group, async_op=True
                    )
                )
        return flight


class OwnerReduce:
    """Adds up what all ranks have computed for the shard of one owner after the other.

    Args:
        group: the ranks; ``None`` for one rank.
        pool: where the two sets of buffers come from.
        like: shapes and dtypes of a shard's tensors; the sums are kept in fp32 (fp64 for fp64).
        device: where they live.
        timeout_seconds: limit of every wait.
        dtype: in which the sums are made, if not fp32.

    Use in a ``with`` statement, which returns the buffers whatever happens.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        pool: BufferPool,
        like: Sequence[Tensor],
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.place = GroupPlace.of(group)
        self._pool = pool
        self._kinds = [(t.shape, dtype or accumulation_dtype(t.dtype)) for t in like]
        self._device = like[0].device
        self._timeout_seconds = timeout_seconds
        self._slots: list[tuple[Slot, CollectiveFlight | None, int]] = []
        self._home: tuple[Tensor, ...] | None = None

    def __enter__(self) -> "OwnerReduce":
        sets, each = 2 if self.place.size > 1 else 1, len(self._kinds)
        leased = self._pool.lease_all(self._kinds * sets, self._device)
        for first in range(0, sets * each, each):
            buffers = leased[first : first + each]
            self._slots.append((Slot([b.tensor for b in buffers], buffers), None, -1))
        return self

    def __exit__(self, *exception: object) -> None:
        settled = [flight.settle() for _, flight, _ in self._slots if flight is not None]
        for slot, _, _ in self._slots:
            for buffer in slot.buffers:
                buffer.give_back() if all(settled) else buffer.discard()
        self._slots = []

    def add(self, owner: int, *parts: Tensor) -> None:
        """Starts the sum for ``owner``'s shard; every rank calls this in the same order.

        Args:
            owner: place in the group.
            parts: this rank's part of each of the shard's tensors, of any floating dtype.
        """
        slot, earlier, owned = self._slots[0]
        self._finish(slot, earlier, owned)
        for total, part in zip(slot.tensors, parts, strict=True):
            total.copy_(part)
        flight = CollectiveFlight(
            self.place,
            SHARD_REDUCE,
            self._timeout_seconds,
            f"step {owner + 1} of {self.place.size}",
            f"sum at rank {self.place.ranks[owner]}",
        )
        # Before anything is posted, so that an error finds all that is in flight.
        self._slots = [*self._slots[1:], (slot, flight, owner)]
        if self.place.size > 1:
            for total in slot.tensors:
                flight.post(
                    lambda total=total: dist.reduce(  # type: ignore[misc]
                        total, self.place.ranks[owner], group=self.place.group, async_op=True
                    )
                )

    def home(self) -> tuple[Tensor, ...]:
        """The finished sums of this rank's own shard, in the dtype they were made in."""
        for index, (slot, flight, owner) in enumerate(self._slots):
            self._finish(slot, flight, owner)
            self._slots[index] = (slot, None, -1)
        if self._home is None:
            raise RuntimeError("no gradient has been added for the shard of this rank")
        return self._home

    def _finish(self, slot: Slot, flight: CollectiveFlight | None, owner: int) -> None:
        if flight is None:
            return
        flight.wait()
        if owner == self.place.position:
            self._home = tuple(total.clone() for total in slot.tensors)
