"""The ring engine: something small circulates while every rank computes with what it holds.

    for owner, (key, value) in ring.circulate(key, value):
        ...                                   # the next block is on its way meanwhile

    with ring.circulate_with_gradients(key, value) as rotation:
        for owner, (key, value), gradient in rotation:
            gradient.add(key_part, value_part)  # follows its block, one hop behind
        key_gradient, value_gradient = rotation.gradients()

Rules it keeps, so that its users need not know them:

- The receive for the next block is posted before the caller computes with this one.
- Two receive buffers per lane at most, leased from a pool for the rotation and returned on every
  way out, after their transfers have completed. The caller's tensors are sent from, never received
  into.
- What is being sent is not overwritten before its send has completed.
- Every rank posts the same operations in the same order, one grouped batch per hop.
- Gradients add up in fp32 (fp64 for fp64), in the order of the schedule, never in that of arrival:
  a result depends on no timing.

A ring of ``size`` ranks sends each tensor ``size - 1`` times, and its gradient ``size`` times.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .buffers import BufferPool
from .gradient_chain import Gradient, GradientChain
from .groups import GroupPlace
from .schedule import Hop, Schedule, SingleRing, Step
from .slots import Slot, release, step_name
from .transport import (
    DEFAULT_TIMEOUT_SECONDS,
    RING_BLOCKS,
    RING_GRADIENTS,
    Channel,
    Exchange,
    Staging,
)

# In which gradients add up and travel: a dtype, that of their tensors, or fp32 (fp64 for fp64).
GradientDtype = torch.dtype | Literal["input"] | None


class Ring:
    """Neighbour exchange over a process group.

    Args:
        group: the ranks, in ring order; ``None`` for a single process.
        pool: receive buffers; one pool may serve all rings of a process.
        schedule: the order of the hops; a single ring if not given.
        lane_groups: process groups for lanes of their own, by lane (``"gradients"`` for the sums
            on their way home). Lanes without one share ``group``. Over NCCL, only lanes on
            different groups are in flight side by side.
        timeout_seconds: limit of every wait; see :class:`~.transport.Channel`.
        gradient_dtype: in which gradients add up and travel; fp32, or fp64 for fp64 blocks, if not
            given; ``"input"``: the dtype of the block. A 16-bit type halves the bytes and rounds
            once per hop.
        staging: see :class:`~.transport.Channel`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        pool: BufferPool,
        *,
        schedule: Schedule | None = None,
        lane_groups: Mapping[str, dist.ProcessGroup] | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        gradient_dtype: GradientDtype = None,
        staging: Staging = "auto",
    ) -> None:
        self.place = GroupPlace.of(group)
        self.pool = pool
        self.gradient_dtype = gradient_dtype
        self.timeout_seconds = timeout_seconds
        self.staging: Staging = staging
        self.steps = (schedule or SingleRing()).steps(self.place.position, self.place.size)
        places = {lane: GroupPlace.of(own) for lane, own in (lane_groups or {}).items()}
        lanes = {hop.lane for step in self.steps for hop in step.hops}
        self.block_channels = {
            lane: Channel(
                places.get(lane, self.place),
                RING_BLOCKS,
                pool,
                timeout_seconds=timeout_seconds,
                staging=staging,
            )
            for lane in sorted(lanes)
        }
        self._buffers = receive_buffers(self.steps)
        self.gradient_channel = Channel(
            places.get("gradients", self.place),
            RING_GRADIENTS,
            pool,
            timeout_seconds=timeout_seconds,
            staging=staging,
        )

    @property
    def size(self) -> int:
        """Ranks in the ring."""
        return self.place.size

    @property
    def position(self) -> int:
        """This rank's place in the ring."""
        return self.place.position

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype the gradients of a block of ``dtype`` add up and travel."""
        if self.gradient_dtype == "input":
            return dtype
        return self.gradient_dtype or accumulation_dtype(dtype)

    def rank_at(self, position: int) -> int:
        """The global rank at a ring position."""
        return self.place.ranks[position]

    def circulate(self, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yields ``(owner, block)`` for the blocks of all ranks, the own one first.

        Args:
            tensors: this rank's block; of the same shapes and dtypes on every rank.

        Yields:
            The ring position of the owner, and its tensors. They are valid until the next step and
            must not be changed.

        Raises:
            CommunicationError: a transfer failed or took too long.
        """
        with closing(self._visit(tensors)) as visits:
            for _, step, block in visits:
                yield step.owner, block

    def circulate_with_gradients(
        self, *tensors: Tensor, differentiated: int | None = None
    ) -> "Rotation":
        """Like circulate(), with the gradients of the blocks following one hop behind.

        Args:
            tensors: this rank's block.
            differentiated: how many of them have a gradient, the first ones; all if not given.

        Returns:
            A rotation: iterate over it, then take its gradients(). Best used in a ``with``
            statement, which returns its buffers whatever happens.
        """
        return Rotation(self, tensors, differentiated)

    def circulate_gradients(self, *tensors: Tensor) -> "Rotation":
        """Like circulate_with_gradients(), but the blocks stay at home: ``size`` gradient hops.

        For an operation whose gradient does not depend on the block, a table lookup for example.
        In the steps of the rotation every block is empty.
        """
        return Rotation(self, tensors, blocks_travel=False)

    def _visit(
        self, tensors: Sequence[Tensor]
    ) -> Generator[tuple[int, Step, tuple[Tensor, ...]], None, None]:
        """Runs the schedule's hops: yields ``(index, step, block)`` at each of its steps."""
        given = tuple(tensor.detach() for tensor in tensors)
        lanes: dict[str, list[Slot]] = {}
        slots: list[Slot] = []
        arriving: dict[int, tuple[Slot, Exchange]] = {}
        try:
            slot = Slot.to_send(self.pool, given) if self.block_channels else Slot(given, ())
            slots.append(slot)
            for lane, count in self._buffers.items():
                lanes[lane] = [Slot.to_receive(self.pool, given) for _ in range(count)]
                slots += lanes[lane]
            for index, step in enumerate(self.steps):
                if index > 0:
                    slot, exchange = arriving[index]
                    exchange.wait_received()
                    del arriving[index]
                for hop in step.hops:
                    target = lanes[hop.lane][0]
                    lanes[hop.lane].reverse()
                    arriving[hop.lands_at] = (target, self._start(hop, slot, target, index))
                yield index, step, slot.tensors if index > 0 else given
            for slot in slots:
                slot.wait_sent()
        finally:
            release(slots, [exchange for _, exchange in arriving.values()])

    def _start(self, hop: Hop, source: Slot, target: Slot, index: int) -> Exchange:
        """Posts the exchange of a hop, once nothing is being sent from its target any more."""
        target.wait_sent()
        return source.exchange(
            self.block_channels[hop.lane],
            target,
            send_to=self.rank_at(hop.send_to),
            receive_from=self.rank_at(hop.receive_from),
            step=step_name(index, self.steps),
        )


