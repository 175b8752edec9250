"""The scan of a single rank: nothing moves."""

from collections.abc import Iterator, Sequence

import torch

from .mailbox import Awaited
from .pair import Pair


class LocalScan:
    """The states of one rank's segments, one after the other."""

    steps = 0

    def run(self, pairs: Sequence[Pair]) -> Iterator[Awaited]:
        """Computes ``states``, S_in of each segment; awaits nothing."""
        self.states = [torch.zeros_like(pairs[0].state)]
        for pair in pairs[:-1]:
            self.states.append(pair.apply(self.states[-1]))
        yield from ()
