"""The log that the books append to, in commit and nowhere else."""

from collections.abc import Callable

from opal_connector.events.facts import KVCEvent


class EventLog:
    """Events since the last `take`, in order, and whoever listens to each of them.

    Mutable state: the list of pending events and the listener. Whoever guards the books guards it.
    A log that is not enabled drops what it is given, so that nothing grows where nobody takes; the
    listener hears every event, from the thread that changes the books, and must not wait.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.listener: Callable[[KVCEvent], None] | None = None
        self._pending: list[KVCEvent] = []

    def __len__(self) -> int:
        return len(self._pending)

    def append(self, event: KVCEvent) -> None:
        """Add a fact."""
        if self.enabled:
            self._pending.append(event)
        listener = self.listener  # read once: another thread may take it away
        if listener is not None:
            listener(event)

    def take(self) -> list[KVCEvent]:
        """All pending events; they are the caller's now."""
        taken, self._pending = self._pending, []
        return taken
