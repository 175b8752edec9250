"""Sums and broadcasts of a tensor over a group, with a time limit and an error that says where."""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch import Tensor

from .groups import GroupPlace
from .slots import SETTLE_SECONDS
from .transport import DEFAULT_TIMEOUT_SECONDS, Stream, transfer_failure


class CollectiveFlight:
    """Collective calls that are in flight, and the wait for them.

    Args:
        place: the group, and where this process stands in it.
        stream: of the traffic, in error messages.
        timeout_seconds: limit of a wait, as for :class:`Collectives`.
        step, what: when and what it is, in error messages.
    """

    def __init__(
        self, place: GroupPlace, stream: Stream, timeout_seconds: float, step: str, what: str
    ) -> None:
        self._place = place
        self._stream = stream
        self._timeout_seconds = timeout_seconds
        self._step = step
        self._what = what
        self._works: list[dist.Work] = []
        # Waiting with a limit blocks the host, which is right for gloo alone.
        self._holds_host = place.group is not None and dist.get_backend(place.group) == "gloo"

    def post(self, call: Callable[[], dist.Work]) -> None:
        """Makes an asynchronous call. Raises CommunicationError if it cannot be made."""
        try:
            self._works.append(call())
        except RuntimeError as error:
            raise self._failure(error, 0.0) from error

    def wait(self) -> None:
        """Returns once all calls have completed.

        Raises:
            CommunicationError: a rank failed or took too long.
        """
        started = time.monotonic()
        while self._works:
            try:
                if self._holds_host:
                    left = self._timeout_seconds - (time.monotonic() - started)
                    self._works[0].wait(timedelta(seconds=max(left, 0.001)))
                else:
                    self._works[0].wait()
            except RuntimeError as error:
                raise self._failure(error, time.monotonic() - started) from error
            del self._works[0]

    def settle(self) -> bool:
        """On the way out of an error: whether the buffers are free to reuse."""
        works, self._works = self._works, []
        # No longer than a wait of the user's own: an error must not be held up by what follows it.
        seconds = min(SETTLE_SECONDS, self._timeout_seconds)
        try:
            for work in works:
                work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True

    def _failure(self, error: Exception, elapsed: float) -> Exception:
        return transfer_failure(
            self._place,
            self._stream,
            self._what,
            self._step,
            error,
            elapsed_seconds=elapsed,
            timeout_seconds=self._timeout_seconds,
        )


class Collectives:
    """Collectives of one stream of data over one group; all ranks call them in the same order.

    Args:
        place: the group, and where this process stands in it.
        name: of the traffic, in error messages.
        timeout_seconds: limit of each wait. NCCL waits on the GPU, not on the host: there the
            limit given to the process group when it was made applies.
    """

    def __init__(
        self, place: GroupPlace, name: str, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> None:
        self._place = place
        self._stream = Stream(name, 0)
        self._timeout_seconds = timeout_seconds

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks of ``tensor``, which is overwritten where it can be.

        Raises:
            CommunicationError: a rank failed or took too long.
        """
        return self._run(
            "summing",
            tensor,
            lambda whole: dist.all_reduce(
                whole, dist.ReduceOp.SUM, self._place.group, async_op=True
            ),
        )

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """``tensor`` of the rank at position ``source`` of the group; others may be overwritten.

        Raises:
            CommunicationError: a rank failed or took too long.
        """
        rank = self._place.ranks[source]
        return self._run(
            f"broadcasting from rank {rank}",
            tensor,
            lambda whole: dist.broadcast(whole, rank, self._place.group, async_op=True),
        )

    def _run(self, what: str, tensor: Tensor, post: Callable[[Tensor], dist.Work]) -> Tensor:
        if self._place.size == 1:
            return tensor
        gloo = dist.get_backend(self._place.group) == "gloo"
        # gloo works in host memory.
        whole = (tensor.cpu() if gloo and tensor.is_cuda else tensor).contiguous()
        flight = CollectiveFlight(
            self._place, self._stream, self._timeout_seconds, "step 1 of 1", what
        )
        flight.post(partial(post, whole))
        flight.wait()
        return whole.to(tensor.device)
