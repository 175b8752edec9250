"""What a recomputed layer keeps, in host memory between its two runs.

A copy to the host begins when a layer has kept its results, on a stream of its own, and runs beside
the layers that follow. The copy back begins one layer ahead, when the backward of the layer that
came after it begins. Host memory is page-locked, leased from a pool and used again in the next
step. On a CPU the host is where tensors are anyway: the same copies are made, in order.

Source: offloading kept attention, LoongTrain, arXiv 2406.18485.
"""

from typing import Any

import torch
from torch import Tensor

from ..communication.buffers import Buffer, BufferPool
from ..communication.scan.side_stream import SideStream


class HostStore:
    """Host memory for the layers of a model, and the stream of their copies."""

    def __init__(self) -> None:
        self.pool = BufferPool()
        self.stream = SideStream()

    def __deepcopy__(self, _memo: dict[int, Any]) -> "HostStore":
        # Megatron copies specs; memory and stream are one for all copies.
        return self

    def put(self, tensors: tuple[Tensor, ...]) -> "Offloaded":
        """Begins the copy of tensors to the host."""
        return Offloaded(self, tensors)


class Offloaded:
    """Tensors on their way to the host, there, or on their way back.

    Args:
        store: memory and stream.
        tensors: of any shapes and dtypes, on one device. Not held: they may be freed.
    """

    def __init__(self, store: HostStore, tensors: tuple[Tensor, ...]) -> None:
        self._store = store
        self._device = tensors[0].device
        self._host: list[Buffer] = []
        self._back: tuple[Tensor, ...] | None = None
        self._moment: torch.cuda.Event | None = None
        host = torch.device("cpu")
        for tensor in tensors:
            self._host.append(
                store.pool.lease(tensor.shape, tensor.dtype, host, pinned=self._on_gpu)
            )
        with store.stream.after(store.stream.now(self._device), tensors):
            for buffer, tensor in zip(self._host, tensors, strict=True):
                buffer.tensor.copy_(tensor, non_blocking=True)

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def host_bytes(self) -> int:
        """Bytes that it takes on the host."""
        return sum(b.tensor.numel() * b.tensor.element_size() for b in self._host)

    def fetch(self) -> None:
        """Begins the copy back, if it has not begun."""
        if self._back is not None:
            return
        stream = self._store.stream
        self._back = tuple(
            torch.empty_like(buffer.tensor, device=self._device, pin_memory=False)
            for buffer in self._host
        )
        with stream.after(stream.now(self._device), self._back):
            for buffer, tensor in zip(self._host, self._back, strict=True):
                tensor.copy_(buffer.tensor, non_blocking=True)
            self._moment = stream.now(self._device)
        # The next copy into this memory follows on the same stream.
        self._release()

    def get(self) -> tuple[Tensor, ...]:
        """The tensors, on their device; the current stream waits for the copy."""
        self.fetch()
        assert self._back is not None
        self._store.stream.join(self._moment, self._back)
        return self._back

    def _release(self) -> None:
        buffers, self._host = self._host, []
        for buffer in buffers:
            buffer.give_back()

    def __del__(self) -> None:
        self._release()
