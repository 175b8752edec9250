"""A tile: some chunks of all segments and heads at once, in the dtype of the sums.

A tensor ``[b, m, n, heads, w]`` of the caller becomes ``[b * m, h, chunks, rows, w]``: segments
beside the batch, heads as many as there are states, rows ``c``, or ``repeats * c`` for queries of
which several heads read one state. Tiles bound what exists in fp32 at a time. Tokens that do not
fill a chunk are a tile of their own, so nothing is padded. Where no pairs of tokens are looked at,
a tile may as well be one long chunk.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from ..segments import Segments
from .decay import ChannelDecay, Decay, ScalarDecay, rows


class Tile:
    """Chunks ``tokens`` of all segments; what is asked for is loaded, and kept with the tile.

    Args:
        tokens: a run of tokens of each segment, a multiple of ``chunk``.
        chunk: tokens of a chunk.
    """

    def __init__(self, segments: Segments, tokens: slice, chunk: int) -> None:
        self.segments = segments
        self.tokens = tokens
        self.chunk = chunk
        self.chunks = (tokens.stop - tokens.start) // chunk
        self.repeats = segments.out_heads // segments.state_heads

    @cached_property
    def query(self) -> Tensor:
        """``[bm, h, chunks, repeats * c, d]``, scaled."""
        return self.load(self.segments.query) * self.segments.scale

    @cached_property
    def key(self) -> Tensor:
        """``[bm, h, chunks, c, d]``."""
        return self.load(self.segments.key)

    @cached_property
    def value(self) -> Tensor:
        """``[bm, h, chunks, c, e]``."""
        return self.load(self.segments.value)

    @cached_property
    def beta(self) -> Tensor:
        """``[bm, h, chunks, c, 1]``."""
        assert self.segments.beta is not None
        return self.load(self.segments.beta.unsqueeze(-1))

    @cached_property
    def decay(self) -> Decay:
        """Over ``[1 or bm, 1 or h, 1 or chunks, c]``; 1 where all are the same."""
        segments, starts = self.segments, None
        if segments.starts is not None:
            # [m, n], the same for the whole batch.
            part = segments.starts[:, self.tokens].unflatten(1, (self.chunks, self.chunk))
            starts = part.repeat(segments.key.shape[0], 1, 1).unsqueeze(1)
        if segments.per_channel:
            assert segments.log_decay is not None
            return ChannelDecay(self.load(segments.log_decay), starts)
        return ScalarDecay(self._scalar_log_decay(), starts)

    def _scalar_log_decay(self) -> Tensor:
        log_decay, shape = self.segments.log_decay, (1, self.chunk, 1)
        if log_decay is None:
            return self.segments.key.new_zeros(1, 1, *shape, dtype=self.segments.state_dtype)
        if log_decay.dim() == 1:
            constant = log_decay.to(self.segments.state_dtype).view(1, -1, 1, 1, 1)
            return constant.expand(-1, -1, *shape)
        return self.load(log_decay.unsqueeze(-1))

    @cached_property
    def read_query(self) -> Tensor:
        """``exp(b) * q``: the queries as the state at the chunk's start sees them."""
        return self.query * rows(self.decay.from_start, self.repeats)

    @cached_property
    def written_key(self) -> Tensor:
        """``exp(b_c - b) * k``: the keys as the state at the chunk's end sees them."""
        return self.key * self.decay.to_end

    @cached_property
    def scores(self) -> Tensor:
        """P: ``[bm, h, chunks, repeats * c, c]``, decayed."""
        return self.decay.pairs(self.query, self.key)

    def load(self, tensor: Tensor) -> Tensor:
        """``[b, m, n, heads, w]``, this tile's tokens, to ``[bm, h, chunks, rows, w]``."""
        part = tensor[:, :, self.tokens].unflatten(2, (self.chunks, self.chunk))
        part = self._in_sum_dtype(part.permute(0, 1, 4, 2, 3, 5))
        heads, states = part.shape[2], self.segments.state_heads
        if heads < states:
            part = part.repeat_interleave(states // heads, 2)
        elif heads > states:
            part = part.unflatten(2, (states, heads // states)).transpose(3, 4).flatten(4, 5)
        return part.flatten(0, 1)

    def _in_sum_dtype(self, part: Tensor) -> Tensor:
        """``[b, m, heads, chunks, c, w]``, in the sums' dtype, laid out as products take it."""
        # They step over one dim besides rows and columns: the heads, if there is nothing else.
        if part.shape[:2].numel() == 1 and self.chunks == 1:
            return part.to(self.segments.state_dtype)
        if part.dtype == self.segments.state_dtype:
            return part.contiguous()
        return part.to(self.segments.state_dtype, memory_format=torch.contiguous_format)

    def store(self, value: Tensor, heads: int) -> Tensor:
        """The adjoint of :meth:`load`: ``[b, m, tokens, heads, w]``, summed over repeated heads."""
        states = self.segments.state_heads
        value = value.unflatten(0, self.segments.key.shape[:2])
        if heads < states:
            value = value.unflatten(2, (heads, states // heads)).sum(3)
        elif heads > states:
            value = value.unflatten(4, (heads // states, self.chunk)).transpose(3, 4).flatten(2, 3)
        return value.permute(0, 1, 3, 4, 2, 5).flatten(2, 3)


def tiles(
    segments: Segments, chunk: int, chunks: int, *, reverse: bool = False, whole: bool = False
) -> Iterator[Tile]:
    """The tiles of the segments in order of time or against it, made one by one as asked for.

    Args:
        chunk: tokens of a chunk.
        chunks: the most chunks of a tile.
        whole: make each of the same tiles a single chunk.
    """
    tokens = segments.key.shape[2]
    end = tokens - tokens % chunk
    cut = [
        (slice(low, min(low + chunks * chunk, end)), chunk) for low in range(0, end, chunks * chunk)
    ]
    if end < tokens:
        cut.append((slice(end, tokens), tokens - end))
    for part, length in reversed(cut) if reverse else cut:
        yield Tile(segments, part, part.stop - part.start if whole else length)


def identity_transition(segments: Segments) -> Tensor:
    """The transition of no token, ``[1 or bm, h]``, ``[.., h, d]`` or ``[.., h, d, d]``."""
    heads, width = segments.state_heads, segments.key.shape[4]
    if segments.beta is not None:
        eye = torch.eye(width, dtype=segments.state_dtype, device=segments.key.device)
        return eye.expand(segments.key.shape[:2].numel(), heads, width, width)
    shape = (1, heads, width) if segments.per_channel else (1, heads)
    return segments.key.new_ones(shape, dtype=segments.state_dtype)
