"""Counts what a computation holds and sends. Plain PyTorch; exact where a count is exact."""

from .links import LimitedLinks, links_available
from .live_bytes import LiveBytes, LiveStorage
from .saved_bytes import HeldBytes, SavedForBackward, SavedTensor, held_after, saved_for_backward
from .traffic import Counts, Flow, Traffic, TrafficCounter
from .transport import MeasuredTransport

__all__ = [
    "Counts",
    "Flow",
    "HeldBytes",
    "LimitedLinks",
    "LiveBytes",
    "LiveStorage",
    "MeasuredTransport",
    "SavedForBackward",
    "SavedTensor",
    "Traffic",
    "TrafficCounter",
    "held_after",
    "links_available",
    "saved_for_backward",
]
