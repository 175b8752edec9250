"""The gradients of circulating blocks: each sum follows its block, one hop behind.

At a step, the sum over the ranks that used the block before is arriving while this rank computes
its own part. add() waits for it and adds; ship() sends the sum on and posts the receive for that of
the next block. Two buffers suffice: one is sent from, the other received into.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .buffers import BufferPool
from .slots import Slot, release
from .transport import Channel, Exchange

EVERYWHERE = slice(None)


class Gradient:
    """This rank's part of the gradient of one block."""

    def __init__(self, chain: "GradientChain") -> None:
        self._chain: GradientChain | None = chain

    def add(self, *parts: Tensor, at: slice = EVERYWHERE) -> None:
        """Adds to the gradients of the block's tensors; may be called several times per step.

        Args:
            parts: one per tensor of the block, of any floating dtype.
            at: the rows (of dimension 0) of the tensors that the parts cover; all of them if not
                given.

        Raises:
            RuntimeError: the loop has moved on to another block.
            CommunicationError: the sum of the ranks before did not arrive.
        """
        if self._chain is None:
            raise RuntimeError("this gradient has been sent on; add to it inside its own step")
        self._chain.add(parts, at)

    def sums(self) -> tuple[Tensor, ...]:
        """The sums of this step, here and complete but for this rank's part: add to them in place.

        Raises:
            RuntimeError: the loop has moved on to another block.
            CommunicationError: the sum of the ranks before did not arrive.
        """
        if self._chain is None:
            raise RuntimeError("this gradient has been sent on; add to it inside its own step")
        return self._chain.arrived()

    def end(self) -> None:
        """The sum leaves; add() is refused from now on."""
        self._chain = None


class GradientChain:
    """The sums of one rotation, in the order of its steps.

    Args:
        channel: carries the sums.
        pool: where the two buffers come from.
        like: shapes and dtypes of the sums.
        device: where they live.
    """

    def __init__(
        self,
        channel: Channel,
        pool: BufferPool,
        like: Sequence[tuple[torch.Size, torch.dtype]],
        device: torch.device,
    ) -> None:
        self._channel = channel
        self._pool = pool
        self._like = like
        self._device = device
        self._slots: list[Slot] = []  # the sum of the current step, and the other
        self._arriving: Exchange | None = None
        self._empty = True

    def open(self, *, doubled: bool) -> None:
        """Leases the buffers: one, or two if the sums travel."""
        if self._slots:
            raise RuntimeError("a rotation goes round once; make another for a second tour")
        for _ in range(2 if doubled else 1):
            buffers = self._pool.lease_all(self._like, self._device)
            self._slots.append(Slot([buffer.tensor for buffer in buffers], buffers))
        self._empty = True

    def add(self, parts: Sequence[Tensor], at: slice) -> None:
        """Adds this rank's parts to the sum of the current step."""
        for total, part in zip(self.arrived(fill=False), parts, strict=True):
            rows = total[at]
            if not self._empty:
                rows += part
            else:
                if rows.shape != total.shape:
                    total.zero_()
                rows.copy_(part)
        self._empty = False

    def ship(self, *, send_to: int, receive_from: int, step: str) -> None:
        """Sends the current sum on and posts the receive for the sum of the next step."""
        self.arrived()
        current, other = self._slots
        other.wait_sent()
        self._arriving = current.exchange(
            self._channel, other, send_to=send_to, receive_from=receive_from, step=step
        )
        self._slots.reverse()

    def arrived(self, *, fill: bool = True) -> tuple[Tensor, ...]:
        """The current sum, once it is here; after the last hop, that of the own block.

        Args:
            fill: write zeros if nothing has been added to a sum that starts here.
        """
        if not self._slots:
            raise RuntimeError("the rotation is closed: its gradients are gone")
        if self._arriving is not None:
            self._arriving.wait_received()
            self._arriving = None
        if self._empty and fill:
            for total in self._slots[0].tensors:
                total.zero_()
            self._empty = False
        return self._slots[0].tensors

    def wait_sent(self) -> None:
        """Returns once all that this rank sent has left."""
        for slot in self._slots:
            slot.wait_sent()

    def close(self) -> None:
        """Returns the buffers, after the transfers that touch them."""
        slots, self._slots = self._slots, []
        arriving, self._arriving = self._arriving, None
        release(slots, [arriving] if arriving is not None else [])
