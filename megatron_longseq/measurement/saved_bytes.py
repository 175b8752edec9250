"""Bytes autograd saves for the backward pass: how many, in which tensors, by which line.

    with saved_for_backward(exclude=[model]) as saved:
        loss = model(tokens)
    print(saved.bytes)  # everything these operators saved, parameters excepted
    loss.backward()
    print(saved.live_bytes())  # 0: backward has let go of all of it

The unit is the storage, as memory is: two saved views of one storage count once, and a saved
slice counts the whole storage it keeps alive. Custom autograd functions are included as far as
they call ``ctx.save_for_backward``. A tensor kept as a plain attribute of ``ctx`` escapes every
hook PyTorch offers; :func:`held_after` finds it by the memory it keeps.

Inside ``torch.utils.checkpoint`` (non-reentrant) PyTorch's own hooks take the place of these, so
that only what the checkpoint itself saves is counted, which is right: nothing else is kept. If
backward runs inside the scope, what recomputation saves is counted as well.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_leaves

from .live_bytes import LiveBytes

_TORCH_FOLDER = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class SavedTensor:
    """One tensor autograd saved.

    Attributes:
        bytes: of the tensor's own elements.
        new_bytes: what it added to the total: the size of its storage, or 0 if that storage had
            been saved before or is excluded.
        origin: for example ``layers.0.mlp (mlp.py:57)``: the innermost module whose forward was
            running, by its name in an excluded module or else its class, and the innermost line
            outside PyTorch.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    new_bytes: int
    origin: str


@dataclass
class SavedForBackward:
    """What was saved in a scope of :func:`saved_for_backward`.

    Attributes:
        bytes: unique storages saved so far, each with its size when it was saved first.
        tensors: every saved tensor in order, excluded ones too (with ``new_bytes`` 0).
    """

    bytes: int = 0
    tensors: list[SavedTensor] = field(default_factory=list)
    _held: "weakref.WeakSet[_Packed]" = field(default_factory=weakref.WeakSet, repr=False)

    def live_bytes(self) -> int:
        """Bytes autograd still holds of what was saved, at the storages' present sizes."""
        return sum(self.live_storages().values())

    def live_storages(self) -> dict[int, int]:
        """Those bytes by storage (see :attr:`LiveStorage.address`)."""
        storages = (packed.tensor.untyped_storage() for packed in list(self._held))
        return {storage._cdata: storage.nbytes() for storage in storages}

    def rows(self) -> list[dict[str, Any]]:
        """One dict per origin, shape and dtype, largest first, for tables and JSON."""
        totals: dict[tuple, dict[str, Any]] = {}
        for saved in self.tensors:
            key = (saved.origin, saved.shape, saved.dtype)
            row = totals.setdefault(
                key,
                {
                    "origin": saved.origin,
                    "shape": list(saved.shape),
                    "dtype": str(saved.dtype).removeprefix("torch."),
                    "tensors": 0,
                    "bytes": 0,
                },
            )
            row["tensors"] += 1
            row["bytes"] += saved.new_bytes
        return sorted(totals.values(), key=lambda row: -row["bytes"])


@dataclass(frozen=True)
class HeldBytes:
    """What exists after a computation that did not exist before, in bytes of unique storages.

    Attributes:
        saved: held for backward where hooks see it.
        result: held by the result only.
        unseen: held by neither: attributes of a ``ctx``, caches, leaks.
    """

    saved: int
    result: int
    unseen: int


@contextlib.contextmanager
def saved_for_backward(
    exclude: Iterable[torch.Tensor | nn.Module] = (),
) -> Iterator[SavedForBackward]:
    """Counts what operators in this scope save for backward.

    Args:
        exclude: tensors, and modules for all their parameters and buffers, whose storages do not
            count. An ``nn.Parameter`` never does, nor a view of one such as ``weight.t()``.

    Nothing is kept alive longer than autograd keeps it, values and gradients are unchanged, and a
    saved tensor that is modified in place is still refused in backward. Scopes nest; the inner
    one counts.
    """
    names: dict[nn.Module, str] = {}
    excluded: dict[int, weakref.ref] = {}
    for thing in exclude:
        if isinstance(thing, nn.Module):
            names |= {module: name for name, module in thing.named_modules() if name}
            tensors = [*thing.parameters(), *thing.buffers()]
        else:
            tensors = [thing]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            excluded[storage._cdata] = weakref.ref(storage)
    recorder = _Recorder(SavedForBackward(), excluded, names)
    enter = register_module_forward_pre_hook(recorder.enter_module)
    leave = register_module_forward_hook(recorder.leave_module, always_call=True)
    try:
        with saved_tensors_hooks(recorder.pack, _unpack):
            yield recorder.saved
    finally:
        enter.remove()
        leave.remove()


