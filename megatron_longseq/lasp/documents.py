"""Packed documents: where states start anew, and whether ranks have to talk at all.

Documents are laid one behind the other in the sequence, whatever their lengths, and cut by
segments wherever a segment ends. A segment in which a document starts passes nothing on of the
state that entered it; only the tokens before that start read that state, and only those from the
last start on are in the state it leaves. So one state per segment is enough, however many documents
lie in it, and no rank needs to know another's tokens.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..token_layout import SegmentChain


@dataclass(frozen=True)
class Documents:
    """The documents of a sequence as one rank sees them.

    Attributes:
        starts: boolean ``[m, n]``, the tokens of this rank's segments at which a document starts.
            The first token of the sequence is not among them: what enters there, a given state or
            nothing, is the first document's. ``None``: none starts on this rank.
        connected: whether some document reaches over a boundary between segments, of any ranks. The
            same on all ranks, as it follows from the list alone.
    """

    starts: Tensor | None
    connected: bool

    @classmethod
    def of(
        cls,
        boundaries: Sequence[int] | None,
        chain: SegmentChain,
        rank: int,
        total: int,
        device: torch.device,
        *,
        reverse: bool = False,
    ) -> "Documents":
        """The documents of a chain of segments.

        Args:
            boundaries: as :func:`..document_boundaries.boundaries_of` returns them; ``None`` for a
                single document.
            rank: position in the group.
            total: tokens of the sequence.
            reverse: for segments whose tokens stand in reverse order.
        """
        starting = {start for start in boundaries or () if 0 < start < total}
        inner, length = sorted(starting), total // chain.length
        connected = any(edge not in starting for edge in range(length, total, length))
        marked = []
        for index, segment in enumerate(chain.ranges(rank, total)):
            # Backwards, a document starts at its last token.
            shift = segment.start + int(reverse)
            low = bisect_left(inner, shift)
            high = bisect_left(inner, shift + length)
            marked += [(index, start - shift) for start in inner[low:high]]
        if not marked:
            return cls(None, connected)
        starts = torch.zeros(chain.segments_per_rank, length, dtype=torch.bool)
        where = torch.tensor(marked)
        starts[where[:, 0], where[:, 1]] = True
        return cls((starts.flip(1) if reverse else starts).to(device), connected)
