"""The messages of one scan, step by step.

A schedule says beforehand what it will receive at which step (:meth:`Mailbox.expect`), then passes
through its steps in order (:meth:`Mailbox.step`). Where a wait holds the host (gloo), all receives
are posted before the first step, so that what arrives lands at once. Where a backend runs the
operations of a group in the order they are issued (NCCL), a receive posted early would hold up the
sends behind it: there the receives of a step are posted with its sends, as one batch. The steps of
all ranks are numbered alike and a message leaves at the step at which it is received, so the
batches of a pair of ranks meet in the same order on both sides.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..buffers import BufferPool
from ..groups import GroupPlace
from ..slots import Slot, release
from ..transport import Channel, Exchange, Message


class Awaited(Protocol):
    """Something under way."""

    def wait_received(self) -> None:
        """Returns once it is here, or, on a CUDA stream, orders the stream behind it."""


def holds_host(tensor: Tensor, place: GroupPlace) -> bool:
    """Whether a wait for a transfer of this tensor holds the host, rather than a CUDA stream."""
    return not tensor.is_cuda or dist.get_backend(place.group) == "gloo"


class Mailbox:
    """What one rank receives and sends in one scan.

    Args:
        channel: carries the messages.
        pool: where the memory of receives comes from.
        like: gives dtype and device of all messages.
        receive_early: post all receives before the first step.
    """

    def __init__(
        self, channel: Channel, pool: BufferPool, like: Tensor, *, receive_early: bool
    ) -> None:
        self.channel = channel
        self._pool = pool
        self._like = like
        self._receive_early = receive_early
        self._expected: dict[int, list[Message]] = {}
        self._arriving: dict[int, Exchange] = {}
        self._slot = Slot((), ())
        self._sent: list[Sequence[Message]] = []
        self._steps = 0

    def expect(self, step: int, peer: int, shape: torch.Size | Sequence[int]) -> Tensor:
        """Announces a message from the global rank ``peer``; returns where it will lie.

        Messages of a pair of ranks are announced in the order in which the peer sends them, within
        a step.
        """
        buffer = self._pool.lease(shape, self._like.dtype, self._like.device)
        self._slot.buffers.append(buffer)
        self._expected.setdefault(step, []).append(Message(buffer.tensor, peer))
        return buffer.tensor

    def open(self, steps: int) -> None:
        """Ends the announcements; ``steps`` is the number of steps of the whole scan."""
        self._steps = steps
        if not self._receive_early:
            return
        for step in sorted(self._expected):
            self._arriving[step] = self._post(step, self._expected.pop(step), ())

    def step(self, step: int, sends: Sequence[Message] = ()) -> Iterator[Exchange]:
        """Posts the sends of a step; yields its receives, if there are any, to be waited for."""
        receives = self._expected.pop(step, [])
        expected = bool(receives) or step in self._arriving
        if receives or sends:
            exchange = self._post(step, receives, sends)
            self._slot.sending.append(exchange)
            self._sent.append(sends)  # their memory, until they have left
            if receives:
                self._arriving[step] = exchange
        if expected:
            yield self._arriving[step]
            del self._arriving[step]

    def wait_sent(self) -> None:
        """Returns once everything sent has left."""
        self._slot.wait_sent()

    def close(self) -> None:
        """Returns the memory, after the transfers that touch it."""
        arriving, self._arriving = list(self._arriving.values()), {}
        slot, self._slot = self._slot, Slot((), ())
        release([slot], arriving)
        self._sent.clear()

    def _post(self, step: int, receives: Sequence[Message], sends: Sequence[Message]) -> Exchange:
        name = f"step {step + 1} of {self._steps}"
        return self.channel.exchange(receives=receives, sends=sends, step=name)
