"""Counts of values by size, cheap enough for every request."""

import bisect
from itertools import accumulate
from typing import Final

FIRST_BYTE_BOUNDS: Final = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
OVERHEAD_BOUNDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 5.0)


class Histogram:
    """How many values were at most each bound. Mutable state: the counts and the sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def see(self, value: float) -> None:
        """One more value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """All values."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """How many values were at most each bound, as Prometheus has it."""
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(map(float, self._counts)), strict=True))
