"""Exact bytes of live tensor storages: now, and at the peak.

:class:`LiveBytes` watches every operator PyTorch dispatches while it is active, forward, backward
and optimizer alike, and follows each storage it sees until PyTorch frees it:

    with LiveBytes() as live:
        loss = model(tokens)
        held = live.current()
        live.reset_peak()
        loss.backward()
    print(held, live.peak())

What is counted
    Bytes of unique storages, so a view costs nothing and a slice costs the storage it keeps alive.
    Storages that only C++ holds (saved for backward, a gradient on its way) count like any other.
    The numbers depend on the program alone: not on the allocator, its caches, or the device. (One
    exception: a thread of gloo may hold a tensor for a moment after its work is done, and then
    autograd copies a gradient that it would otherwise have taken over.)

Since when
    A storage is counted from the first operator that returns it *or takes it as an input*. What
    exists before that (a model, a batch) is counted from the start if given to :meth:`include`.

Since Python changes no operator when it calls ``tensor.untyped_storage().resize_(..)``, the way
activations and parameters are freed by hand, sizes are never trusted for long: :meth:`current`
asks every storage, a claim of a new peak is settled by asking every storage, and one that has
grown is noticed when the next operator uses it. (The bytes of one that grows and shrinks again
unused are missed.)

What cannot be seen: temporaries inside one fused C++ kernel, workspaces and buffers of
communication libraries, and memory that is no tensor. Meta and fake tensors occupy nothing and
are ignored, as are tensors without a storage of their own (sparse, MKL-DNN), unlike the dense
tensors they were made of. A tensor over memory PyTorch did not allocate (NumPy, a memory map,
shared memory) counts with the length of its storage.

Why not ``torch.distributed._tools.mem_tracker``: it attributes memory to modules, and to do that
installs hooks on all of them, patches ``UntypedStorage.resize_`` globally, rounds sizes up to the
CUDA allocator's blocks, and takes tens of microseconds per operator. ``torch.profiler`` sees even a
kernel's temporaries, but records every event and so cannot run for the lifetime of a process.

Overhead, measured on one core: 4 microseconds per operator, which is what PyTorch takes to call a
dispatch mode in Python, and 1.5 to 4 for the count. While a peak is being set, each operator that
raises it also costs 0.08 microseconds for every live storage.
"""

import weakref
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorage(NamedTuple):
    """One storage that is alive.

    Attributes:
        address: identifies the storage among those alive (it is the C++ object's address).
        bytes: its present size.
        origin: the operator that returned it first, or None if it was there before: included, or
            first seen as an operator's input.
    """

    address: int
    bytes: int
    origin: str | None


class _Entry(weakref.ref):
    """A weak reference to a storage with what was last known of it.

    PyTorch keeps the Python object of a storage for as long as C++ keeps the storage, so that the
    reference dies exactly when the memory is freed.
    """

    __slots__ = ("address", "nbytes", "origin")

    address: int
    nbytes: int
    origin: Any


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensor storages while active; see the module's description.

    A context manager for one thread and what autograd runs for it. Storages seen so far stay
    followed after the exit, so :meth:`current` keeps its meaning, and the object may be entered
    again. Nothing it holds keeps a tensor alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, _Entry] = {}
        # Deaths may be reported from any thread and in the middle of any Python code, so they are
        # only noted here (an atomic append) and settled by the next reader.
        self._dead: deque[weakref.ref] = deque()
        self._bytes = 0
        self._peak = 0

    def include(self, *things: torch.Tensor | nn.Module | Iterable[Any]) -> "LiveBytes":
        """Counts these tensors, parameters and buffers from now on; returns itself.

        Args:
            things: tensors, modules (with buffers and gradients), or iterables of these.
        """
        for thing in things:
            if isinstance(thing, torch.Tensor):
                self._see_tensor(thing, None)
                if thing.is_leaf and thing.grad is not None:
                    self._see_tensor(thing.grad, None)
            elif isinstance(thing, nn.Module):
                self.include(thing.parameters(), thing.buffers())
            else:
                self.include(*thing)
        self.current()
        return self

    def current(self) -> int:
        """Bytes of all storages seen so far that are alive, at their present sizes."""
        self._bury()
        for entry in list(self._live.values()):
            storage = entry()
            if storage is not None:
                self._resize(entry, storage.nbytes())
        self._bury()
        self._peak = max(self._peak, self._bytes)
        return self._bytes

    def peak(self) -> int:
        """Most bytes alive after any operator since the start or the last :meth:`reset_peak`."""
        self.current()
        return self._peak

    def reset_peak(self) -> None:
        """Lets the next peak start from what is alive now."""
        self._peak = 0
        self.current()

    def alive(self) -> list[LiveStorage]:
        """All storages seen so far that are alive, in the order they were seen first."""
        self.current()
        return [
            LiveStorage(e.address, e.nbytes, None if e.origin is None else str(e.origin))
            for e in list(self._live.values())
        ]

    def by_origin(self) -> dict[str, int]:
        """Bytes alive now by the operator that returned them first, largest first.

        What was there before goes by the name ``"given"``.
        """
        totals: Counter[str] = Counter()
        for storage in self.alive():
            totals[storage.origin or "given"] += storage.bytes
        return dict(totals.most_common())

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for kind in types:
            # A wrapper such as DTensor has no memory: let it unfold into operators on what it
            # wraps. This mode stays active for those, which it would not below this call.
            if hasattr(kind, "__tensor_flatten__"):
                return NotImplemented
        result = func(*args, **kwargs) if kwargs else func(*args)
        # The inputs are seen after the operator, which may have resized one of them, and before
        # its results, which may be one of them.
        self._see(args, None)
        if kwargs:
            self._see(kwargs.values(), None)
        if isinstance(result, torch.Tensor):
            self._see_tensor(result, func)
        elif isinstance(result, tuple | list):
            self._see(result, func)
        if self._dead:
            self._bury()
        if self._bytes > self._peak:
            # Settled by asking every storage: one may have been resized since it was last seen.
            self.current()
        return result

    def _see(self, values: Iterable[Any], origin: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self._see_tensor(value, origin)
            elif isinstance(value, tuple | list):
                self._see(value, origin)

    def _see_tensor(self, tensor: torch.Tensor, origin: Any) -> None:
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:
            return  # sparse and the like
        nbytes = storage.nbytes()
        address = storage._cdata
        entry = self._live.get(address)
        if entry is not None:
            if entry() is storage:
                if entry.nbytes != nbytes:
                    self._resize(entry, nbytes)
                return
            # The address is in use again, so the storage known by it is dead, its death noted.
            self._bury()
        if storage.device.type == "meta":
            return
        entry = _Entry(storage, self._dead.append)
        entry.address = address
        entry.nbytes = nbytes
        entry.origin = origin
        self._live[address] = entry
        self._bytes += nbytes

    def _resize(self, entry: _Entry, nbytes: int) -> None:
        self._bytes += nbytes - entry.nbytes
        entry.nbytes = nbytes

    def _bury(self) -> None:
        while self._dead:
            entry = self._dead.popleft()
            assert isinstance(entry, _Entry)
            if self._live.get(entry.address) is entry:
                del self._live[entry.address]
                self._bytes -= entry.nbytes
