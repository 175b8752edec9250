"""The longest sequence within a budget of bytes, from a few counted peaks."""

from collections.abc import Callable


class PeakSearch:
    """The longest sequence of a contender within a budget of bytes, from counted peaks.

    Peaks are straight lines of the length, but for a kink where another moment becomes the peak: a
    line through two lengths says where to look, and the answer counts only once its own peak is
    within the budget and that of the next length is not.

    Args:
        measure: peaks of some lengths, ascending.
        unit: lengths are multiples of it.
    """

    def __init__(self, measure: Callable[[list[int]], list[int]], unit: int) -> None:
        self._measure = measure
        self._unit = unit
        self.known: dict[int, int] = {}

    def peak(self, *lengths: int) -> list[int]:
        """Counts the peaks of these lengths that are not known yet."""
        missing = sorted({length for length in lengths} - self.known.keys())
        if missing:
            self.known |= zip(missing, self._measure(missing), strict=True)
        return [self.known[length] for length in lengths]

    def estimate(self, budget: int) -> int:
        """Where a line through the two nearest known lengths meets the budget."""
        (a, at_a), (b, at_b) = sorted(self.known.items(), key=lambda it: abs(it[1] - budget))[:2]
        exact = a + (budget - at_a) * (b - a) / (at_b - at_a)
        return max(self._unit, int(exact) // self._unit * self._unit)

    def longest(self, budget: int, *, attempts: int = 6) -> tuple[int, bool]:
        """The longest length whose peak is within the budget, and whether that was counted."""
        for _ in range(attempts):
            guess = self.estimate(budget)
            here, beyond = self.peak(guess, guess + self._unit)
            if here <= budget < beyond:
                return guess, True
        return self.estimate(budget), False