def held_after(
    run: Callable[[], Any], exclude: Iterable[torch.Tensor | nn.Module] = ()
) -> HeldBytes:
    """Runs a forward computation and tells what it leaves in memory, by who holds it.

    Args:
        run: returns a tensor, or a structure of tensors.
        exclude: as for :func:`saved_for_backward`. What exists before the run never counts.
    """
    with LiveBytes() as live, saved_for_backward(exclude) as saved:
        result = run()
    of_result = {
        leaf.untyped_storage()._cdata
        for leaf in tree_leaves(result)
        if isinstance(leaf, torch.Tensor)
    }
    of_autograd = saved.live_storages()
    totals = {"saved": 0, "result": 0, "unseen": 0}
    for storage in live.alive():
        if storage.origin is None:
            continue
        if storage.address in of_autograd:
            totals["saved"] += storage.bytes
        elif storage.address in of_result:
            totals["result"] += storage.bytes
        else:
            totals["unseen"] += storage.bytes
    return HeldBytes(**totals)


class _Packed:
    """What autograd holds in the place of a saved tensor; dies when autograd lets go of it."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: what an operator saves of its own output must not hold the operator.
        self.tensor = tensor.detach()
        self.version = tensor._version


def _unpack(packed: Any) -> torch.Tensor:
    if not isinstance(packed, _Packed):
        return packed
    # Where there are hooks, autograd leaves this check to them.
    if packed.tensor._version != packed.version:
        raise RuntimeError(
            f"a tensor of shape {tuple(packed.tensor.shape)} that was saved for backward has been "
            f"modified in place: it is at version {packed.tensor._version}, saved was "
            f"{packed.version}"
        )
    return packed.tensor


@dataclass
class _Recorder:
    """The hooks of one scope. Autograd holds none of this after the scope but ``_unpack``."""

    saved: SavedForBackward
    excluded: dict[int, weakref.ref]
    names: dict[nn.Module, str]
    known: dict[int, weakref.ref] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)

    def enter_module(self, module: nn.Module, _args: Any) -> None:
        self.running.append(self.names.get(module) or type(module).__name__)

    def leave_module(self, _module: nn.Module, _args: Any, _result: Any) -> None:
        if self.running:
            self.running.pop()

    def pack(self, tensor: torch.Tensor) -> Any:
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:
            return tensor  # sparse and the like have no storage to count
        root = tensor if tensor._base is None else tensor._base
        counts = not isinstance(root, nn.Parameter) and not _holds(self.excluded, storage)
        new = counts and not _holds(self.known, storage)
        if new:
            self.known[storage._cdata] = weakref.ref(storage)
            self.saved.bytes += storage.nbytes()
        self.saved.tensors.append(
            SavedTensor(
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                bytes=tensor.numel() * tensor.element_size(),
                new_bytes=storage.nbytes() if new else 0,
                origin=self._origin(),
            )
        )
        packed = _Packed(tensor)
        if counts:
            self.saved._held.add(packed)
        return packed

    def _origin(self) -> str:
        frame = sys._getframe(2)
        while frame.f_back and frame.f_code.co_filename.startswith(_TORCH_FOLDER):
            frame = frame.f_back
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return f"{self.running[-1]} ({line})" if self.running else line


def _holds(known: dict[int, weakref.ref], storage: torch.UntypedStorage) -> bool:
    # An address alone is not enough: a dead storage's may be in use again.
    reference = known.get(storage._cdata)
    return reference is not None and reference() is storage
