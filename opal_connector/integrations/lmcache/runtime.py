"""`AdapterRuntime`: the books, the tiers and the open tasks of one adapter, and its thread."""

import itertools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lmcache.v1.distributed.api import ObjectKey

from opal_connector.config import OpalConfig
from opal_connector.integrations.lmcache.adapter_tiers import make_adapter_tiers
from opal_connector.integrations.lmcache.books import ObjectBooks
from opal_connector.integrations.lmcache.identity import (
    Layout,
    context_of,
    namespace_digest,
    object_layout,
)
from opal_connector.integrations.lmcache.lent_objects import LentObjects
from opal_connector.integrations.lmcache.tasks import LoadAttempt, LoadTask, StoreTask
from opal_connector.integrations.lmcache.wishes import Lookup, StoreState, StoreWish
from opal_connector.reports import RateLimitedWarnings
from opal_connector.sharing import link_shared_tier
from opal_connector.tiers import Job, Mover
from opal_connector.transfers import InventoryPage, JobResult, TierHealth

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)

_OPENING_SECONDS: Final = 1.0  # how long a lookup waits for a tier that is being opened
_ROOM_SECONDS: Final = 5.0  # how long a store waits for room, or for another store of its key
_CLOSING_SECONDS: Final = 5.0
_IDLE_SECONDS: Final = 0.1
_BUSY_SECONDS: Final = 0.005


class Listener:
    """What the adapter does when something has ended; called without any lock."""

    def news(self) -> None:
        """Keys may have come or gone. In the runtime's thread, before the results that say so."""

    def stored(self, task_id: int, *, succeeded: bool, written_bytes: int) -> None:
        """A store has ended."""

    def looked_up(self, task_id: int, hits: Sequence[bool]) -> None:
        """A lookup has ended."""

    def loaded(self, task_id: int, keys: Sequence[ObjectKey], hits: Sequence[bool]) -> None:
        """A load has ended."""


