"""The algebra of linear recurrences: what a run of tokens does to the state that enters it.

A segment, a run of consecutive tokens, is an affine map of its incoming state,

    S_out = A S_in + X,

where ``X`` is its final state from a zero start. Maps compose; the composition is associative but
not commutative. So the state at the first token of every segment is an exclusive scan of the pairs
``(A, X)`` along the chain of segments, and in backward the gradient of every segment's final state
is the same scan of ``(A^T, Y)`` in reverse order, ``Y`` being the gradient of ``S_in`` through the
segment's own outputs alone (LASP, arXiv 2404.02882; LASP-2, 2502.07563; ZeCO, 2507.01004).

``A`` is kept in linear space, never as a logarithm: a product of many decays that underflows is
exactly 0, and so is a cut, where ``-inf`` in log space would turn into NaN.

Shapes: ``B`` batch, ``H`` heads on this rank, ``d`` key width, ``e`` value width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["scalar", "diagonal", "matrix"]

_KIND_OF_DIMENSIONS: dict[int, Kind] = {2: "scalar", 3: "diagonal", 4: "matrix"}


@dataclass(frozen=True)
class Affine:
    """The map ``S_out = A S_in + X`` of a segment.

    Immutable; operations return new pairs and may share memory with their inputs.

    Attributes:
        transition: A. Its number of dimensions says its kind: ``[B, H]`` a factor per head
            ("scalar"), ``[B, H, d]`` one per key channel ("diagonal"), ``[B, H, d, d]`` a matrix.
            ``B`` may be 1 for all of the batch, as with a decay that depends on no data.
        state: X, ``[B, H, d, e]``.

    Both are fp32, or both fp64: a state adds up over the whole sequence.

    Raises:
        ValueError: on construction, for shapes, dtypes or devices that do not fit.
    """

    transition: Tensor
    state: Tensor

    def __post_init__(self) -> None:
        transition, state = self.transition, self.state
        fitting = state.dim() == 4 and transition.dim() in _KIND_OF_DIMENSIONS
        if fitting:
            width = state.shape[2]
            batches = transition.shape[0] in (1, state.shape[0])
            heads = transition.shape[1] == state.shape[1]
            fitting = batches and heads and all(n == width for n in transition.shape[2:])
        if not fitting:
            raise ValueError(
                f"a transition of shape {list(transition.shape)} does not act on a state of shape "
                f"{list(state.shape)}: a state is [B, H, d, e], its transition [B, H], [B, H, d] "
                "or [B, H, d, d], with B possibly 1"
            )
        if state.dtype not in (torch.float32, torch.float64) or transition.dtype != state.dtype:
            raise ValueError(
                f"a transition in {transition.dtype} and a state in {state.dtype}: both must be "
                "float32, or both float64"
            )
        if transition.device != state.device:
            raise ValueError(
                f"a transition on {transition.device} and a state on {state.device}: both must be "
                "on one device"
            )

    @property
    def kind(self) -> Kind:
        """What A is, by its number of dimensions."""
        return _KIND_OF_DIMENSIONS[self.transition.dim()]

    @property
    def composes_cheaply(self) -> bool:
        """Whether composing pairs costs no more than applying them: unless A is a matrix."""
        return self.kind != "matrix"

    def apply(self, state: Tensor) -> Tensor:
        """``A S + X``, ``[B, H, d, e]``, for a state of this shape."""
        return self._times(state) + self.state

    def compose(self, earlier: "Affine") -> "Affine":
        """This map after ``earlier``: ``(A2 A1, A2 X1 + X2)``.

        ``later.compose(earlier).apply(S)`` is ``later.apply(earlier.apply(S))``; the same call may
        be written ``Affine.compose(later, earlier)``.
        """
        if earlier.kind != self.kind:
            raise ValueError(f"a {self.kind} transition composed with a {earlier.kind} one")
        if self.kind == "matrix":
            transition = self.transition @ earlier.transition
        else:
            transition = self.transition * earlier.transition
        return Affine(transition, self.apply(earlier.state))

    def transposed(self, state: Tensor) -> "Affine":
        """``(A^T, state)``: the pair of the backward scan for ``Y = state``, ``[B, H, d, e]``."""
        matrix = self.kind == "matrix"
        return Affine(self.transition.mT if matrix else self.transition, state)

    def with_state(self, state: Tensor) -> "Affine":
        """The same A with another X, ``[B, H, d, e]``."""
        return replace(self, state=state)

    def cut(self) -> "Affine":
        """``(0, X)``: nothing passes, as where a new document starts inside the segment."""
        return replace(self, transition=torch.zeros_like(self.transition))

    def identity_like(self) -> "Affine":
        """``(I, 0)`` in the shapes of this pair."""
        if self.kind == "matrix":
            width = self.state.shape[2]
            one = torch.eye(width, dtype=self.state.dtype, device=self.state.device)
            transition = one.expand(self.transition.shape).contiguous()
        else:
            transition = torch.ones_like(self.transition)
        return Affine(transition, torch.zeros_like(self.state))

    @property
    def splits_transition(self) -> bool:
        """Whether each of :meth:`blocks` has a part of A, rather than all of it: if diagonal."""
        return self.kind == "diagonal"

    @property
    def block_limit(self) -> int:
        """The most blocks this pair may be split into."""
        return self.state.shape[self._block_dimension]

    def blocks(self, count: int) -> list["Affine"]:
        """Splits into ``count`` maps that act apart, each on its own block of the state.

        Blocks are rows of the state, or columns where A is a matrix: a product from the left mixes
        rows. They are views, as even as possible.

        Raises:
            ValueError: ``count`` is not in ``1 .. block_limit``.
        """
        states = self.split(self.state, count)
        if self.kind != "diagonal":
            return [Affine(self.transition, state) for state in states]
        parts = self.transition.tensor_split(count, 2)
        return [Affine(part, state) for part, state in zip(parts, states, strict=True)]

    def split(self, state: Tensor, count: int) -> list[Tensor]:
        """The blocks of a state ``[B, H, d, e]`` on which those of :meth:`blocks` act; views."""
        if not 1 <= count <= self.block_limit:
            raise ValueError(f"{count} blocks: a state here has 1 to {self.block_limit}")
        return list(state.tensor_split(count, self._block_dimension))

    def join(self, states: Sequence[Tensor]) -> Tensor:
        """The whole state ``[B, H, d, e]`` from its blocks, in new memory."""
        return torch.cat(list(states), self._block_dimension)

    @property
    def wire_elements(self) -> int:
        """Elements of A and X together."""
        return self.transition.numel() + self.state.numel()

    def to_wire(self) -> Tensor:
        """A and X in one flat tensor ``[wire_elements]``, in new memory."""
        return torch.cat((self.transition.reshape(-1), self.state.reshape(-1)))

    def from_wire(self, flat: Tensor) -> "Affine":
        """The inverse of :meth:`to_wire`, in the shapes of this pair; views of ``flat``."""
        transition, state = flat.split((self.transition.numel(), self.state.numel()))
        return Affine(transition.view(self.transition.shape), state.view(self.state.shape))

    @property
    def _block_dimension(self) -> int:
        return 3 if self.kind == "matrix" else 2

    def _times(self, state: Tensor) -> Tensor:
        if self.kind == "matrix":
            return self.transition @ state
        missing = state.dim() - self.transition.dim()
        return self.transition[(..., *[None] * missing)] * state


def wire_bytes(batch: int, heads: int, width: int, value_width: int, kind: Kind) -> tuple[int, int]:
    """Bytes in fp32 of (A, X) of one segment, as formulas and planners need them.

    Args:
        batch: of X; of A too, so that a decay that depends on no data is counted ``batch`` times
            too often, a rounding error beside X.
        heads: on this tensor-parallel rank.
    """
    own = {"scalar": (), "diagonal": (width,), "matrix": (width, width)}[kind]
    return 4 * batch * heads * prod(own), 4 * batch * heads * width * value_width
