"""What a scan needs to know of the pairs it composes, and of the chain it runs along."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from ...token_layout import Layout, SegmentChain
from ..groups import GroupPlace


class Pair(Protocol):
    """An affine map ``S -> A S + X`` of states; :class:`megatron_longseq.lasp.recurrence.Affine`.

    Attributes:
        transition: A.
        state: X, in the shape of a state.
    """

    @property
    def transition(self) -> Tensor: ...

    @property
    def state(self) -> Tensor: ...

    @property
    def composes_cheaply(self) -> bool:
        """Whether composing pairs costs no more than applying them."""

    @property
    def splits_transition(self) -> bool:
        """Whether each of blocks() has a part of A, rather than all of it."""

    @property
    def block_limit(self) -> int:
        """The most blocks a pair may be split into."""

    @property
    def wire_elements(self) -> int:
        """Elements of A and X together."""

    def apply(self, state: Tensor) -> Tensor:
        """``A state + X``."""

    def compose(self, earlier: Self) -> Self:
        """This map after ``earlier``."""

    def with_state(self, state: Tensor) -> Self:
        """The same A with another X."""

    def blocks(self, count: int) -> list[Self]:
        """Maps that act apart, each on its own block of the state."""

    def join(self, states: Sequence[Tensor]) -> Tensor:
        """The whole state from its blocks, in new memory."""

    def to_wire(self) -> Tensor:
        """A and X in one flat tensor, in new memory."""

    def from_wire(self, flat: Tensor) -> Self:
        """The inverse of to_wire(), in the shapes of this pair."""


@dataclass(frozen=True)
class Course:
    """The chain as a scan runs through it: from place 0 on, whatever the direction is.

    A scan in reverse order is one along the reversed chain. On the zigzag that is the same chain
    with the two segments of each rank swapped; on contiguous parts the ranks stand the other way.

    Attributes:
        ranks: global ranks by place.
        place: of this rank.
        layout: of the chain; see :class:`~megatron_longseq.token_layout.SegmentChain`.
        swapped: each rank's own order of its segments is the reverse of that of the course.
    """

    ranks: tuple[int, ...]
    place: int
    layout: Layout
    swapped: bool = False

    @classmethod
    def of(cls, group: GroupPlace, layout: Layout, *, reverse: bool) -> "Course":
        """The course of a group whose ranks hold the chain in group order."""
        if reverse and layout == "contiguous":
            return cls(group.ranks[::-1], group.size - 1 - group.position, layout)
        return cls(group.ranks, group.position, layout, swapped=reverse)

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.ranks)

    @property
    def chain(self) -> SegmentChain:
        """Which place holds which segment."""
        return SegmentChain(self.size, self.layout)

    @property
    def positions(self) -> tuple[int, ...]:
        """Chain positions of this rank's segments, in increasing order."""
        return self.chain.positions(self.place)


def contiguous(tensor: Tensor) -> Tensor:
    """``tensor`` as a message takes it."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()
