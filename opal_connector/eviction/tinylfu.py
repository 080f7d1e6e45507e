"""W-TinyLFU, over keys that may be pinned."""

from collections.abc import Container

from typing_extensions import override

from opal_connector.eviction.base import Key
from opal_connector.eviction.line import Line
from opal_connector.eviction.queued import QueuedPolicy
from opal_connector.eviction.sketch import FrequencySketch

WINDOW_PART = 0.01
TRUSTED_PART = 0.8


class WTinyLFUPolicy(QueuedPolicy):
    """A small window before a segmented main line that takes only what is asked for more often.

    As in "TinyLFU: a highly efficient cache admission policy", Einziger, Friedman and Manes, ACM
    Transactions on Storage 13 (2017). New keys come into the window, one hundredth, ordered by
    recency. When it is longer, its oldest key stands against the oldest of the main line: the one
    with fewer accesses in a sketch leaves, the newcomer when they are equal. The main line is a
    segmented LRU: a use leads from probation to the trusted part, at most four fifths of it.
    When a line holds pinned keys only, the victim comes from another.

    Mutable state besides the base's: `_window`, `_probation`, `_trusted`, and `_sketch`, which is
    begun anew, twice as long, when it has become too short.
    """

    def __init__(self) -> None:
        super().__init__()
        self._window = Line(self._pinned)
        self._probation = Line(self._pinned)
        self._trusted = Line(self._pinned)
        self._sketch = FrequencySketch(0)

    @override
    def check(self) -> None:
        super().check()
        lines = (self._window, self._probation, self._trusted)
        assert sum(len(line) for line in lines) == len(self._home)

    @override
    def _add(self, key: Key) -> None:
        if len(self._home) >= self._sketch.capacity:
            self._sketch = FrequencySketch(2 * self._sketch.capacity)
        self._sketch.add(key)
        self._home[key] = self._window
        self._window.order[key] = None

    @override
    def _use(self, key: Key) -> None:
        line, trusted, window = self._home[key], self._trusted, self._window
        self._sketch.add(key)
        if line is not self._probation:
            line.touch(key)
            return
        line.take(key)
        self._home[key] = trusted
        trusted.order[key] = None
        main = len(self._home) - len(window.order) - len(window.parked)
        if len(trusted.order) + len(trusted.parked) > TRUSTED_PART * main:
            self._move_first(trusted)

    @override
    def _choose(self, protected: Container[Key]) -> Key:
        window = self._window
        quota = max(1.0, WINDOW_PART * self._capacity)
        if len(window.order) + len(window.parked) <= quota:
            victim = self._from_main(protected)
            return window.pop(protected) if victim is None else victim
        line, victim = self._first_of_main(protected)
        if line is None:
            # The main line is still to be filled: the window's surplus goes there uncontested.
            while len(window) > quota and self._move_first(window, protected):
                pass
            victim = self._from_main(protected)
            return window.pop(protected) if victim is None else victim
        newcomer = window.pop(protected)
        if newcomer is None:
            line.take(victim)
        elif self._sketch.count(newcomer) > self._sketch.count(victim):
            line.take(victim)
            self._place(newcomer, self._probation)
        else:
            return newcomer
        return victim

    def _from_main(self, protected: Container[Key]) -> Key | None:
        key = self._probation.pop(protected)
        return self._trusted.pop(protected) if key is None else key

    def _first_of_main(self, protected: Container[Key]) -> tuple[Line | None, Key | None]:
        """The victim that the main line would give, which stays, and where it stands."""
        if protected == ():
            for line in (self._probation, self._trusted):
                key = line.first()
                if key is not None:
                    return line, key
            return None, None
        key = self._from_main(protected)
        if key is None:
            return None, None
        line = self._home[key]
        line.restore([key])
        return line, key

    def _move_first(self, line: Line, protected: Container[Key] = ()) -> bool:
        key = line.pop(protected)
        if key is None:
            return False
        self._place(key, self._probation)
        return True
