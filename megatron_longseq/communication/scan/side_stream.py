"""On a GPU a scan runs on a CUDA stream of its own, beside the caller's work; on a CPU, nothing."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """The order between the caller's stream and that of the scans of one operator."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def now(self, device: torch.device) -> "torch.cuda.Event | None":
        """The moment at which the current stream has done what it was given so far."""
        if device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    @contextmanager
    def after(self, moment: "torch.cuda.Event | None", tensors: Iterable[Tensor]) -> Iterator[None]:
        """Runs its body on the side stream, after ``moment``; it may read ``tensors``."""
        if moment is None:
            yield
            return
        given = list(tensors)
        device = given[0].device
        side = self._streams.get(device) or torch.cuda.Stream(device)
        self._streams[device] = side
        side.wait_event(moment)
        for tensor in given:
            tensor.record_stream(side)
        with torch.cuda.stream(side):
            yield

    def join(self, moment: "torch.cuda.Event | None", tensors: Iterable[Tensor]) -> None:
        """The current stream goes on after ``moment``; it will read ``tensors``."""
        if moment is None:
            return
        for tensor in tensors:
            current = torch.cuda.current_stream(tensor.device)
            current.wait_event(moment)
            tensor.record_stream(current)
