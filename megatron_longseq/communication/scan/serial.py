"""Serial scans: a state, or blocks of it one behind the other, passes through the ranks in turn.

``ring`` (LASP) sends a state as a whole; ``all_scan`` (ZeCO) in K blocks, so that rank r works on
one block while rank r + 1 works on the one before it: ``P + K - 2`` short steps instead of
``P - 1`` long ones. On arrival a rank sends ``A S + X`` at once; what it needs ``S`` for waits.

On the zigzag a chain of 2 P segments goes up the ranks and down again. As the way down cannot start
before the way up has ended, it takes ``2 (P - 1)`` hops. Where pairs compose cheaply, two scans at
once take P - 1: one of states up the front segments, and one of *pairs* down the back segments,
which starts from the identity. Then the last place broadcasts the state F between the two halves,
and ``S_in = A_prefix F + X_prefix`` behind it.

What moves, by step (block k comes k steps after block 0):

    front          place p  ->  p + 1       at step  p                    a state
    back, pairs    place p  ->  p - 1       at step  P - 1 - p            a pair
    F              root P - 1, round j      at step  P - 1 + j            a state
    back, plain    place p  ->  p - 1       at step  2 (P - 1) - p        a state
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..transport import Exchange, Message
from .broadcast import children, parent, rounds
from .mailbox import Mailbox
from .pair import Course, Pair, contiguous


@dataclass
class _Flow:
    """Blocks that pass through this rank one behind the other.

    Attributes:
        make: the block to send, from its index; called once the one to receive is here.
        arriving: where the blocks received lie; none on the place where the flow starts.
        targets: (global rank, step at which block 0 leaves).
    """

    make: Callable[[int], Tensor]
    arriving: list[Tensor] = field(default_factory=list)
    targets: list[tuple[int, int]] = field(default_factory=list)
    made: dict[int, Tensor] = field(default_factory=dict)

    def outgoing(self, block: int) -> Tensor:
        if block not in self.made:
            self.made[block] = contiguous(self.make(block))
        return self.made[block]

    def sends(self, step: int, blocks: int) -> list[Message]:
        return [
            Message(self.outgoing(step - leaves), peer)
            for peer, leaves in self.targets
            if 0 <= step - leaves < blocks
        ]


class SerialScan:
    """A scan that passes from place to place.

    Args:
        mailbox: carries it.
        course: the places.
        like: a pair in the shapes of all pairs.
        blocks: K; 1 for a ring.
        first_step: of its steps.
    """

    def __init__(
        self, mailbox: Mailbox, course: Course, like: Pair, *, blocks: int = 1, first_step: int = 0
    ) -> None:
        self._mailbox = mailbox
        self._course = course
        self._like = like
        self._blocks = blocks
        self._first_step = first_step
        self._shapes = like.blocks(blocks)
        self._own: list[list[Pair]] = []
        self.steps = serial_steps(
            course.size, blocks, zigzag=course.layout == "zigzag", cheap=like.composes_cheaply
        )
        self._flows: list[_Flow] = []
        last, place = course.size - 1, course.place
        front = _Flow(self._front)
        if place > 0:
            self._receive(front, place - 1, place - 1, self._state_shape)
        if place < last:
            front.targets.append((course.ranks[place + 1], place))
        self._flows.append(front)
        if course.layout == "zigzag":
            back = self._back_of_pairs() if like.composes_cheaply else self._plain_back()
            self._flows.extend(back)

    def run(self, pairs: Sequence[Pair]) -> Iterator[Exchange]:
        """Passes through the steps; then ``states`` holds S_in of each own segment."""
        self._own = [pair.blocks(self._blocks) for pair in pairs]
        try:
            for step in range(self.steps):
                sends = [m for flow in self._flows for m in flow.sends(step, self._blocks)]
                yield from self._mailbox.step(self._first_step + step, sends)
            self.states = [self._joined(self._flows[0].arriving)]
            if len(self._flows) > 1:
                entering = [self._enters_back(block) for block in range(self._blocks)]
                self.states.append(self._joined(entering))
        finally:
            # Flows refer to this object: a cycle that would keep pairs until the next collection.
            self._flows.clear()
            self._own.clear()

    # The front segments: states, from the first place to the last

    def _front(self, block: int) -> Tensor:
        arriving, own = self._flows[0].arriving, self._own[0][block]
        # The caller may overwrite its own once it has its result, and that is before this has left.
        return own.apply(arriving[block]) if arriving else own.state.clone()

    # The back segments of a zigzag, from the last place to the first

    def _plain_back(self) -> list[_Flow]:
        last, place = self._course.size - 1, self._course.place
        flow = _Flow(lambda k: self._own[1][k].apply(self._enters_back(k)))
        if place < last:
            self._receive(flow, place + 1, 2 * last - place - 1, self._state_shape)
        if place > 0:
            flow.targets.append((self._course.ranks[place - 1], 2 * last - place))
        return [flow]

    def _back_of_pairs(self) -> list[_Flow]:
        size, place = self._course.size, self._course.place
        last = size - 1
        distance = last - place
        prefixes = _Flow(lambda k: self._prefix_after(k).to_wire())
        if place < last:
            self._receive(prefixes, place + 1, distance - 1, self._wire_shape)
        if place > 0:
            prefixes.targets.append((self._course.ranks[place - 1], distance))
        middle = _Flow(self._middle)
        if distance > 0:
            sender, turn = parent(distance)
            self._receive(middle, last - sender, last + turn, self._state_shape)
        for receiver, turn in children(distance, size):
            middle.targets.append((self._course.ranks[last - receiver], last + turn))
        return [prefixes, middle]

    def _prefix_before(self, block: int) -> Pair | None:
        """The composition of the back segments before this rank's own."""
        arriving = self._flows[1].arriving
        return self._shapes[block].from_wire(arriving[block]) if arriving else None

    def _prefix_after(self, block: int) -> Pair:
        own, before = self._own[1][block], self._prefix_before(block)
        return own if before is None else own.compose(before)

    def _middle(self, block: int) -> Tensor:
        """F, the state between the front segments and the back segments."""
        arriving = self._flows[2].arriving
        return arriving[block] if arriving else self._flows[0].outgoing(block)

    def _enters_back(self, block: int) -> Tensor:
        """S_in of the back segment."""
        if len(self._flows) == 2:
            arriving = self._flows[1].arriving
            return arriving[block] if arriving else self._flows[0].outgoing(block)
        before, middle = self._prefix_before(block), self._flows[2].outgoing(block)
        return middle if before is None else before.apply(middle)

    # Messages

    def _receive(
        self, flow: _Flow, place: int, step: int, shape: Callable[[Pair], Sequence[int]]
    ) -> None:
        peer = self._course.ranks[place]
        for block, like in enumerate(self._shapes):
            step_of_block = self._first_step + step + block
            flow.arriving.append(self._mailbox.expect(step_of_block, peer, shape(like)))

    def _joined(self, states: Sequence[Tensor]) -> Tensor:
        return self._like.join(states) if states else torch.zeros_like(self._like.state)

    @staticmethod
    def _state_shape(pair: Pair) -> Sequence[int]:
        return pair.state.shape

    @staticmethod
    def _wire_shape(pair: Pair) -> Sequence[int]:
        return (pair.wire_elements,)


def serial_steps(size: int, blocks: int, *, zigzag: bool, cheap: bool) -> int:
    """Steps of a serial scan of ``size`` ranks; 0 for one rank.

    Args:
        cheap: pairs compose cheaply, so that a zigzag is scanned from both ends.
    """
    if size == 1:
        return 0
    hops = size - 1
    if zigzag:
        hops += rounds(size) if cheap else size - 1
    return hops + blocks - 1
