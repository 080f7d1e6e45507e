"""LMCache's tasks while they are open, and their results until they are asked for."""

import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.platform import create_event_notifier

from opal_connector.integrations.lmcache.identity import StoredObject
from opal_connector.integrations.lmcache.lent_objects import LentObject
from opal_connector.integrations.lmcache.wishes import StoreWish

Result = TypeVar("Result")


class Outbox(Generic[Result]):
    """Results by task, and the descriptor that says that there is one.

    Mutable state: the results; guarded by `_lock`. After `close` nothing is announced any more.
    """

    def __init__(self) -> None:
        self._notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._results: dict[int, Result] = {}
        self._is_closed = False

    @property
    def descriptor(self) -> int:
        """Readable when there is a result."""
        return int(self._notifier.fileno())

    def put(self, task_id: int, result: Result) -> None:
        """A task has ended."""
        with self._lock:
            self._results[task_id] = result
            if not self._is_closed:
                self._notifier.notify()

    def take(self, task_id: int) -> Result | None:
        """The result of a task, once."""
        with self._lock:
            return self._results.pop(task_id, None)

    def take_all(self) -> dict[int, Result]:
        """All results that were not taken."""
        with self._lock:
            taken, self._results = self._results, {}
            return taken

    def close(self) -> None:
        """Give up the descriptor."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._notifier.close()


class StoreTask:
    """Objects on their way into the tiers. All of them are there in the end, or it has failed.

    Mutable state: everything but the id; guarded by the lock of `AdapterRuntime`.

    Attributes:
        waiting: Wishes that are to be asked again.
        open_jobs: Jobs that have not been answered.
        written_bytes: What those that have ended wrote.
    """

    __slots__ = (
        "deadline",
        "has_failed",
        "lent",
        "open_jobs",
        "task_id",
        "waiting",
        "written_bytes",
    )

    def __init__(self, task_id: int, deadline: float) -> None:
        self.task_id = task_id
        self.waiting: list[StoreWish] = []
        self.lent: list[LentObject] = []
        self.deadline = deadline
        self.open_jobs = 0
        self.has_failed = False
        self.written_bytes = 0

    @property
    def has_ended(self) -> bool:
        """Whether nothing is waited for any more."""
        return not self.waiting and not self.open_jobs


class LoadTask:
    """Buffers to be filled, each by a job of its own: one that fails says nothing of the others.

    Mutable state: `loaded` and `open_jobs`; guarded by the lock of `AdapterRuntime`.
    """

    __slots__ = ("keys", "loaded", "open_jobs", "task_id")

    def __init__(self, task_id: int, keys: Sequence[ObjectKey]) -> None:
        self.task_id = task_id
        self.keys = tuple(keys)
        self.loaded = [False] * len(self.keys)
        self.open_jobs = 0


class LoadAttempt:
    """One buffer of a load task, and the tiers that were tried for it."""

    __slots__ = ("lent", "places", "position", "stored", "task")

    def __init__(
        self, task: LoadTask, position: int, stored: StoredObject, lent: LentObject
    ) -> None:
        self.task = task
        self.position = position
        self.stored = stored
        self.lent = lent
        self.places: frozenset[int] = frozenset()
