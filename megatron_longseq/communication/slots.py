"""Where a circulating block lies, and what is still being sent from there."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from .buffers import Buffer, BufferPool
from .transport import Channel, Exchange, Message

# How long an exception may be held up by transfers that are still in flight.
SETTLE_SECONDS = 30.0


class Slot:
    """The tensors of one block, the leased memory behind them, and the sends from them."""

    def __init__(self, tensors: Sequence[Tensor], buffers: Sequence[Buffer]) -> None:
        self.tensors = tuple(tensors)
        self.buffers = list(buffers)
        self.sending: list[Exchange] = []

    @classmethod
    def to_receive(cls, pool: BufferPool, like: Sequence[Tensor]) -> "Slot":
        """Leases memory for a block of the same shapes and dtypes as ``like``."""
        kinds = [(tensor.shape, tensor.dtype) for tensor in like]
        buffers = pool.lease_all(kinds, like[0].device)
        return cls([buffer.tensor for buffer in buffers], buffers)

    @classmethod
    def to_send(cls, pool: BufferPool, tensors: Sequence[Tensor]) -> "Slot":
        """The tensors themselves; a leased copy of those a message cannot take as they are."""
        strided = [tensor for tensor in tensors if not tensor.is_contiguous()]
        kinds = [(tensor.shape, tensor.dtype) for tensor in strided]
        buffers = pool.lease_all(kinds, tensors[0].device)
        copies = iter([buffer.tensor for buffer in buffers])
        messages = [t if t.is_contiguous() else next(copies).copy_(t) for t in tensors]
        return cls(messages, buffers)

    def exchange(
        self, channel: Channel, target: "Slot", *, send_to: int, receive_from: int, step: str
    ) -> Exchange:
        """Posts one batch: this block to rank ``send_to``, that of ``receive_from`` to target."""
        exchange = channel.exchange(
            receives=[Message(tensor, receive_from) for tensor in target.tensors],
            sends=[Message(tensor, send_to) for tensor in self.tensors],
            step=step,
        )
        self.sending.append(exchange)
        return exchange

    def wait_sent(self) -> None:
        """Returns once the block may be overwritten."""
        while self.sending:
            self.sending[0].wait_sent()
            del self.sending[0]


def release(slots: Sequence[Slot], arriving: Iterable[Exchange]) -> None:
    """Returns the memory of the slots to its pool, after the transfers that touch it.

    Memory that a transfer may still touch, because it does not complete in time, is given up.
    """
    pending = [*arriving, *(exchange for slot in slots for exchange in slot.sending)]
    settled = [exchange.settle(SETTLE_SECONDS) for exchange in pending]
    for slot in slots:
        slot.sending.clear()
        for buffer in slot.buffers:
            buffer.give_back() if all(settled) else buffer.discard()


def step_name(index: int, steps: Sequence[object]) -> str:
    """The step of a rotation as error messages call it."""
    return f"step {index + 1} of {len(steps)}"
