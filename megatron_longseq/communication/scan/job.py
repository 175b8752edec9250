"""One scan under way, from its start to the last byte sent."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from .broadcast import Broadcast
from .gather import GatherScan
from .mailbox import Awaited, Mailbox
from .pair import Pair
from .side_stream import SideStream

Total = Literal["none", "owner", "everywhere"]


class StateScan(Protocol):
    """A schedule at work: ``run`` passes through its steps, then ``states`` are there."""

    steps: int
    states: list[Tensor]

    def run(self, pairs: Sequence[Pair]) -> Iterator[Awaited]: ...


@dataclass(frozen=True)
class ScanResult:
    """What a scan gives this rank.

    Attributes:
        states: the state that enters each local segment, in their local order, in the shape of X.
            That of the chain's first segment is the initial state itself, if one was given.
        total: the state after the whole chain, where it was asked for; None elsewhere.
    """

    states: tuple[Tensor, ...]
    total: Tensor | None


class Job:
    """Executes a schedule.

    Attributes:
        ended: set once nothing is under way any more, sends included.

    Args:
        schedule: whose receives have been announced.
        mailbox: carries its messages.
        pairs: of this rank's segments, in order of the course.
        entering: the state before the chain, on the rank that holds its first segment, if not 0.
        swapped: the local order is the reverse of that of the course.
        holds_last: this rank holds the last segment of the course, and so can tell the total.
        total: who is to have it.
        broadcast: takes it to all ranks, where the schedule itself does not.
        side: orders the work on a GPU.
        late_errors: where an error goes that comes after the result.
    """

    def __init__(
        self,
        schedule: StateScan,
        mailbox: Mailbox,
        pairs: Sequence[Pair],
        *,
        entering: Tensor | None,
        swapped: bool,
        holds_last: bool,
        total: Total,
        broadcast: Broadcast | None,
        side: SideStream,
        late_errors: list[BaseException],
    ) -> None:
        self._mailbox = mailbox
        self._side = side
        self._late_errors = late_errors
        given = [t for pair in pairs for t in (pair.transition, pair.state)]
        self._given = given if entering is None else [*given, entering]
        self._device = pairs[0].state.device
        self._started = side.now(self._device)
        self._finished = self._started
        # All that the scan needs lives in this generator, and goes with it.
        self._steps: Iterator[Awaited] | None = self._whole(
            schedule, list(pairs), entering, swapped, holds_last, total, broadcast
        )
        self._awaited: Awaited | None = None
        self._error: BaseException | None = None
        self._result: ScanResult | None = None
        self._done = threading.Event()
        self.ended = threading.Event()

    def begin(self) -> None:
        """Posts what does not have to wait for anything. Does not raise: see :meth:`result`."""
        try:
            with torch.no_grad(), self._side.after(self._started, self._given):
                self._advance()
        except BaseException as error:
            self._end(error)

    def complete(self) -> None:
        """Runs to the end. Does not raise: see :meth:`result`.

        The result is there as soon as this rank has all it needs; what it has sent may still be
        under way then. If that fails, ``late_errors`` says so.
        """
        if self._steps is None:
            return
        try:
            with torch.no_grad(), self._side.after(self._started, self._given):
                if self._awaited is None:
                    self._advance()
                while self._awaited is not None:
                    self._awaited.wait_received()
                    self._advance()
                self._finished = self._side.now(self._device)
                self._done.set()
                self._mailbox.wait_sent()
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)

    @property
    def done(self) -> bool:
        """Whether the result, or an error, is there."""
        return self._done.is_set()

    def result(self) -> ScanResult:
        """Waits for the result; raises what went wrong before it was there."""
        self._done.wait()
        if self._result is None:
            assert self._error is not None
            raise self._error
        total = self._result.total
        tensors = [*self._result.states, *([] if total is None else [total])]
        self._side.join(self._finished, tensors)
        return self._result

    def _advance(self) -> None:
        """Goes on until something has to be waited for, or to the end."""
        assert self._steps is not None
        self._awaited = next(self._steps, None)

    def _end(self, error: BaseException | None) -> None:
        """Lets go of everything but the result."""
        if error is not None and self._result is not None:
            self._late_errors.append(error)
        self._error = error
        self._done.set()
        self._awaited = None
        self._given.clear()
        self._mailbox.close()
        self._steps = None
        self.ended.set()

    def _whole(
        self,
        schedule: StateScan,
        pairs: list[Pair],
        entering: Tensor | None,
        swapped: bool,
        holds_last: bool,
        total: Total,
        broadcast: Broadcast | None,
    ) -> Iterator[Awaited]:
        if entering is not None:
            # The chain starts from zero with the entering state inside its first pair.
            pairs[0] = pairs[0].with_state(pairs[0].apply(entering))
        yield from schedule.run(pairs)
        states, end = list(schedule.states), None
        if holds_last and total != "none":
            end = pairs[-1].apply(states[-1])
        if broadcast is not None:
            yield from broadcast.run(end)
            end = broadcast.result().clone()
        elif total == "everywhere" and isinstance(schedule, GatherScan):
            end = schedule.total
        if entering is not None:
            states[0] = entering
        self._result = ScanResult(tuple(states[::-1] if swapped else states), end)
