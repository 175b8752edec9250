"""Who sends which block to whom, step by step. The ring engine executes it and knows no other rule.

A rank's schedule is a list of steps, one per block it sees. Before it computes with the block of a
step, it starts the step's hops: each sends *that same block* on and receives another, which will be
used at the later step named by ``lands_at``. After it has computed, the gradient of the block
leaves over the step's gradient hop, and what arrives from there is the sum for the block of the
next step; after the last step, the finished sum of the rank's own block.

That is enough for a double ring: its outer hop leaves at the first step of a window and lands at
the first step of the next one, and its gradients change window by one diagonal hop.
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
