"""One line of the result, and the sizes of a run."""

from dataclasses import dataclass, field
from typing import Any

# How a line can end. The last three make the exit status non-zero.
OK, NOTE, SKIPPED, WRONG, FAILED, NOT_RUN = "ok", "note", "skipped", "WRONG", "FAILED", "NOT RUN"
BAD = (WRONG, FAILED, NOT_RUN)


@dataclass
class Row:
    """What was checked and what came out.

    Attributes:
        check: the check it belongs to; the plan fills it in.
        case: which inputs.
        status: ``"ok"``, ``"note"`` (a fact, neither right nor wrong), ``"skipped"``, ``"WRONG"``,
            ``"FAILED"`` (it raised or died) or ``"NOT RUN"`` (out of time).
        detail: in words, for a reader.
        numbers: the same as numbers: errors are relative, times in seconds, sizes in bytes.
    """

    case: str
    status: str
    detail: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    check: str = ""


@dataclass(frozen=True)
class Sizes:
    """Of the inputs: small enough for a CPU, or large enough to keep a GPU busy.

    Attributes:
        rows: query rows of a block.
        width: of heads, in the speed measurement.
        sequence: tokens of the whole sequence over several ranks.
        speed_tokens, speed_heads: of the speed measurement.
        repeats: timed calls, of which the median counts.
        calls: of 2D attention while memory is watched.
    """

    rows: int
    width: int
    sequence: int
    speed_tokens: int
    speed_heads: int
    repeats: int
    calls: int


# Odd numbers of rows, so that every padding a kernel needs is met.
ON_GPU = Sizes(333, 128, 2048, 8192, 16, 10, 12)
ON_CPU = Sizes(41, 64, 96, 256, 4, 3, 8)
