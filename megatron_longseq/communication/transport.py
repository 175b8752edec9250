"""Point-to-point messages in grouped batches, with a time limit on every wait.

A :class:`Channel` is one stream of data in one process group. :meth:`Channel.exchange` posts a
batch of receives and sends, the same on every rank, and returns at once; the :class:`Exchange` it
returns is waited for later, receives and sends apart. A batch is one grouped call where the
backend groups (NCCL), and single messages elsewhere (gloo). Several tensors of a stream travel as
separate messages of one batch: they need no flattening copy, and over gloo on one host two
messages of 16 MB took as long as one of 32 MB (24.3 against 23.5 ms).

CUDA tensors over a gloo group are staged through pinned host memory. That lets several processes
share one GPU in a check, which NCCL refuses; it is not meant to be fast.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .buffers import Buffer, BufferPool
from .groups import GroupPlace

Staging = Literal["auto", "always", "never"]

# Without an own limit: as long as a slow step of a large job, not as long as its night.
DEFAULT_TIMEOUT_SECONDS = 600.0


class CommunicationError(RuntimeError):
    """A transfer failed or took too long; names the stream, group, step, peer and direction."""


class CommunicationTimeout(CommunicationError, TimeoutError):
    """A transfer did not complete within the time limit."""


class Stream(NamedTuple):
    """A kind of traffic: its name in messages, and the tag that keeps it apart on a group."""

    name: str
    tag: int


HEAD_EXCHANGE = Stream("head exchange", 1)
RING_BLOCKS = Stream("ring blocks", 2)
RING_GRADIENTS = Stream("ring gradients", 3)


class Message(NamedTuple):
    """A contiguous tensor to send to, or to receive from, the global rank ``peer``."""

    tensor: Tensor
    peer: int


class _Transfer:
    """One message in flight, or one batch of them where the backend groups."""

    def __init__(
        self,
        work: dist.Work,
        label: str,
        holds_host: bool,
        staged: Buffer | None = None,
        target: Tensor | None = None,
    ) -> None:
        self.work = work
        self.label = label
        self.holds_host = holds_host
        self.staged = staged
        self.target = target

    def wait(self, seconds: float) -> None:
        if self.holds_host:
            self.work.wait(timedelta(seconds=max(seconds, 0.001)))
        else:
            # On NCCL a wait with a limit would block the host; this one orders the streams, and
            # the process group's own limit applies.
            self.work.wait()
        if self.staged is not None:
            if self.target is not None:
                self.target.copy_(self.staged.tensor)
            self.staged.give_back()


class Exchange:
    """A batch of messages in flight. Tensors sent or received must be left alone until waited."""

    def __init__(
        self, channel: "Channel", step: str, receives: list[_Transfer], sends: list[_Transfer]
    ) -> None:
        self._channel = channel
        self._step = step
        self._receives = receives
        self._sends = sends

    def wait_received(self) -> None:
        """Returns once all receives have landed.

        Raises:
            CommunicationTimeout: not within the channel's time limit.
            CommunicationError: the backend reports a failure, a lost peer for example.
        """
        self._wait(self._receives)

    def wait_sent(self) -> None:
        """Returns once everything sent may be overwritten. Raises as wait_received() does."""
        self._wait(self._sends)

    def wait(self) -> None:
        """Returns once the batch has completed. Raises as wait_received() does."""
        self.wait_received()
        self.wait_sent()

    def settle(self, seconds: float) -> bool:
        """Waits on the way out of an error; whether the buffers of the batch are free to reuse."""
        deadline = time.monotonic() + seconds
        try:
            for transfer in (*self._receives, *self._sends):
                transfer.wait(deadline - time.monotonic())
        except RuntimeError:
            for transfer in (*self._receives, *self._sends):
                if transfer.staged is not None:
                    transfer.staged.discard()
            return False
        finally:
            # Without its work, gloo drops a message instead of writing it to a reused buffer.
            self._receives.clear()
            self._sends.clear()
        return True

    def _wait(self, transfers: list[_Transfer]) -> None:
        limit = self._channel.timeout_seconds
        started = time.monotonic()
        while transfers:
            try:
                transfers[0].wait(limit - (time.monotonic() - started))
            except RuntimeError as error:
                raise self._channel.failure(
                    transfers[0].label, self._step, error, time.monotonic() - started
                ) from error
            del transfers[0]


class Channel:
    """One stream of data in one process group.

    Args:
        place: the group, and where this process stands in it.
        stream: names the traffic in messages and keeps it apart from others on the group.
        pool: where staging buffers come from.
        timeout_seconds: limit of each wait. NCCL waits on the GPU, not on the host: there the
            limit given to the process group when it was made applies.
        staging: ``"auto"`` stages CUDA tensors over gloo through pinned host memory; ``"always"``
            stages every tensor, so that a test can run that path on a CPU; ``"never"``.
    """

    def __init__(
        self,
        place: GroupPlace,
        stream: Stream,
        pool: BufferPool,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        staging: Staging = "auto",
    ) -> None:
        self.place = place
        self.stream = stream
        self.timeout_seconds = timeout_seconds
        self._pool = pool
        self._staging = staging
        self._gloo = place.group is not None and dist.get_backend(place.group) == "gloo"

    def exchange(
        self, *, receives: Sequence[Message], sends: Sequence[Message], step: str
    ) -> Exchange:
        """Posts a batch and returns at once.

        All ranks of the group must call this in the same order, with messages that match in size
        and order per pair of ranks.

        Args:
            step: names the moment in error messages, ``"step 3 of 8"`` for example.
        """
        # Receives first: what arrives then lands where it belongs without waiting to be matched.
        operations, staged = [], []
        try:
            for index, message in enumerate((*receives, *sends)):
                sending = index >= len(receives)
                buffer = self._stage(message.tensor, fill=sending)
                staged.append(buffer)
                operations.append(
                    dist.P2POp(
                        dist.isend if sending else dist.irecv,
                        message.tensor if buffer is None else buffer.tensor,
                        message.peer,
                        self.place.group,
                        self.stream.tag,
                    )
                )
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            for buffer in staged:
                if buffer is not None:
                    buffer.discard()
            raise self.failure("posting the batch", step, error, 0.0) from error
        return self._in_flight(works, receives, sends, staged, step)

    def _in_flight(
        self,
        works: Sequence[dist.Work],
        receives: Sequence[Message],
        sends: Sequence[Message],
        staged: Sequence[Buffer | None],
        step: str,
    ) -> Exchange:
        if len(works) != len(receives) + len(sends):  # one work for the whole batch
            peers = sorted({message.peer for message in (*receives, *sends)})
            whole = [_Transfer(work, f"exchanging with ranks {peers}", False) for work in works]
            return Exchange(self, step, whole, list(whole))
        count = len(receives)
        incoming = [
            _Transfer(
                work,
                f"receiving from rank {message.peer}",
                buffer is not None or not message.tensor.is_cuda,
                buffer,
                message.tensor if buffer is not None else None,
            )
            for work, message, buffer in zip(works[:count], receives, staged[:count], strict=True)
        ]
        outgoing = [
            _Transfer(
                work,
                f"sending to rank {message.peer}",
                buffer is not None or not message.tensor.is_cuda,
                buffer,
            )
            for work, message, buffer in zip(works[count:], sends, staged[count:], strict=True)
        ]
        return Exchange(self, step, incoming, outgoing)

    def _stage(self, tensor: Tensor, *, fill: bool) -> Buffer | None:
        """A host copy of ``tensor`` to send, or a host buffer to receive into; None: direct."""
        if self._staging == "never":
            return None
        if self._staging == "auto" and not (self._gloo and tensor.is_cuda):
            return None
        buffer = self._pool.lease(
            tensor.shape, tensor.dtype, torch.device("cpu"), pinned=tensor.is_cuda
        )
        if fill:
            buffer.tensor.copy_(tensor)
        return buffer

    def failure(
        self, what: str, step: str, error: Exception, elapsed_seconds: float
    ) -> CommunicationError:
        """The error for a transfer of this channel; see :func:`transfer_failure`."""
        return transfer_failure(
            self.place,
            self.stream,
            what,
            step,
            error,
            elapsed_seconds=elapsed_seconds,
            timeout_seconds=self.timeout_seconds,
        )


def transfer_failure(
    place: GroupPlace,
    stream: Stream,
    what: str,
    step: str,
    error: Exception,
    *,
    elapsed_seconds: float,
    timeout_seconds: float,
) -> CommunicationError:
    """The error that says which transfer failed, where and when."""
    where = (
        f"{stream.name}: {what} at {step}, "
        f"on rank {place.rank} in the group of ranks {list(place.ranks)}"
    )
    # The backend's clock and ours may differ by a tick.
    if elapsed_seconds < 0.99 * timeout_seconds:
        return CommunicationError(f"{where}: {error}")
    return CommunicationTimeout(
        f"{where}: not completed within {timeout_seconds:g} s. The peer is late, has ended or runs "
        "another operation; its own log says which. If it is only late, raise "
        "--longseq-comm-timeout-seconds"
    )
