"""Counts what a computation holds and sends. Plain PyTorch; exact where a count is exact."""

from .live_bytes import LiveBytes, LiveStorage
from .saved_bytes import HeldBytes, SavedForBackward, SavedTensor, held_after, saved_for_backward

__all__ = [
    "HeldBytes",
    "LiveBytes",
    "LiveStorage",
    "SavedForBackward",
    "SavedTensor",
    "held_after",
    "saved_for_backward",
]
