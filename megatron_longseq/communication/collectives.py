"""Sums and broadcasts of a tensor over a group, with a time limit and an error that says where."""

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from .groups import GroupPlace
from .transport import DEFAULT_TIMEOUT_SECONDS, Stream, transfer_failure


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
        whole = tensor.cpu() if gloo and tensor.is_cuda else tensor
        whole = whole.contiguous()
        started = time.monotonic()
        try:
            work = post(whole)
            if whole.is_cuda:
                work.wait()
            else:
                work.wait(timedelta(seconds=self._timeout_seconds))
        except RuntimeError as error:
            raise transfer_failure(
                self._place,
                self._stream,
                what,
                "step 1 of 1",
                error,
                elapsed_seconds=time.monotonic() - started,
                timeout_seconds=self._timeout_seconds,
            ) from error
        return whole.to(tensor.device)
