"""Which objects have not been used for too long."""

from heapq import heapify, heappop, heappush

from opal_connector.managers.records import ObjectKey

_RETRY_SECONDS = 1.0  # for what is in use, or has children that are not due yet
_SLACK = 4  # entries per object before the heap is built anew


class Expiry:
    """Deadlines of objects, moved on by every use. Monotonic seconds.

    Mutable state: `_deadlines` and `_lives` (seconds without use, of objects that have their own),
    and `_heap` with an entry for every deadline that was ever set; guarded by the owner of the
    books. Where nothing can expire it holds nothing.
    """

    def __init__(self, ttl_seconds: float | None) -> None:
        self._ttl_seconds = ttl_seconds
        self._deadlines: dict[ObjectKey, float] = {}
        self._lives: dict[ObjectKey, float] = {}
        self._heap: list[tuple[float, ObjectKey]] = []

    def limit(self, key: ObjectKey, ttl_seconds: float, now: float) -> None:
        """Give one object a life of its own."""
        self._lives[key] = ttl_seconds
        self.used(key, now)

    def used(self, key: ObjectKey, now: float) -> None:
        """An object was stored or used."""
        life_seconds = self._lives.get(key, self._ttl_seconds)
        if life_seconds is not None:
            self._set(key, now + life_seconds)

    def left(self, key: ObjectKey) -> None:
        """An object has left the tier."""
        if self._deadlines:
            self._deadlines.pop(key, None)
            self._lives.pop(key, None)

    @property
    def is_used(self) -> bool:
        """Whether anything can expire here."""
        return self._ttl_seconds is not None or bool(self._lives)

    def has_due(self, now: float) -> bool:
        """Whether some deadline may have passed."""
        return bool(self._heap) and self._heap[0][0] <= now

    def take_due(self, now: float, limit: int) -> list[ObjectKey]:
        """At most `limit` objects that are due, the longest unused first.

        Each is due again soon, unless it has left by then.
        """
        due: list[ObjectKey] = []
        while self.has_due(now) and len(due) < limit:
            deadline, key = heappop(self._heap)
            if self._deadlines.get(key) == deadline:
                due.append(key)
        for key in due:
            self._set(key, now + _RETRY_SECONDS)
        return due

    def _set(self, key: ObjectKey, deadline: float) -> None:
        self._deadlines[key] = deadline
        if len(self._heap) > _SLACK * len(self._deadlines) + 64:
            self._heap = [(when, other) for other, when in self._deadlines.items()]
            heapify(self._heap)
        else:
            heappush(self._heap, (deadline, key))