class AdapterRuntime:
    """Turns LMCache's tasks into jobs and results of jobs into results of tasks.

    What can be decided at once is decided in the calling thread, which never waits for a medium.
    A thread of its own takes the results of the tiers' threads, commits them, does the upkeep, and
    asks again for what had to wait.

    Mutable state: the open tasks and which job is whose; guarded by `_lock`, under which the lock
    of the books may be taken. The listener is called without it.
    """

    def __init__(self, config: OpalConfig, namespace: str, listener: Listener) -> None:
        digest = namespace_digest(namespace)
        tiers = make_adapter_tiers(config, digest)
        self.books = ObjectBooks(config, tiers.spaces, most_rows=tiers.most_rows)
        self.lent = LentObjects()
        self._listener = listener
        self._wake = threading.Event()
        self._contexts = tiers.contexts
        self.mover = Mover(
            tiers.stores, self.lent, rank=0, lanes=tiers.lanes, on_result=self._wake.set
        )
        self._shared = link_shared_tier(config, self.books, namespace=digest, ranks=1)
        self._lock = threading.Lock()
        self._is_closing = False
        self._task_ids = itertools.count(1)
        self._stores: dict[int, StoreTask] = {}
        self._store_jobs: dict[int, tuple[StoreTask, int]] = {}
        self._loads: dict[int, LoadTask] = {}
        self._load_jobs: dict[int, LoadAttempt] = {}
        self._lookups: dict[int, Lookup] = {}
        self._pages: list[InventoryPage] = []
        self._health: tuple[TierHealth, ...] = ()
        self._strangers_asked = False
        self._namespace = digest
        self._thread = threading.Thread(target=self._run, name="opal-adapter", daemon=True)

    def start(self) -> None:
        """Begin to open the tiers, and to look after tasks."""
        self.mover.open(self._namespace)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether somebody looks after the tasks."""
        return self._thread.is_alive()

    @property
    def open_task_count(self) -> int:
        """Tasks that have no result yet."""
        return len(self._stores) + len(self._loads) + len(self._lookups)

    @property
    def health(self) -> tuple[TierHealth, ...]:
        """What the tiers can do now, by place."""
        return self.mover.health

    # ---- tasks ----

    def store(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> int:
        """Begin to store objects; returns the task's id."""
        task = StoreTask(next(self._task_ids), time.monotonic() + _ROOM_SECONDS)
        try:
            for key, item in zip(keys, objects, strict=True):
                layout, size_bytes = object_layout(item), int(item.get_size())
                lent = self.lent.lend(item, size_bytes)
                task.lent.append(lent)
                task.waiting.append(StoreWish(key, layout, size_bytes, lent.addresses))
            self._write_contexts(task.waiting)
        except Exception as error:  # noqa: BLE001 - a buffer of a kind that has no bytes here
            warnings.warn("store", "cannot store an object of LMCache's: %r", error)
            task.waiting, task.has_failed = [], True
        with self._lock:
            if self._is_closing:
                task.waiting, task.has_failed = [], True
            self._stores[task.task_id] = task
            self._try_store(task)
        self._wake.set()
        self._finish_stores([task])
        return task.task_id

    def look_up(self, keys: Sequence[ObjectKey], layouts: Mapping[int, Layout]) -> int:
        """Begin to look up and lock keys; returns the task's id."""
        task_id, now = next(self._task_ids), time.monotonic()
        lookup = Lookup(keys, layouts, now + _OPENING_SECONDS)
        hits = self.books.answer(lookup, now)
        if hits is None:
            with self._lock:
                if self._is_closing:
                    hits = [False] * len(keys)
                else:
                    self._lookups[task_id] = lookup
        self._wake.set()
        if hits is not None:
            self._listener.looked_up(task_id, hits)
        return task_id

    def load(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> int:
        """Begin to fill buffers; returns the task's id."""
        task = LoadTask(next(self._task_ids), keys)
        with self._lock:
            self._loads[task.task_id] = task
            for position, item in enumerate(objects):
                if self._is_closing:
                    break
                try:
                    self._begin_load(task, position, item)
                except Exception as error:  # noqa: BLE001 - as above
                    warnings.warn("load", "cannot fill an object of LMCache's: %r", error)
        self._wake.set()
        self._finish_loads([task])
        return task.task_id

    def close(self) -> None:
        """End every task, as failed where it has not ended, and give up the tiers."""
        with self._lock:
            self._is_closing = True
        self._wake.set()
        self._thread.join(_CLOSING_SECONDS)
        if self._shared is not None:
            self._shared.close()
        self.mover.close()
        for contexts in self._contexts.values():
            contexts.close()  # after the last object: what names it must be there
        with self._lock:
            self._take_results()
            for store in self._stores.values():
                store.has_failed = store.has_failed or not store.has_ended
                store.waiting, store.open_jobs = [], 0
            for attempt in self._load_jobs.values():
                self.lent.give_back(attempt.lent)  # a late thread finds nothing to write to
            for load in self._loads.values():
                load.open_jobs = 0
            stores, loads = list(self._stores.values()), list(self._loads.values())
            lookups, self._lookups = self._lookups, {}
        self._listener.news()
        self._finish_stores(stores)
        self._finish_loads(loads)
        for task_id, lookup in lookups.items():
            self._listener.looked_up(task_id, [False] * len(lookup.keys))

    # ---- the thread ----

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._cycle()
            except Exception as error:  # noqa: BLE001 - without it no task would ever end again
                warnings.warn("cycle", "looking after the tasks failed: %r", error)
            self._wait()

    def _wait(self) -> None:
        """Until there may be something to do. Results wake it, and so do new tasks."""
        with self._lock:
            waits = any(task.waiting for task in self._stores.values())
            is_asking = waits or bool(self._lookups)
        self._wake.wait(_BUSY_SECONDS if is_asking else _IDLE_SECONDS)
        self._wake.clear()

    def _cycle(self) -> None:
        now = time.monotonic()
        self._keep_up(now)
        with self._lock:
            stores, loads = self._take_results()
            for task in list(self._stores.values()):
                if task.waiting:
                    self._ask_again(task, now)
                    stores.append(task)
        self._listener.news()
        self._finish_stores(stores)
        self._finish_loads(loads)
        self._answer_lookups(now)

    def _keep_up(self, now: float) -> None:
        """What is due apart from tasks: opening, health, others' news, copies and deletions."""
        self._take_pages()
        health = self.mover.health
        if health != self._health:
            self._health = health
            self.books.report_health(health)
        if self._shared is not None:
            self._shared.poll()
            self._learn_strangers()
        self.books.expire(now)
        if self.books.wants_upkeep:
            batch = self.books.plan_upkeep()
            jobs: list[Job] = [*batch.drops, *batch.copies]
            for job in jobs:
                self.mover.submit(job)
            self.mover.touch(batch.touches)

    def _take_pages(self) -> None:
        """Enter what the tiers had, once it is known what their names refer to."""
        self._pages += self.mover.take_pages()
        if not self._pages:
            return
        waiting: list[InventoryPage] = []
        for page in self._pages:
            contexts = self._contexts.get(page.tier)
            if contexts is not None and not contexts.is_read:
                waiting.append(page)
                continue
            if contexts is not None:
                self.books.learn(contexts.take())
            self.books.adopt(page)
        self._pages = waiting

    def _learn_strangers(self) -> None:
        """Read the contexts of what others have written in the meantime."""
        places = {place for place, _ in self.books.strangers}
        if not places:
            return
        if not self._strangers_asked:
            for place in places:
                self._contexts[place].read_again()
            self._strangers_asked = True
        elif all(self._contexts[place].is_read for place in places):
            for place in places:
                self.books.learn(self._contexts[place].take())
            self.books.adopt_found(self.books.take_strangers())
            self._strangers_asked = False

    def _answer_lookups(self, now: float) -> None:
        with self._lock:
            lookups = list(self._lookups.items())
        for task_id, lookup in lookups:
            hits = self.books.answer(lookup, now)
            if hits is not None:
                with self._lock:
                    del self._lookups[task_id]
                self._listener.looked_up(task_id, hits)

    # ---- inside; the lock is held ----

    def _try_store(self, task: StoreTask) -> None:
        """Plan what is left of a store; keeps what has to be asked again."""
        if not task.waiting:
            return
        job, states, planned_bytes = self.books.plan_store(task.waiting)
        task.has_failed = task.has_failed or StoreState.NEVER in states
        task.waiting = [
            wish
            for wish, state in zip(task.waiting, states, strict=True)
            if state is StoreState.LATER
        ]
        if job is not None:
            task.open_jobs += 1
            self._store_jobs[job.job_id] = task, planned_bytes
            self.mover.submit(job)

    def _ask_again(self, task: StoreTask, now: float) -> None:
        self._try_store(task)
        if task.waiting and now > task.deadline:
            warnings.warn("room", "no room for %d objects in time", len(task.waiting))
            task.waiting, task.has_failed = [], True

    def _begin_load(self, task: LoadTask, position: int, item: Any) -> None:
        wish = StoreWish(task.keys[position], object_layout(item), int(item.get_size()))
        stored = self.books.find_stored(wish)
        if stored is not None:
            lent = self.lent.lend(item, stored.size_bytes)
            self._try_load(LoadAttempt(task, position, stored, lent))

    def _try_load(self, attempt: LoadAttempt) -> bool:
        """Begin to fill a buffer from a tier that was not tried; whether there is one."""
        planned = self.books.plan_load(attempt.stored, attempt.lent.addresses, attempt.places)
        if planned is None:
            self.lent.give_back(attempt.lent)
            return False
        job, place = planned
        attempt.places |= {place}
        attempt.task.open_jobs += 1
        self._load_jobs[job.job_id] = attempt
        self.mover.submit(job)
        return True

    def _take_results(self) -> tuple[list[StoreTask], list[LoadTask]]:
        """Commit what has ended; the tasks that it belongs to."""
        stores: list[StoreTask] = []
        loads: list[LoadTask] = []
        for _, result in self.mover.take_results():
            self.books.commit(result)
            if result.job_id in self._store_jobs:
                task, planned_bytes = self._store_jobs.pop(result.job_id)
                task.open_jobs -= 1
                task.written_bytes += planned_bytes
                task.has_failed = task.has_failed or bool(result.failed)
                stores.append(task)
            elif result.job_id in self._load_jobs:
                loads.append(self._end_load(self._load_jobs.pop(result.job_id), result))
        return stores, loads

    def _end_load(self, attempt: LoadAttempt, result: JobResult) -> LoadTask:
        task = attempt.task
        task.open_jobs -= 1
        if not result.failed:
            task.loaded[attempt.position] = True
            self.lent.give_back(attempt.lent)
        elif self._is_closing or not self._try_load(attempt):
            self.lent.give_back(attempt.lent)
        return task

    # ---- inside; no lock is held ----

    def _finish_stores(self, tasks: Sequence[StoreTask]) -> None:
        with self._lock:
            ended = [
                self._stores.pop(task.task_id)
                for task in tasks
                if task.has_ended and task.task_id in self._stores
            ]
        for task in ended:
            for lent in task.lent:
                self.lent.give_back(lent)
        for task in ended:
            self._listener.stored(
                task.task_id,
                succeeded=not task.has_failed,
                written_bytes=0 if task.has_failed else task.written_bytes,
            )

    def _finish_loads(self, tasks: Sequence[LoadTask]) -> None:
        with self._lock:
            ended = [
                self._loads.pop(task.task_id)
                for task in tasks
                if not task.open_jobs and task.task_id in self._loads
            ]
        for task in ended:
            self._listener.loaded(task.task_id, task.keys, task.loaded)

    def _write_contexts(self, wishes: Sequence[StoreWish]) -> None:
        if not self._contexts:
            return
        wanted = {context_of(wish.key, wish.layout) for wish in wishes}
        for contexts in self._contexts.values():
            contexts.want(wanted)
