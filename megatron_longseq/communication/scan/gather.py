"""Every rank gets the pairs of all segments and composes those before its own (LASP-2)."""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..transport import Channel
from .mailbox import Awaited, holds_host
from .pair import Course, Pair


class _Gather:
    """A collective under way; raises as an exchange does."""

    def __init__(self, channel: Channel, wires: Tensor) -> None:
        self._channel = channel
        self._holds_host = holds_host(wires, channel.place)
        # Where a wait holds the host, gloo gathers, and that in host memory.
        self._sent = wires.cpu() if self._holds_host else wires
        self._gathered = self._sent.new_empty(channel.place.size, *wires.shape)
        self._started = time.monotonic()
        # The new name in PyTorch 2.13, where the old one warns.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._work = self._guarded(
            lambda: gather(
                self._gathered.view(-1), self._sent.view(-1), channel.place.group, async_op=True
            )
        )
        self._device = wires.device

    def wait_received(self) -> None:
        if self._holds_host:
            limit = timedelta(seconds=self._channel.timeout_seconds)
            self._guarded(lambda: self._work.wait(limit))
        else:
            self._guarded(self._work.wait)

    def result(self) -> Tensor:
        """``[size, *wires.shape]`` in group order."""
        return self._gathered.to(self._device)

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise self._channel.failure(
                "gathering the pairs of all ranks",
                "step 1 of 1",
                error,
                time.monotonic() - self._started,
            ) from error


class GatherScan:
    """A scan by one all-gather.

    Args:
        channel: names the traffic in errors and gives the group.
        course: the places.
        like: a pair in the shapes of all pairs.
        with_total: compute ``total``, the state after the whole chain, too.
    """

    def __init__(self, channel: Channel, course: Course, like: Pair, *, with_total: bool) -> None:
        self._channel = channel
        self._course = course
        self._like = like
        self._with_total = with_total
        self.steps = 1
        self.total: Tensor | None = None

    def run(self, pairs: Sequence[Pair]) -> Iterator[Awaited]:
        """Gathers; then ``states`` holds S_in of each own segment."""
        gather = _Gather(self._channel, torch.stack([pair.to_wire() for pair in pairs]))
        yield gather
        positions = self._course.positions
        last = self._course.chain.length if self._with_total else positions[-1]
        state, self.states = torch.zeros_like(self._like.state), []
        # One state at a time: all of them would be the state of every rank, twice over.
        for position, pair in zip(range(last + 1), self._in_order(gather.result()), strict=False):
            if position in positions:
                self.states.append(state)
            if position < last:
                state = pair.apply(state)
        self.total = state if self._with_total else None

    def _in_order(self, wires: Tensor) -> Iterator[Pair]:
        """The pairs of the whole chain from those gathered."""
        course, ranks = self._course, self._channel.place.ranks
        for position in range(course.chain.length):
            place, index = course.chain.holder(position)
            yield self._like.from_wire(wires[ranks.index(course.ranks[place]), index])
