"""What the kernels of linear attention work on: a rank's segments, and gradients of the same.

The alphabet of this package: ``b`` batch, ``m`` segments on this rank (1, or 2 on zigzag), ``n``
tokens of a segment, ``d`` key width, ``e`` value width. Heads: ``hq``, ``hk``, ``hv`` of query,
key and value; ``h`` states, one for each pair of a key and a value head, ``max(hk, hv)``; ``ho``
heads of the output, ``max(hq, hv)``. Where a tensor has fewer heads than there are states, each
serves several neighbouring states (grouped values); where the query has more, several neighbouring
query heads read one state (grouped queries).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# By the dtype of the states, a log decay just below which ``exp`` is exactly 0: anything less means
# the same, that a token forgets all, and would only drown the sums it is added to.
LEAST_LOG_DECAY = {torch.float32: -104.0, torch.float64: -746.0}


@dataclass(frozen=True)
class Segments:
    """The inputs of a rank, cut into its segments of the sequence; views of what the caller gave.

    Attributes:
        query: ``[b, m, n, hq, d]``; fp64, fp32, bf16 or fp16.
        key: ``[b, m, n, hk, d]``.
        value: ``[b, m, n, hv, e]``.
        log_decay: the natural logarithm of the decay, <= 0: ``None`` for none, ``[h]`` constant per
            head, ``[b, m, n, h]`` per token, ``[b, m, n, h, d]`` per token and key channel.
        beta: write strength of the delta rule, ``[b, m, n, h]``; ``None``: states just add up.
        starts: boolean ``[m, n]``, the tokens at which a document starts; ``None``: one document.
        scale: factor of the output (of the query).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor | None = None
    beta: Tensor | None = None
    starts: Tensor | None = None
    scale: float = 1.0

    @property
    def state_heads(self) -> int:
        """``h``: the number of states."""
        return max(self.key.shape[3], self.value.shape[3])

    @property
    def out_heads(self) -> int:
        """``ho``: heads of the output."""
        return max(self.query.shape[3], self.value.shape[3])

    @property
    def state_shape(self) -> tuple[int, int, int, int, int]:
        """``(b, m, h, d, e)``: the shape of the states of all segments."""
        batch, segments = self.key.shape[:2]
        return batch, segments, self.state_heads, self.key.shape[4], self.value.shape[4]

    @property
    def state_dtype(self) -> torch.dtype:
        """fp32, or fp64 for fp64 input: states, transitions and all sums."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    @property
    def intra_flops(self) -> int:
        """Of what the tokens read of their own segments, in chunks of 64 tokens, about."""
        batch, segments, tokens, _, d = self.key.shape
        e = self.value.shape[4]
        return 2 * batch * segments * tokens * self.out_heads * (64 * (d + e) + 2 * d * e)

    @property
    def per_channel(self) -> bool:
        """Whether each key channel has its own decay."""
        return self.log_decay is not None and self.log_decay.dim() == 5


@dataclass
class Gradients:
    """Gradients of :class:`Segments`, in its shapes, and of the states that entered.

    Attributes:
        log_decay, beta: fp32 (fp64 for fp64); ``None`` where the segments have none, or none was
            asked for.
        state: ``[b, m, h, d, e]``, of the state at each segment's first token.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    state: Tensor
