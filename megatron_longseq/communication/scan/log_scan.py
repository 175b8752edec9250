"""Hillis-Steele scan: after round s = 1, 2, 4, .. every segment knows 2 s - 1 before itself.

A segment keeps an inclusive pair, the composition of itself and those before it that it knows, and
an exclusive one without itself. In a round it receives the inclusive pair of the segment ``s``
positions before it, if there is one, and puts it behind both of its own. Right for any length of
the chain, without an extra hop for the exclusive result: ``ceil(log2 length)`` rounds.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..transport import Exchange, Message
from .broadcast import rounds
from .mailbox import Mailbox
from .pair import Course, Pair


class LogScan:
    """A scan by doubling distances; the arguments are those of :class:`~.serial.SerialScan`."""

    def __init__(
        self, mailbox: Mailbox, course: Course, like: Pair, *, first_step: int = 0
    ) -> None:
        self._mailbox = mailbox
        self._course = course
        self._like = like
        self._first_step = first_step
        self.steps = rounds(course.chain.length)
        # By (round, own position): the inclusive pair of the segment 2^round before it.
        self._arriving: dict[tuple[int, int], Tensor] = {}
        for turn in range(self.steps):
            for position in course.positions:
                before = position - (1 << turn)
                if before >= 0 and (place := self._holder(before)) != course.place:
                    self._arriving[turn, position] = mailbox.expect(
                        first_step + turn, course.ranks[place], (like.wire_elements,)
                    )

    def run(self, pairs: Sequence[Pair]) -> Iterator[Exchange]:
        """Passes through the rounds; then ``states`` holds S_in of each own segment."""
        course = self._course
        inclusive = dict(zip(course.positions, pairs, strict=True))
        exclusive: dict[int, Pair] = {}
        for turn in range(self.steps):
            distance, sends = 1 << turn, []
            for position, pair in inclusive.items():
                after = position + distance
                if after < course.chain.length and self._holder(after) != course.place:
                    peer = course.ranks[self._holder(after)]
                    sends.append(Message(pair.to_wire(), peer))
            yield from self._mailbox.step(self._first_step + turn, sends)
            known = dict(inclusive)
            for position, pair in known.items():
                before = position - distance
                if before < 0:
                    continue
                arrived = self._arriving.get((turn, position))
                earlier = known[before] if arrived is None else self._like.from_wire(arrived)
                last = exclusive.get(position)
                exclusive[position] = earlier if last is None else last.compose(earlier)
                inclusive[position] = pair.compose(earlier)
        self.states = [
            exclusive[position].state.clone()
            if position in exclusive
            else torch.zeros_like(self._like.state)
            for position in course.positions
        ]

    def _holder(self, position: int) -> int:
        return self._course.chain.holder(position)[0]
