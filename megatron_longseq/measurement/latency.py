"""Latency of links: when what another rank sent may be seen, and not before.

A message issued at time t is delivered at t + latency, or when it has really arrived if that is
later. Latencies of messages in flight overlap, and computation hides them, as on a real link. The
sender is not held up: its send completes as the backend completes it.

The receiver learns t from a companion of 8 bytes, the sender's clock, which travels over
connections of its own; tags and order of the messages themselves are untouched. No thread is
needed, and a waiting rank sleeps. The clocks of different ranks are compared, so all of them must
run on one machine (network namespaces do not matter).
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from .operations import Place

Seconds = Callable[[int, int], float]

_TO_ALL = ("broadcast", "scatter")
# One message from each rank straight to each other, whatever algorithm the others use
_ALWAYS_DIRECT = ("all_to_all", "scatter", "gather", "barrier")


class Arrival:
    """The moment from which something sent to this rank may be seen.

    Args:
        companion: the work that receives the senders' clocks.
        moment: reads them once they are there, in nanoseconds of the monotonic clock.
    """

    def __init__(self, companion: dist.Work, moment: Callable[[], int]) -> None:
        self._companion: dist.Work | None = companion
        self._moment = moment

    def wait(self) -> None:
        """Sleeps until the moment has come."""
        if self._companion is not None:
            self._companion.wait()
            self._companion = None
        remaining = self._moment() - time.monotonic_ns()
        if remaining > 0:
            time.sleep(remaining / 1e9)

    def has_come(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        if self._companion is not None:
            if not self._companion.is_completed():
                return False
            self._companion = None
        return time.monotonic_ns() >= self._moment()


class Latency:
    """The companions of one process group's messages.

    Args:
        companions: a backend (ProcessGroupGloo) over the same ranks that nothing else uses.
        place: of this rank in the group.
        seconds: the latency from one rank to another; both are ranks within the group.
        ring: whether gathers, reductions and broadcasts pass from neighbour to neighbour, each
            hop with its latency, or go from every rank straight to every other.
    """

    def __init__(self, companions: Any, place: Place, seconds: Seconds, ring: bool) -> None:
        self._companions = companions
        self._place = place
        self._seconds = seconds
        self._ring = ring

    def sent(self, peer: int, tag: int) -> dist.Work:
        """Says that a message to ``peer`` is issued now; its work must be kept and waited for."""
        with _unseen():
            return self._companions.send([_clock()], peer, tag)

    def receives(self, peer: int, tag: int) -> Arrival:
        """The arrival of the next message from ``peer`` with this tag."""
        with _unseen():
            clock = torch.empty(1, dtype=torch.int64)
            work = self._companions.recv([clock], peer, tag)
            sent = clock.numpy()
        travel = _nanoseconds(self._seconds(peer, self._place.rank))
        return Arrival(work, lambda: int(sent[0]) + travel)

    def collective(self, operation: str, root: int | None) -> Arrival:
        """The arrival of what a collective issued now brings to this rank."""
        rank, size = self._place
        if root is None:
            senders, receives = list(range(size)), size > 1
        elif operation in _TO_ALL:
            senders, receives = [root], rank != root
        else:
            senders, receives = [r for r in range(size) if r != root], rank == root
        with _unseen():
            work, clocks = self._exchange(operation, root)
            sent = clocks.numpy()
        if not receives or not senders:
            # Nothing to wait for, but others want this rank's clock: its work must stay alive.
            return Arrival(work, lambda: 0)
        travel = np.array([_nanoseconds(self._travel(operation, s)) for s in senders])
        return Arrival(work, lambda: int((sent[senders] + travel).max()))

    def _exchange(self, operation: str, root: int | None) -> tuple[dist.Work, torch.Tensor]:
        """Starts to send the clocks the way the data goes."""
        rank, size = self._place
        clocks = torch.zeros(size, dtype=torch.int64)
        if root is None:
            return self._companions._allgather_base(clocks, _clock()), clocks
        if operation in _TO_ALL:
            if rank == root:
                clocks[root] = time.monotonic_ns()
            to_all = dist.BroadcastOptions()
            to_all.rootRank = root
            return self._companions.broadcast([clocks[root : root + 1]], to_all), clocks
        to_root = dist.GatherOptions()
        to_root.rootRank = root
        parts = [list(clocks.split(1))] if rank == root else []
        return self._companions.gather(parts, [_clock()], to_root), clocks

    def _travel(self, operation: str, sender: int) -> float:
        """Seconds until what depends on ``sender`` is on this rank."""
        rank, size = self._place
        if not self._ring or operation in _ALWAYS_DIRECT:
            return self._seconds(sender, rank) if sender != rank else 0.0
        if operation == "all_reduce":
            # Each part is summed up on one rank, and from there goes to all.
            return max(self._path(sender, r) + self._path(r, rank) for r in range(size))
        return self._path(sender, rank)

    def _path(self, source: int, target: int) -> float:
        size = self._place.size
        hops = [(source + i) % size for i in range((target - source) % size)]
        return sum(self._seconds(hop, (hop + 1) % size) for hop in hops)


def _unseen() -> torch._C._DisableTorchDispatch:
    """Hides the tensors of a link's own from whoever counts memory or traffic."""
    return torch._C._DisableTorchDispatch()


def _clock() -> torch.Tensor:
    return torch.tensor([time.monotonic_ns()])


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
