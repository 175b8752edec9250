"""A scan in two levels, for groups that span nodes: fast links within a node, slow ones between.

1. The ranks of a node, ``node_size`` consecutive ones, send each other their pairs.
2. One rank of each node takes part in a scan of the nodes' totals, by any of the other schedules.
3. It sends its node the states that enter it; every rank puts the pairs before its own behind them.

Nodes of consecutive ranks form a chain of the same layout as the ranks do: on the zigzag, of two
segments per node. So what crosses the slow links is what a scan of one rank per node would send.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce

import torch

from ..transport import Exchange, Message
from .log_scan import LogScan
from .mailbox import Mailbox
from .pair import Course, Pair
from .serial import SerialScan


class TwoLevelScan:
    """A scan within nodes and between them.

    Args:
        mailbox: carries it.
        course: the places.
        like: a pair in the shapes of all pairs.
        node_size: ranks per node; divides the number of ranks.
        across: makes the scan between nodes, from their course and its first step.
        across_steps: its steps, which ranks that take no part in it must know too.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        course: Course,
        like: Pair,
        *,
        node_size: int,
        across: Callable[[Course, int], SerialScan | LogScan],
        across_steps: int,
    ) -> None:
        self._mailbox = mailbox
        self._course = course
        self._like = like
        node = course.place // node_size
        self._members = range(node * node_size, (node + 1) * node_size)
        self._others = [place for place in self._members if place != course.place]
        self._last_step = 1 + across_steps
        self.steps = self._last_step + 1
        segments = len(course.positions)
        self._wires = {
            place: mailbox.expect(0, course.ranks[place], (segments, like.wire_elements))
            for place in self._others
        }
        self._across: SerialScan | LogScan | None = None
        leader = self._members[0]
        if course.place == leader:
            nodes = Course(course.ranks[::node_size], node, course.layout)
            self._across = across(nodes, 1)
        else:
            shape = (segments, *like.state.shape)
            self._entering = mailbox.expect(self._last_step, course.ranks[leader], shape)

    def run(self, pairs: Sequence[Pair]) -> Iterator[Exchange]:
        """Passes through the levels; then ``states`` holds S_in of each own segment."""
        own = torch.stack([pair.to_wire() for pair in pairs])
        yield from self._mailbox.step(0, self._to_others(own))
        node = {
            place: [self._like.from_wire(wire) for wire in wires]
            for place, wires in self._wires.items()
        } | {self._course.place: pairs}
        # Front segments follow one another up the places, back segments down.
        orders = [list(self._members), list(self._members)[::-1]][: len(pairs)]
        if self._across is None:
            yield from self._mailbox.step(self._last_step)
            entering = self._entering
        else:
            totals = [
                _composed([node[place][index] for place in order])
                for index, order in enumerate(orders)
            ]
            yield from self._across.run(totals)
            entering = torch.stack(self._across.states)
            yield from self._mailbox.step(self._last_step, self._to_others(entering))
        self.states = []
        for index, order in enumerate(orders):
            before = order[: order.index(self._course.place)]
            # Where it has come, or is sent from, is not the caller's to keep.
            state = entering[index].clone()
            if before:
                state = _composed([node[place][index] for place in before]).apply(state)
            self.states.append(state)

    def _to_others(self, tensor: torch.Tensor) -> list[Message]:
        return [Message(tensor, self._course.ranks[place]) for place in self._others]


def _composed(pairs: Sequence[Pair]) -> Pair:
    return reduce(lambda earlier, later: later.compose(earlier), pairs)
