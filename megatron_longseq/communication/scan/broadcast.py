"""A tensor from one place to all others, in a binary tree of messages.

Counted from the root, place ``v`` gets it in round ``j`` from ``v - 2^j``, where ``2^j`` is the
highest power of two in ``v``, and sends it on in the rounds after. ``ceil(log2 size)`` rounds. Made
of messages, not of the backend's collective, as a scan may run beside the caller's own collectives
on the same group, whose order must be the same on every rank.
"""

from collections.abc import Iterator

from torch import Tensor

from ..transport import Exchange, Message
from .mailbox import Mailbox
from .pair import Course


def rounds(size: int) -> int:
    """Rounds of a broadcast, ``ceil(log2 size)``."""
    return (size - 1).bit_length()


def parent(distance: int) -> tuple[int, int]:
    """(distance from the root of the sender, round) for the place at ``distance`` > 0."""
    turn = distance.bit_length() - 1
    return distance - (1 << turn), turn


def children(distance: int, size: int) -> list[tuple[int, int]]:
    """(distance from the root of each receiver, round) for the place at ``distance``."""
    first = distance.bit_length()
    return [
        (distance + (1 << turn), turn)
        for turn in range(first, rounds(size))
        if distance + (1 << turn) < size
    ]


class Broadcast:
    """One broadcast.

    Args:
        mailbox: carries it.
        course: the places.
        root: place of the sender.
        like: a tensor of the same shape.
        first_step: of its rounds.
    """

    def __init__(
        self, mailbox: Mailbox, course: Course, root: int, like: Tensor, first_step: int
    ) -> None:
        self._mailbox = mailbox
        self._course = course
        self._root = root
        self._first_step = first_step
        self._distance = (course.place - root) % course.size
        self._landing: Tensor | None = None
        self.steps = rounds(course.size)
        if self._distance > 0:
            sender, turn = parent(self._distance)
            self._landing = mailbox.expect(first_step + turn, self._rank(sender), like.shape)
            self._tensor = self._landing

    def run(self, tensor: Tensor | None) -> Iterator[Exchange]:
        """Passes ``tensor``, which only the root has; then result() is there."""
        if self._landing is None:
            assert tensor is not None
            self._tensor = tensor
        turns = {turn: receiver for receiver, turn in children(self._distance, self._course.size)}
        for turn in range(self.steps):
            receiver = turns.get(turn)
            sends = [] if receiver is None else [Message(self._tensor, self._rank(receiver))]
            yield from self._mailbox.step(self._first_step + turn, sends)

    def result(self) -> Tensor:
        """The tensor; where it was received, in memory of the mailbox."""
        return self._tensor

    def _rank(self, distance: int) -> int:
        return self._course.ranks[(self._root + distance) % self._course.size]
