"""All ranks find out together that their inputs do not fit, and raise the same error.

If one rank's tensors are of another length, the others would wait for messages that never come, or
take the wrong ones. So the ranks compare what they are about to do, in reductions of a few integers
that are always made: a check remembered from an earlier call would be skipped by the very rank
whose neighbours make it. Over gloo on one host a reduction takes about 0.3 ms.
"""

import time
import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from hashlib import sha256

import torch
import torch.distributed as dist

from ..errors import UserError
from .groups import GroupPlace
from .transport import DEFAULT_TIMEOUT_SECONDS, Stream, transfer_failure

AGREEMENT = Stream("agreement on inputs", 0)


class GridAgreement:
    """Comparisons over a grid of ranks: the rows are head groups, the columns rings.

    Args:
        head: this rank's head group.
        ring: this rank's ring.
        timeout_seconds: limit of every reduction.
    """

    def __init__(
        self, head: GroupPlace, ring: GroupPlace, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> None:
        self._head = head
        self._ring = ring
        self._timeout_seconds = timeout_seconds

    def verify_grid(self) -> None:
        """Checks that the groups of all ranks form a grid. Collective.

        Raises:
            UserError: on every rank of a head group or ring that finds a fault.
        """
        head, ring = self._head, self._ring
        fault = int(set(head.ranks) & set(ring.ranks) != {head.rank})
        rings_of_row = 0
        # Twice, so that what a column finds reaches its rows and what a row finds its columns.
        for _ in range(2):
            fault, _ = self._same(head, 0, fault, ring.position, rings_of_row)
            # Which head group stands at which position must be the same for all rings of a row.
            row = zlib.crc32(f"{ring.position}: {min(head.ranks)}".encode()) >> 12
            fault, rings_of_row = self._same(ring, 1, fault, head.position, row, compare_last=False)
        fault, _ = self._same(head, 0, fault, ring.position, rings_of_row)
        if fault:
            raise UserError(
                "the process groups do not form a grid of head groups x rings: every head group "
                "must have the same size, every ring must have the same size, a head group and a "
                "ring may share one rank only, and the rank at place h of each head group must be "
                f"in one ring with place h of the others. Rank {head.rank} was given the head "
                f"group {list(head.ranks)} and the ring {list(ring.ranks)}"
            )

    def verify(self, fields: Mapping[str, object]) -> None:
        """Checks that all ranks have the same values. Collective.

        Args:
            fields: what must be equal, by the name it has in the error message. Values are compared
                by their ``str``.

        Raises:
            UserError: with the same text on every rank, saying what differs and where.
        """
        if self._head.size == self._ring.size == 1:
            return
        texts = {name: str(value) for name, value in fields.items()}
        digest = int.from_bytes(sha256(repr(texts).encode()).digest()[:7])
        extremes = [digest, -digest]
        for place in (self._head, self._ring):
            extremes = self._reduce(place, extremes, dist.ReduceOp.MAX)
        if extremes[0] == -extremes[1]:
            return
        # Every rank has found the difference and comes here.
        everyone = [(self._head.rank, texts)]
        for place in (self._head, self._ring):
            if place.size > 1:
                gathered: list[list[tuple[int, dict[str, str]]]] = [[] for _ in place.ranks]
                dist.all_gather_object(gathered, everyone, place.group)
                everyone = [entry for part in gathered for entry in part]
        raise UserError(
            "the ranks that share a sequence must pass the same shapes and options; they differ: "
            + "; ".join(_differences(dict(everyone)))
        )

    def _same(
        self,
        place: GroupPlace,
        role: int,
        fault: int,
        position: int,
        last: int,
        *,
        compare_last: bool = True,
    ) -> tuple[int, int]:
        """Reduces over a group: (1 if a member has a fault or differs, sum of ``last``)."""
        values = [self._head.size, self._ring.size, position, role, last]
        squares = [value * value for value in values]
        sums = self._reduce(place, [fault, *values, *squares], dist.ReduceOp.SUM)
        pairs = list(zip(sums[1:6], sums[6:], strict=True))
        if not compare_last:
            pairs.pop()
        # Cauchy-Schwarz: the values are equal if and only if (sum x)^2 = members * sum x^2.
        unequal = any(total * total != place.size * square for total, square in pairs)
        return int(sums[0] > 0 or unequal), sums[5] % (1 << 20)

    def _reduce(
        self, place: GroupPlace, values: Sequence[int], operation: dist.ReduceOp.RedOpType
    ) -> list[int]:
        if place.size == 1:
            return list(values)
        on_host = "cpu:" in dist.get_backend_config(place.group)
        device = torch.device("cpu") if on_host else torch.device("cuda")
        vector = torch.tensor(values, dtype=torch.int64, device=device)
        started = time.monotonic()
        try:
            work = dist.all_reduce(vector, operation, place.group, async_op=True)
            if on_host:
                work.wait(timedelta(seconds=self._timeout_seconds))
            else:
                work.wait()
        except RuntimeError as error:
            raise transfer_failure(
                place,
                AGREEMENT,
                "comparing shapes",
                "the start of the operation",
                error,
                elapsed_seconds=time.monotonic() - started,
                timeout_seconds=self._timeout_seconds,
            ) from error
        return vector.tolist()


def _differences(fields: Mapping[int, Mapping[str, str]]) -> list[str]:
    """``"name: x on ranks 0, 2, y on rank 1"`` for each field that differs."""
    names = dict.fromkeys(name for own in fields.values() for name in own)
    lines = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank in sorted(fields):
            holders.setdefault(fields[rank].get(name, "missing"), []).append(rank)
        if len(holders) > 1:
            parts = [
                f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                for value, ranks in holders.items()
            ]
            lines.append(f"{name}: {', '.join(parts)}")
    return lines
