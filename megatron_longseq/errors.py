"""The errors a user can cause, told apart from defects of this package.

An entry point catches :class:`UserError`, prints its message once (on rank 0, without a stack
trace) and exits non-zero on every rank. Everything else is a defect and keeps its traceback.
"""

from collections.abc import Iterable


class UserError(ValueError):
    """Something the user gave cannot work: a flag, a file, a size.

    The message names the flag, the value, the rule, and what would work.
    """


class NodeError(UserError):
    """A user's error that only this machine may see: a file, a disk. Its first rank prints it."""


def check_at_least_one(flag: str, value: int | None) -> None:
    """Raises :class:`UserError` for a count below 1; None means that the flag was not given."""
    if value is not None and value < 1:
        raise UserError(f"{flag} {value}: must be at least 1")


def nearest_values(value: int, candidates: Iterable[int], count: int = 4) -> list[int]:
    """Returns up to ``count`` of ``candidates`` closest to ``value``, in ascending order."""
    ranked = sorted(set(candidates), key=lambda candidate: (abs(candidate - value), candidate))
    return sorted(ranked[:count])


def divisors(number: int) -> list[int]:
    """Returns all positive divisors of ``number`` in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]
