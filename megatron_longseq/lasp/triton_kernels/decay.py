"""The gates of runs of tokens as the Triton kernels take them, and what follows for whole chunks.

Plain torch: these tensors are a width smaller than keys and values.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..segments import LEAST_LOG_DECAY


@dataclass(frozen=True)
class Decay:
    """The gates of runs of tokens, and what follows from them for whole chunks.

    Attributes:
        log: ``[B, n, h]`` or ``[B, n, h, d]``, at most 0; a constant is a view of the first.
        chunk: tokens per chunk, a power of two from 16.
        dtype: of states and sums: fp32, or fp64 for fp64.
        documents: ``[B, n + 1]`` int32, >= 0 and ascending: which document the token before the run
            and each of its tokens belong to; ``None`` if all belong to one.
    """

    log: Tensor
    chunk: int
    dtype: torch.dtype
    documents: Tensor | None = None

    @property
    def per_channel(self) -> bool:
        return self.log.dim() == 4

    @property
    def chunks(self) -> int:
        return -(-self.log.shape[1] // self.chunk)

    @cached_property
    def chunk_totals(self) -> Tensor:
        """Log decay of each chunk, ``[B, h, chunks]`` or ``[B, h, chunks, d]``, in fp64.

        Those of a long run add up to far more than the differences that weights are made of.
        """
        log = self.log.to(self.dtype).clamp(min=LEAST_LOG_DECAY[self.dtype])
        padding = (0, 0) * (log.dim() - 2) + (0, self.chunks * self.chunk - log.shape[1])
        log = pad(log, padding).unflatten(1, (self.chunks, self.chunk))
        return log.sum(2, dtype=torch.float64).transpose(1, 2)

    @cached_property
    def transitions(self) -> Tensor:
        """A of each chunk, in the shape of :attr:`chunk_totals`; 0 where a document starts."""
        transitions = self.chunk_totals.exp().to(self.dtype)
        if self.documents is not None:
            starts = torch.arange(self.chunks, device=self.log.device) * self.chunk
            ends = (starts + self.chunk).clamp(max=self.log.shape[1])
            uncut = (self.documents[:, starts] == self.documents[:, ends]).unsqueeze(1)
            transitions = transitions * (uncut.unsqueeze(-1) if self.per_channel else uncut)
        return transitions.contiguous()

    @cached_property
    def transition(self) -> Tensor:
        """A of the whole run, ``[B, h]`` or ``[B, h, d]``; 0 where a document starts."""
        transition = self.chunk_totals.sum(2).exp().to(self.dtype)
        if self.documents is not None:
            uncut = (self.documents[:, 0] == self.documents[:, -1]).unsqueeze(-1)
            transition = transition * (uncut.unsqueeze(-1) if self.per_channel else uncut)
        return transition

    def offsets(self, to_start: bool) -> Tensor:
        """Log decay between each chunk and the run's first (or last) token, as the totals.

        In :attr:`dtype`.
        """
        totals = self.chunk_totals
        before = totals.cumsum(2)
        offsets = before - totals if to_start else before[:, :, -1:] - before
        return offsets.to(self.dtype).contiguous()

    @cached_property
    def starts(self) -> Tensor:
        """``[B, n]``: the tokens at which a document starts."""
        assert self.documents is not None
        return self.documents[:, 1:] != self.documents[:, :-1]

    def gate_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of the log decay of each token, from that of its running sum b.

        A token's decay is in b of all tokens from it on in its document. Later documents add 0 to
        the sum: only differences of b matter in them, so that of all their b together has no
        gradient. Both are ``[B, n, h]`` or ``[B, n, h, d]``.
        """
        sums = gradient.flip(1).cumsum(1).flip(1)
        if self.documents is not None:
            # For the same reason 0 but for rounding: the decay of a first token counts nowhere.
            sums = sums.masked_fill(_beside(self.starts, sums), 0)
        return sums.masked_fill(self._forgets, 0)

    @property
    def _forgets(self) -> Tensor:
        """Which gates let nothing through, as :attr:`log`; so they have no gradient."""
        return self.log.to(self.dtype) <= LEAST_LOG_DECAY[self.dtype]

    def gate_gradient_of_end(self, through: Tensor | None, reached: Tensor) -> Tensor:
        """The same, from the state after the run and nothing else.

        With dS the gradient of that state: the part of <S_out, dS> that a token's decay scales is
        what was there before the token, not what it or later tokens have written. So there is
        nothing to subtract: what came from before the run, and what earlier tokens wrote.

        Args:
            through: <A S_in, dS>, ``[B, h]`` or ``[B, h, d]``; ``None`` for a run from zero.
            reached: <what each token wrote, as decayed by the end, dS>, ``[B, n, h]`` or
                ``[B, n, h, d]``; zero before the last document.
        """
        before = reached.cumsum(1) - reached
        if through is not None:
            before += through.unsqueeze(1)
        if self.documents is not None:
            elsewhere = self.starts | (self.documents[:, 1:] != self.documents[:, -1:])
            before = before.masked_fill(_beside(elsewhere, before), 0)
        return before.masked_fill(self._forgets, 0)


def _beside(tokens: Tensor, other: Tensor) -> Tensor:
    """``[B, n]`` as wide as ``other`` ``[B, n, ...]``; a view."""
    return tokens.view(*tokens.shape, *[1] * (other.dim() - 2)).expand(other.shape)
