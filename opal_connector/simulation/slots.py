"""Who may go on at once, and who waits in line."""

from collections import deque
from collections.abc import Callable


class Slots:
    """So many at once, the others in the order in which they came; 0 is no limit.

    Mutable state: how many are inside, and what those who wait would do.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._inside = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def __repr__(self) -> str:
        return f"<Slots {self._inside}/{self._limit or 'any'}, {len(self._waiting)} waiting>"

    @property
    def waiting_count(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def enter(self, go: Callable[[], None]) -> None:
        """Go now, or when it is one's turn. Each that went must `leave` once."""
        if self._limit and self._inside >= self._limit:
            self._waiting.append(go)
            return
        self._inside += 1
        go()

    def leave(self) -> None:
        """Make room for the next."""
        if self._waiting:
            self._waiting.popleft()()  # takes the place: nobody is fewer inside
        else:
            self._inside -= 1
