"""Virtual time: what happens next happens at once, whatever lies between."""

import heapq
from collections.abc import Callable


class VirtualClock:
    """Seconds that pass only from one planned call to the next.

    Calls of the same instant run in the order in which they were planned, so a run is the same
    every time.

    Mutable state: `now` (seconds), the planned calls and the number of the next one.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._number = 0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []

    def __repr__(self) -> str:
        return f"<VirtualClock {self.now:.6f} s, {len(self._planned)} planned>"

    def __bool__(self) -> bool:
        """Whether anything is planned."""
        return bool(self._planned)

    @property
    def next_time(self) -> float:
        """When the next planned call is due; infinity when there is none."""
        return self._planned[0][0] if self._planned else float("inf")

    def plan(self, delay_seconds: float, call: Callable[[], None]) -> None:
        """Have something happen after so many seconds."""
        self._number += 1
        heapq.heappush(self._planned, (self.now + delay_seconds, self._number, call))

    def run_next(self) -> None:
        """Go to the next planned call and make it."""
        self.now, _, call = heapq.heappop(self._planned)
        call()
