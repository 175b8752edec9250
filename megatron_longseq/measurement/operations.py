"""What one rank sends in one communication call, worked out from the call's arguments.

========================  ==============================  ==============  =====
operation                 bytes sent by a rank            messages        exact
========================  ==============================  ==============  =====
send                      S                               1               yes
receive                   0                               0               yes
all_to_all                S - own part                    peers given any yes
gather, scatter           S to or from the root           1 or n - 1      yes
all_reduce                2 (S - S/n)                     2 (n - 1)       ring
all_gather                (n - 1) S                       n - 1           ring
reduce_scatter            S - own part                    n - 1           ring
broadcast                 S, but the chain's last 0       1 or 0          ring
reduce                    S, but the root 0               1 or 0          ring
barrier                   0                               ceil(log2 n)    no
========================  ==============================  ==============  =====

S is the payload: the bytes of the buffer the rank hands to the call (for a receive, the bytes it
asks for), n the size of the group. "Exact" means that every correct implementation sends these
bytes. "Ring" is the bandwidth-optimal ring algorithm: the least a rank can send for the
reductions and gathers, and what NCCL sends for large buffers; a library may choose another
algorithm for small ones. Where S/n is not whole, a rank's part is one element more for the first
ranks, so that the sum over the ranks is exact. Headers, acknowledgements and control messages are
not counted.

Source of the ring formulas: Thakur, Rabenseifner, Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

Tensors = torch.Tensor | Iterable[Any]


class Place(NamedTuple):
    """A rank's place in a process group."""

    rank: int
    size: int


class Transfer(NamedTuple):
    """What one call makes one rank send.

    Attributes:
        operation: its name in the table above.
        payload_bytes: S in the table above.
        messages: number of messages sent.
        bytes_sent: bytes sent.
        exact: whether the counts hold for every implementation, or are those of a ring.
        peer: the other rank of a send or receive, within the group; None for collectives.
        tag: of a send or receive.
        root: the rank that gives to all or takes from all, within the group.
    """

    operation: str
    payload_bytes: int
    messages: int
    bytes_sent: int
    exact: bool
    peer: int | None = None
    tag: int = 0
    root: int | None = None


def byte_count(tensors: Tensors) -> int:
    """Bytes of the elements of a tensor, or of all tensors in nested sequences."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(byte_count(tensor) for tensor in tensors)


def send(_: Place, tensors: Tensors, peer: int, tag: int = 0) -> Transfer:
    size = byte_count(tensors)
    return Transfer("send", size, 1, size, True, peer, tag)


def receive(_: Place, tensors: Tensors, peer: int | None, tag: int = 0) -> Transfer:
    return Transfer("receive", byte_count(tensors), 0, 0, True, peer, tag)


def all_reduce(place: Place, tensors: Tensors) -> Transfer:
    size = byte_count(tensors)
    first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
    width = first.element_size() if first is not None else 1
    elements = size // width
    own = width * (elements // place.size + (place.rank < elements % place.size))
    return Transfer("all_reduce", size, 2 * (place.size - 1), 2 * (size - own), False)


def all_gather(place: Place, inputs: Tensors) -> Transfer:
    size, others = byte_count(inputs), place.size - 1
    return Transfer("all_gather", size, others, others * size, False)


def reduce_scatter(place: Place, inputs: Tensors) -> Transfer:
    """``inputs`` is one tensor to split evenly, or a list of these, or lists of one per rank."""
    size = byte_count(inputs)
    own = 0
    for part in [inputs] if isinstance(inputs, torch.Tensor) else inputs:
        if isinstance(part, torch.Tensor):
            own += byte_count(part) // place.size
        else:
            own += byte_count(part[place.rank])
    return Transfer("reduce_scatter", size, place.size - 1, size - own, False)


def broadcast(place: Place, tensors: Tensors, root: int) -> Transfer:
    size = byte_count(tensors)
    forwards = (place.rank + 1) % place.size != root
    return Transfer("broadcast", size, int(forwards), size * forwards, False, root=root)


def reduce(place: Place, tensors: Tensors, root: int) -> Transfer:
    size = byte_count(tensors)
    forwards = place.rank != root
    return Transfer("reduce", size, int(forwards), size * forwards, False, root=root)


def gather(place: Place, inputs: Tensors, root: int) -> Transfer:
    size = byte_count(inputs)
    sends = place.rank != root
    return Transfer("gather", size, int(sends), size * sends, True, root=root)


def scatter(place: Place, inputs: Sequence[Any], root: int) -> Transfer:
    """``inputs`` holds one list with a tensor per rank on the root, and nothing elsewhere."""
    size = byte_count(inputs)
    if place.rank != root:
        return Transfer("scatter", size, 0, 0, True, root=root)
    own = sum(byte_count(part[root]) for part in inputs)
    return Transfer("scatter", size, place.size - 1, size - own, True, root=root)


def all_to_all(place: Place, inputs: Sequence[torch.Tensor]) -> Transfer:
    """``inputs`` holds one tensor per rank."""
    return _all_to_all(place, [byte_count(part) for part in inputs])


def all_to_all_single(place: Place, tensor: torch.Tensor, splits: Sequence[int]) -> Transfer:
    """``splits`` says how many rows go to each rank; empty: the same to all."""
    size = byte_count(tensor)
    if not splits:
        return _all_to_all(place, [size // place.size] * place.size)
    row = size // tensor.shape[0] if tensor.shape[0] else 0
    return _all_to_all(place, [row * rows for rows in splits])


def barrier(place: Place) -> Transfer:
    return Transfer("barrier", 0, math.ceil(math.log2(place.size)), 0, False)


def _all_to_all(place: Place, parts: list[int]) -> Transfer:
    others = [size for rank, size in enumerate(parts) if rank != place.rank]
    return Transfer("all_to_all", sum(parts), sum(size > 0 for size in others), sum(others), True)
