"""Selective Checkpoint++: recompute a layer in backward, but for what its attention has computed.

A checkpoint runs a function twice: once without keeping anything, and again in backward. Between
the two runs of one call, an operator may keep results that cost much to compute and little to hold:

    kept = Kept(function)           one per call of a checkpoint
    checkpoint(kept, ...)           first run: `keep_or_compute` computes and keeps
                                    second run: it returns what was kept, in the same order

An operator asks :func:`keep_or_compute`, or :func:`kept_results` and :func:`keep_results` where
more than one call lies between; outside of any such function it simply computes. There is
no index of layers and no flag of the process, so any number of calls may be in flight, in any
order, as pipelines have them; what is kept dies with the call.

Source: LoongTrain, arXiv 2406.18485 (Selective Checkpoint++).
"""

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from .offload import HostStore, Offloaded

_CURRENT: ContextVar["Kept | None"] = ContextVar("longseq_kept", default=None)


class Kept:
    """A function for a checkpoint, with what its first run keeps for the second.

    Args:
        function: what the checkpoint is to run.
        share: of its rows that an operator which can tell rows apart keeps, from 0 to 1.
        store: keeps them in host memory; on their device if not given.
        before: the call whose second run follows this one's, whose results are fetched from the
            host meanwhile.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        share: float = 1.0,
        *,
        store: HostStore | None = None,
        before: "Kept | None" = None,
    ) -> None:
        self._function = function
        self.share = share
        self.recording = True
        self._runs = 0
        self._items: list[tuple[Tensor, ...] | Offloaded] = []
        self._store = store
        self._before = None if before is None else weakref.ref(before)

    def __call__(self, *args: Any) -> Any:
        """Runs the function; the first time it keeps, then it gives back."""
        self.recording = self._runs == 0
        self._runs += 1
        if self.recording:
            self._items.clear()
        else:
            self._fetch()
        token = _CURRENT.set(self)
        try:
            return self._function(*args)
        finally:
            # Also where a checkpoint ends its second run early, by an exception of its own.
            _CURRENT.reset(token)

    def keep(self, tensors: tuple[Tensor, ...]) -> None:
        """Holds the results of one operator until the second run."""
        held = tuple(tensor.detach() for tensor in tensors)
        self._items.append(held if self._store is None else self._store.put(held))

    def _fetch(self) -> None:
        """Begins the way back of what is on the host, here and for the next second run."""
        before = None if self._before is None else self._before()
        for kept in (self, before):
            for item in [] if kept is None else kept._items:
                if isinstance(item, Offloaded):
                    item.fetch()

    def take(self) -> tuple[Tensor, ...]:
        """The results of the next operator, which are then held here no longer.

        Raises:
            RuntimeError: the second run calls operators that the first one did not.
        """
        if not self._items:
            raise RuntimeError(
                "a recomputed layer asks for more results than its first run has kept: it must "
                "run the same operators in the same order"
            )
        item = self._items.pop(0)
        return item.get() if isinstance(item, Offloaded) else item

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tensors that are held, wherever they are."""
        return sum(
            item.host_bytes
            if isinstance(item, Offloaded)
            else sum(t.numel() * t.element_size() for t in item)
            for item in self._items
        )


def kept_results() -> tuple[Tensor, ...] | None:
    """What the first run of a checkpoint has kept of an operator; ``None``: compute, and keep it.

    Called inside an autograd function's forward, where no gradients are recorded.
    """
    current = _CURRENT.get()
    return None if current is None or current.recording else current.take()


def keep_results(*results: Tensor) -> None:
    """Keeps what an operator has computed for the second run, if there will be one."""
    current = _CURRENT.get()
    if current is not None and current.recording:
        current.keep(results)


def keep_or_compute(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Results of an operator: what the first run has kept of them, or computed, and kept."""
    results = kept_results()
    if results is None:
        results = compute()
        keep_results(*results)
    return results


def keep_rows_or_compute(
    compute: Callable[[slice], tuple[Tensor, Tensor]], rows: int
) -> tuple[Tensor, Tensor]:
    """As :func:`keep_or_compute`, for an operator that can compute some rows by themselves.

    Args:
        compute: from rows (of its result's dimension 0) to ``out [rows, ..]`` and
            ``lse [.., rows]``.
        rows: in all. The last ones are kept: under a causal mask they cost most.
    """
    current = _CURRENT.get()
    if current is None or current.share >= 1:
        out, lse = keep_or_compute(lambda: compute(slice(0, rows)))
        return out, lse
    first = rows - round(current.share * rows)
    if current.recording:
        out, lse = compute(slice(0, rows))
        # Copies: a slice would hold the whole.
        current.keep((out[first:].clone(), lse[..., first:].clone()))
        return out, lse
    late_out, late_lse = current.take()
    if first == 0:
        return late_out, late_lse
    early_out, early_lse = compute(slice(0, first))
    return torch.cat((early_out, late_out)), torch.cat((early_lse, late_lse), -1)
