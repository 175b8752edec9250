"""What a caller of 2D attention changes of its scores and weights: ALiBi, dropout."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError
from ..softmax.score_edits import ScoreEdits

# Kernels that stand for the one that computes them.
KERNELS = ("auto", "reference")


@dataclass(frozen=True)
class Dropout:
    """Dropout of attention weights.

    Attributes:
        probability: that a weight is dropped; the others grow by ``1 / (1 - probability)``.
        seed: of this call. The same seed drops the same weights, whatever the layout.
        first_head: number, in the whole model, of the first head that is given.
        first_row: number, in the micro-batch, of the first row that is given.
    """

    probability: float
    seed: int
    first_head: int = 0
    first_row: int = 0


@dataclass(frozen=True)
class ScoreChanges:
    """Changes as a caller gives them, for all heads that take part in the exchange.

    Attributes:
        slopes: of ALiBi, ``[a]``.
        dropout: ``None``, or one of probability 0: none.
    """

    slopes: Tensor | None
    dropout: Dropout | None

    @property
    def any(self) -> bool:
        """Whether anything changes."""
        return self.slopes is not None or (
            self.dropout is not None and self.dropout.probability > 0
        )

    def check(self, query: Tensor, kernel: str) -> None:
        """Checks them for a query ``[n, b, a, d]``.

        Raises:
            UserError: naming the value, the rule and what works.
        """
        if self.slopes is not None and (
            tuple(self.slopes.shape) != (query.shape[2],) or not self.slopes.is_floating_point()
        ):
            raise UserError(
                f"alibi_slopes of shape {tuple(self.slopes.shape)} and {self.slopes.dtype}: "
                f"expected one floating-point number per query head, [{query.shape[2]}]"
            )
        if self.dropout is not None and not 0 <= self.dropout.probability < 1:
            raise UserError(
                f"dropout of probability {self.dropout.probability}: must be at least 0 and less "
                "than 1"
            )
        if self.any and kernel not in KERNELS:
            raise UserError(
                f"kernel {kernel!r} knows neither ALiBi nor dropout; use {' or '.join(KERNELS)}"
            )

    def describe(self) -> dict[str, object]:
        """What must be equal on all ranks, by the name it has in an error message."""
        shape = None if self.slopes is None else list(self.slopes.shape)
        return {"alibi_slopes": shape, "dropout": self.dropout}

    def edits(
        self, heads: range, all_heads: int, kv_heads: int, query: Tensor
    ) -> ScoreEdits | None:
        """The edits of a rank's share of the heads."""
        if not self.any:
            return None
        mine = torch.tensor(heads, device=query.device)
        serving = mine * kv_heads // all_heads
        dropout = self.dropout or Dropout(0.0, 0)
        return ScoreEdits(
            heads=mine + dropout.first_head,
            serving=serving - serving[0],
            slopes=None if self.slopes is None else self.slopes.detach()[mine],
            dropout=dropout.probability,
            seed=dropout.seed,
            first_row=dropout.first_row,
        )
