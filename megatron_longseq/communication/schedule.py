"""Who sends which block to whom, step by step. The ring engine executes it and knows no other rule.

A rank's schedule is a list of steps, one per block it sees. Before it computes with the block of a
step, it starts the step's hops: each sends *that same block* on and receives another, which will be
used at the later step named by ``lands_at``. After it has computed, the gradient of the block
leaves over the step's gradient hop, and what arrives from there is the sum for the block of the
next step; after the last step, the finished sum of the rank's own block.

That is enough for a double ring: its outer hop leaves at the first step of a window and lands at
the first step of the next one, and its gradients change window by one diagonal hop.

    window 0        window 1            step    block of    hops of rank 0
    0 - 1 - 2 - 3   4 - 5 - 6 - 7       0       0           outer to 4, inner to 1
                                        1..3    3, 2, 1     inner
                                        4       4           inner
                                        5..7    7, 6, 5     inner
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Hop:
    """One exchange between ring positions.

    Attributes:
        send_to: the position that gets what this one sends.
        receive_from: the position that sends to this one.
        lands_at: index of the step whose block arrives by this hop; the number of steps if a
            gradient arrives home.
        lane: hops that may be in flight side by side run on different lanes. A lane has two
            receive buffers and may have a process group of its own.
    """

    send_to: int
    receive_from: int
    lands_at: int
    lane: str


@dataclass(frozen=True)
class Step:
    """What one rank does with one block.

    Attributes:
        owner: the ring position the block belongs to; at step 0 the rank's own.
        hops: started before the block is used.
        gradient_hop: started when the gradient of the block has been added; ``None`` if the sum
            is at home already (a ring of one).
    """

    owner: int
    hops: tuple[Hop, ...]
    gradient_hop: Hop | None


class Schedule(Protocol):
    """The steps of every rank of a ring."""

    def steps(self, position: int, size: int) -> tuple[Step, ...]:
        """The steps of the rank at ring ``position`` of ``size``, in order.

        All ranks have the same number of steps and start the same lanes at the same step.
        """


@dataclass(frozen=True)
class SingleRing:
    """Each block moves one position on at every step; ``size - 1`` hops, ``size`` for gradients."""

    lane: str = "ring"

    def steps(self, position: int, size: int) -> tuple[Step, ...]:
        """The steps of the rank at ring ``position`` of ``size``, in order."""
        if size == 1:
            return (Step(owner=position, hops=(), gradient_hop=None),)
        after, before = (position + 1) % size, (position - 1) % size
        return tuple(
            Step(
                owner=(position - index) % size,
                hops=(Hop(after, before, index + 1, self.lane),) if index < size - 1 else (),
                gradient_hop=Hop(after, before, index + 1, "gradients"),
            )
            for index in range(size)
        )


@dataclass(frozen=True)
class DoubleRing:
    """Windows of consecutive places: a ring inside each, and rings between them.

    A block leaves its window once, at the first step, and has all of the window's steps to arrive:
    where a window is a node, the slow links between nodes carry as many blocks side by side as the
    window has ranks, behind as many steps of compute. In all ``(size / window)(window - 1)`` hops
    inside, ``size / window - 1`` between windows, ``size`` for gradients.

    Args:
        window: ranks of a window.
        order: the ring position at each place, where windows are not made of consecutive positions;
            see :func:`interleaved`.

    Source: LoongTrain, arXiv 2406.18485 (Double-Ring-Attention); the way home of the gradients, by
    diagonals, is this package's.
    """

    window: int
    order: tuple[int, ...] | None = None
    inner_lane: str = "inner"
    outer_lane: str = "outer"

    def steps(self, position: int, size: int) -> tuple[Step, ...]:
        """The steps of the rank at ring ``position`` of ``size``, in order.

        Raises:
            ValueError: windows do not fill the ring, or the order is no order of its positions.
        """
        order = self.order or tuple(range(size))
        if size % self.window or sorted(order) != list(range(size)):
            raise ValueError(f"windows of {self.window} over a ring of {size} in order {order}")
        window, windows = self.window, size // self.window
        mine, place = divmod(order.index(position), window)

        def at(other: int, offset: int) -> int:
            return order[other % windows * window + offset % window]

        steps = []
        for tour in range(windows):
            for turn in range(window):
                now, hops = tour * window + turn, []
                if turn == 0 and tour < windows - 1:
                    after, before = at(mine + 1, place), at(mine - 1, place)
                    hops.append(Hop(after, before, now + window, self.outer_lane))
                inside = at(mine, place + 1), at(mine, place - 1)
                if turn < window - 1:
                    hops.append(Hop(*inside, now + 1, self.inner_lane))
                    way = inside
                else:  # to where its block begins the next window, in the end to its owner
                    way = at(mine + 1, place + 1), at(mine - 1, place - 1)
                home = Hop(*way, now + 1, "gradients") if size > 1 else None
                steps.append(Step(at(mine - tour, place - turn), tuple(hops), home))
        return tuple(steps)

    def groups(self, size: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Ring positions of the inner rings, and of the outer ones."""
        order, window = self.order or tuple(range(size)), self.window
        inner = [order[i : i + window] for i in range(0, size, window)]
        return inner, list(zip(*inner, strict=True))


def interleaved(size: int, node: int, window: int) -> tuple[int, ...] | None:
    """An order in which every window of a node is spread over the node.

    Blocks leave a node from its last window: with consecutive windows from neighbouring ranks
    alone, which may share their network cards.

    Args:
        size: of the ring.
        node: its members on each node, consecutive positions.
        window: of the double ring; divides ``node``.

    Returns:
        What :class:`DoubleRing` takes; ``None`` where a window fills the node, or more than it.
    """
    if node <= window or node % window or size % node:
        return None
    windows = node // window
    return tuple(
        first + start + windows * step
        for first in range(0, size, node)
        for start in range(windows)
        for step in range(window)
    )