class Rotation:
    """One tour of a block and its gradient. Several may be alive at a time."""

    def __init__(
        self,
        ring: Ring,
        tensors: Sequence[Tensor],
        differentiated: int | None = None,
        *,
        blocks_travel: bool = True,
    ) -> None:
        self._ring = ring
        self._blocks_travel = blocks_travel
        self._tensors = tuple(tensor.detach() for tensor in tensors)
        self._differentiated = self._tensors[:differentiated]
        self._chain = GradientChain(
            ring.gradient_channel,
            ring.pool,
            [(tensor.shape, ring.sum_dtype(tensor.dtype)) for tensor in self._differentiated],
            tensors[0].device,
        )
        self._complete = False

    def __enter__(self) -> "Rotation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_chain"):
            self.close()

    def __iter__(self) -> Iterator[tuple[int, tuple[Tensor, ...], Gradient]]:
        """Yields ``(owner, block, gradient)``; add this rank's part to the gradient."""
        steps = self._ring.steps
        try:
            self._chain.open(doubled=len(steps) > 1)
            with closing(self._visits()) as visits:
                for index, step, block in visits:
                    gradient = Gradient(self._chain)
                    yield step.owner, block, gradient
                    gradient.end()
                    if step.gradient_hop is not None:
                        hop = step.gradient_hop
                        self._chain.ship(
                            send_to=self._ring.rank_at(hop.send_to),
                            receive_from=self._ring.rank_at(hop.receive_from),
                            step=step_name(index, steps),
                        )
            self._complete = True
        finally:
            if not self._complete:
                self.close()

    def _visits(self) -> Generator[tuple[int, Step, tuple[Tensor, ...]], None, None]:
        if self._blocks_travel:
            yield from self._ring._visit(self._tensors)
        else:
            yield from ((index, step, ()) for index, step in enumerate(self._ring.steps))

    def gradients(self, *, accumulated: bool = False) -> tuple[Tensor, ...]:
        """The finished gradients of this rank's own tensors that have one, in their shapes.

        Args:
            accumulated: in the dtype they have added up in, instead of the tensors' own.

        Raises:
            RuntimeError: the rotation has not been iterated to its end, or is closed.
            CommunicationError: the last hop failed or took too long.
        """
        if not self._complete:
            raise RuntimeError("gradients() before the rotation has gone through all its blocks")
        self._complete = False
        try:
            home = tuple(
                total.to(total.dtype if accumulated else tensor.dtype, copy=True)
                for total, tensor in zip(self._chain.arrived(), self._differentiated, strict=True)
            )
            self._chain.wait_sent()
            return home
        finally:
            self.close()

    def close(self) -> None:
        """Returns the buffers to the pool; gradients() and every other way out end here."""
        self._complete = False
        self._chain.close()


def receive_buffers(steps: Sequence[Step]) -> dict[str, int]:
    """How many buffers each lane of a schedule receives into by turns: two, or one.

    One suffices where whatever arrives on the lane has been used, and is not sent on, before the
    next is awaited: between windows, if there are two of them; inside windows of two. A schedule of
    one lane has two in any case, so that what a ring holds does not depend on its size.
    """
    lanes = sorted({hop.lane for step in steps for hop in step.hops})
    if len(lanes) < 2:
        return dict.fromkeys(lanes, 2)
    needed = dict.fromkeys(lanes, 1)
    came_by = {hop.lands_at: hop.lane for step in steps for hop in step.hops}
    for index, step in enumerate(steps):
        for hop in step.hops:
            in_flight = any(
                other.lane == hop.lane and other.lands_at > index
                for earlier in steps[:index]
                for other in earlier.hops
            )
            if in_flight or came_by.get(index) == hop.lane:
                needed[hop.lane] = 2
    return needed


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype values of ``dtype`` add up: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
