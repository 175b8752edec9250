"""Persistent communication buffers, leased and returned.

A ring that allocated its receive buffers anew at every hop would fragment the memory and tie each
of them to the communication stream. One pool serves all layers and all streams of data: a buffer
is leased for a rotation and comes back when its transfers have completed, on every way out. On a
GPU that is ordered on the current stream: calls that share a pool must run on one CUDA stream.
"""

import threading
from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor


class Buffer:
    """A leased piece of memory, seen as ``tensor``. Ends with give_back() or discard()."""

    def __init__(
        self, pool: "BufferPool", kind: tuple[torch.device, bool], memory: Tensor, tensor: Tensor
    ) -> None:
        self.tensor = tensor
        self._pool = pool
        self._kind = kind
        self._memory: Tensor | None = memory

    def give_back(self) -> None:
        """Returns the memory to the pool. No transfer may touch it any more."""
        if self._memory is not None:
            self._pool._return(self._kind, self._memory)
            self._memory = None

    def discard(self) -> None:
        """Ends the lease without reuse: a transfer that did not complete may still touch it."""
        if self._memory is not None:
            self._pool._forget(self._memory)
            self._memory = None


class BufferPool:
    """Hands out memory by size and device and keeps what comes back.

    A request is served by the smallest free buffer that is large enough. If none is, the largest
    free one makes way for a new one, so that alternating lengths (training and evaluation, say)
    hold the memory of the longest, not of their sum.

    Attributes:
        held_bytes: bytes the pool owns, leased ones included.
        leased_bytes: bytes out on lease.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.device, bool], list[Tensor]] = {}
        self._lock = threading.Lock()
        self.held_bytes = 0
        self.leased_bytes = 0

    def lease(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        pinned: bool = False,
    ) -> Buffer:
        """Leases a contiguous, uninitialised tensor.

        Args:
            pinned: page-locked host memory, for copies to and from a GPU.
        """
        needed = prod(shape) * dtype.itemsize
        kind = device, pinned
        with self._lock:
            memory = self._take(kind, needed)
            if memory is None:
                memory = torch.empty(needed, dtype=torch.uint8, device=device, pin_memory=pinned)
                self.held_bytes += needed
            self.leased_bytes += memory.numel()
        return Buffer(self, kind, memory, memory[:needed].view(dtype).view(*shape))

    def lease_all(
        self, kinds: Iterable[tuple[Sequence[int], torch.dtype]], device: torch.device
    ) -> list[Buffer]:
        """Leases one buffer per (shape, dtype): all of them, or none if memory runs out."""
        buffers: list[Buffer] = []
        try:
            for shape, dtype in kinds:
                buffers.append(self.lease(shape, dtype, device))
        except BaseException:
            for buffer in buffers:
                buffer.give_back()
            raise
        return buffers

    def _take(self, kind: tuple[torch.device, bool], needed: int) -> Tensor | None:
        free = self._free.get(kind)
        if not free:
            return None
        fitting = [index for index, memory in enumerate(free) if memory.numel() >= needed]
        if fitting:
            return free.pop(min(fitting, key=lambda index: free[index].numel()))
        dropped = free.pop(max(range(len(free)), key=lambda index: free[index].numel()))
        self.held_bytes -= dropped.numel()
        return None

    def _return(self, kind: tuple[torch.device, bool], memory: Tensor) -> None:
        with self._lock:
            self.leased_bytes -= memory.numel()
            self._free.setdefault(kind, []).append(memory)

    def _forget(self, memory: Tensor) -> None:
        with self._lock:
            self.leased_bytes -= memory.numel()
            self.held_bytes -= memory.numel()
