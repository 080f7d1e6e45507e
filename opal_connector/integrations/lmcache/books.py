"""`ObjectBooks`: Opal's books for a host whose objects are single and have sizes of their own.

Where `OpalKVCacheManager` answers for sequences of tokens, this one answers for LMCache's keys. The
tiers, the copies between them and the upkeep are the same.

An object has as many rows of one common unit as it needs, and that number is its attention group in
the books: a group's `members` are the rows per block, and every object has one block. So objects of
all models, groups and layouts share one pool, one order of eviction and one directory, and room
goes to what is used. Books for each layout would have to divide the room beforehand.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Self, TypeVar

import msgspec
from lmcache.v1.distributed.api import ObjectKey

from opal_connector.config import OpalConfig
from opal_connector.events import EventLog
from opal_connector.integrations.lmcache.catalog import Catalog, KeyNews
from opal_connector.integrations.lmcache.identity import (
    UNKNOWN_LAYOUT,
    Context,
    StoredObject,
    context_of,
    name_of,
)
from opal_connector.integrations.lmcache.locks import KeyLocks
from opal_connector.integrations.lmcache.planning import (
    count_moved,
    is_loading,
    keep_copy,
    state_of,
    transfer_of,
)
from opal_connector.integrations.lmcache.shared_questions import SharedQuestions
from opal_connector.integrations.lmcache.uses import Uses
from opal_connector.integrations.lmcache.wishes import Lookup, StoreState, StoreWish
from opal_connector.keys import plain_layout
from opal_connector.managers import (
    NoPrefixCache,
    ObjectGroup,
    ObjectRecord,
    ObjectSpec,
    Refusal,
    Space,
    build_storage,
)
from opal_connector.managers.audit import audit_promises, audit_tier
from opal_connector.managers.counters import BookCounters
from opal_connector.managers.jobs import JobKind, JobTable, OpenJob, PlannedObject
from opal_connector.managers.placement import Placement
from opal_connector.managers.quotas import Quotas
from opal_connector.managers.records import ObjectKey as BookKey
from opal_connector.managers.settlement import Settlement
from opal_connector.managers.upkeep import Upkeep
from opal_connector.transfers import (
    InventoryPage,
    JobBatch,
    JobResult,
    LoadJob,
    ObjectName,
    ObjectTransfer,
    Question,
    SharedNews,
    StoreJob,
    TierHealth,
)

_EXPIRY_SECONDS: Final = 1.0
Answer = TypeVar("Answer")


class ObjectBooks:
    """All decisions over all tiers, for objects by LMCache's key.

    Mutable state: the tiers' books, the catalog, the locks, the open jobs and questions, the
    counters and `_version`, which changes whenever something may have become possible. One lock
    guards it; nothing blocks in it.
    """

    def __init__(
        self,
        config: OpalConfig,
        spaces: Mapping[str, Space],
        *,
        most_rows: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._quotas = Quotas(config.quotas)
        self._version = 0
        self._looked_at_version = -1
        self._next_expiry = float("-inf")
        self.catalog = Catalog()
        self.log = EventLog(enabled=False)
        self.log.listener = self.catalog.hear
        groups = [ObjectGroup(max(1, rows), is_chain=False) for rows in range(most_rows + 1)]
        self.storage, rules = build_storage(
            config, groups=groups, spaces=spaces, log=self.log, clock=clock
        )
        self.tier_names = tuple(tier.tier for tier in self.storage.tiers)
        self.counters = BookCounters()
        self.jobs = JobTable(ranks=1)
        self._placement = Placement(self.storage, rules, self.counters)
        self._settlement = Settlement(
            self.storage, self._placement, self.counters, NoPrefixCache((), plain_layout(1))
        )
        self._upkeep = Upkeep(
            self.storage, self._placement, self.jobs, ranks=1, owner_of=self._owner_of
        )
        self._uses = Uses(self.storage, self.catalog, self._upkeep)
        self.locks = KeyLocks(self.storage)
        self._questions = SharedQuestions(self.storage, config.DistributedFS.lookup_timeout_seconds)
        self.strangers: list[tuple[int, ObjectName]] = []

    def __repr__(self) -> str:
        return f"<ObjectBooks {len(self.catalog)} keys, {len(self.locks)} locked>"

    # ---- lookup ----

    def answer(self, lookup: Lookup, now: float) -> list[bool] | None:
        """Which keys of a lookup are there, each locked once; None to ask again soon.

        It waits, within bounds, for a tier that is being opened and for a shared one that is asked.
        """
        with self._lock:
            hits = [self._find(key, lookup) for key in lookup.keys]
            if None in hits and self._may_wait(lookup, hits, now):
                return None
            for key, hit in zip(lookup.keys, hits, strict=True):
                if hit is not None:
                    self.locks.add(key, *hit, now)
            found = (key for key, hit in zip(lookup.keys, hits, strict=True) if hit is not None)
            self._uses.looked_up(lookup.keys, found)
            return [hit is not None for hit in hits]

    def unlock(self, keys: Sequence[ObjectKey]) -> None:
        """End one lock of each key; what is not locked is left alone."""
        with self._lock:
            for key in keys:
                self.locks.end(key)
            self._version += 1

    # ---- plan ----

    def plan_store(
        self, wishes: Sequence[StoreWish]
    ) -> tuple[StoreJob | None, list[StoreState], int]:
        """Reserve room for new objects; the job, what becomes of each, and the bytes to write."""
        planned: list[PlannedObject] = []
        transfers: list[ObjectTransfer] = []
        planned_bytes = 0
        with self._lock:
            states = []
            for wish in wishes:
                outcome = self._reserve(wish)
                if isinstance(outcome, StoreState):
                    states.append(outcome)
                    continue
                place, record = outcome
                states.append(StoreState.PLANNED)
                planned.append(PlannedObject(tier=place, record=record))
                transfers.append(transfer_of(self.storage, place, record, wish.addresses))
                planned_bytes += wish.size_bytes
            if not planned:
                return None, states, 0
            self._version += 1
            job_id = self.jobs.open(JobKind.STORE, None, planned)
            return StoreJob(job_id, tuple(transfers)), states, planned_bytes

    def find_stored(self, wish: StoreWish) -> StoredObject | None:
        """The object that a load into a buffer of this layout and size would bring."""
        with self._lock:
            for stored in reversed(self.catalog.find_all(wish.key)):
                if stored.layout.is_opaque and wish.layout.is_opaque:
                    if stored.size_bytes <= wish.size_bytes:
                        return stored
                elif stored.layout == wish.layout and stored.size_bytes == wish.size_bytes:
                    return stored
        return None

    def plan_load(
        self, stored: StoredObject, addresses: tuple[int, ...], avoid: frozenset[int]
    ) -> tuple[LoadJob, int] | None:
        """Fill a buffer from the fastest tier that is not to be avoided; the job and its place."""
        with self._lock:
            for place, tier in enumerate(self.storage.tiers):
                record = tier.get(stored.book_key)
                if record is not None and place not in avoid:
                    return self._plan_load(stored, place, record, addresses), place
        return None

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Take keys out of every tier, but those that are locked or being loaded."""
        with self._lock:
            for key in keys:
                found = self.catalog.find_all(key)
                if key in self.locks or is_loading(self.storage, [one.book_key for one in found]):
                    continue
                for stored in found:
                    for tier in self.storage.tiers:
                        tier.take_out(stored.book_key)
            self._version += 1

    @property
    def wants_upkeep(self) -> bool:
        """Whether `plan_upkeep` has something to do."""
        return self._version != self._looked_at_version and self._upkeep.is_due

    def plan_upkeep(self) -> JobBatch:
        """Copies, moves and deletions that are due, and uses that must survive a restart."""
        with self._lock:
            batch = self._upkeep.plan()
            if batch:
                self._version += 1
            self._looked_at_version = self._version
            return batch

    # ---- commit ----

    def commit(self, result: JobResult) -> OpenJob | None:
        """Write down what became of a job; returns it, or None for one that is not open."""
        with self._lock:
            job = self.jobs.get(result.job_id)
            if job is None or not job.answer(result):
                return None
            count_moved(self.counters, self.tier_names, job, result)
            self.jobs.close(job)
            self._version += 1
            self._settlement.settle(job)
            if job.kind is JobKind.STORE:
                written = (item for item in job.objects if isinstance(item, PlannedObject))
                self._uses.stored(item.record for item in written)
            return job

    def learn(self, contexts: Sequence[Context]) -> None:
        """Names may refer to these from now on."""
        with self._lock:
            for context in contexts:
                self.catalog.number(context)

    def adopt(self, page: InventoryPage) -> None:
        """Enter what a tier had before this process. What nobody can name any more is deleted."""
        with self._lock:
            known = tuple(name for name in page.names if self.catalog.read(name) is not None)
            self._upkeep.adopt(msgspec.structs.replace(page, names=known))
            tier = self.storage.tiers[page.tier]
            for name in set() if tier.space.is_shared else set(page.names).difference(known):
                tier.discard(name)
            self._version += 1

    def adopt_found(self, found: Sequence[tuple[int, ObjectName]]) -> None:
        """Enter what others have written, of contexts that have become known."""
        with self._lock:
            for place, name in found:
                if self.catalog.read(name) is not None:
                    self.storage.tiers[place].adopt(name, self._owner_of(name))
            self._version += 1

    def report_health(self, health: Sequence[TierHealth]) -> None:
        """Take note of what the tiers can do now, by place."""
        with self._lock:
            self._upkeep.report_health(0, health)
            self._version += 1

    # ---- a shared tier ----

    def take_questions(self) -> list[Question]:
        """What lookups want to know of a shared tier, since the last call."""
        with self._lock:
            return self._questions.take()

    def hear(self, news: SharedNews, now: float) -> None:
        """Take note of what a shared tier's keeper has found out."""
        del now
        with self._lock:
            known = tuple(name for name in news.found if self.catalog.read(name) is not None)
            strangers = [name for name in news.found if not self.catalog.knows_context_of(name)]
            self.strangers += [(news.tier, name) for name in strangers]
            self._upkeep.hear(msgspec.structs.replace(news, found=known))
            self._questions.hear(news.answered)
            self._version += 1

    def take_strangers(self) -> list[tuple[int, ObjectName]]:
        """What others wrote, of contexts that are not known here, since the last call."""
        with self._lock:
            taken, self.strangers = self.strangers, []
            return taken

    def is_held(self, key: bytes) -> bool:
        """Whether some copy of an object is promised or in motion."""
        with self._lock:
            return self.storage.is_held(BookKey(key))

    # ---- reports ----

    def expire(self, now: float) -> None:
        """End locks past their deadline, and objects that nobody used for too long."""
        if now < self._next_expiry:
            return
        self._next_expiry = now + _EXPIRY_SECONDS
        with self._lock:
            self._version += bool(self.storage.expire(now))
            self.locks.expire(now)

    def take_news(self) -> list[KeyNews]:
        """Keys that came and went since the last call, in order."""
        if not self.catalog.has_news:
            return []
        with self._lock:
            return self.catalog.take_news()

    def read(self, reader: Callable[[Self], Answer]) -> Answer:
        """What a reader says of the books, which do not change meanwhile."""
        with self._lock:
            return reader(self)

    def check(self) -> None:
        """Audit every book.

        Raises:
            AssertionError: Two of them disagree.
        """
        with self._lock:
            for tier in self.storage.tiers:
                audit_tier(tier)
            copies = audit_promises(self.storage.tiers, self.locks.records(), self.jobs)
            self._placement.check(copies)
            self.catalog.check(key for _, key in self.storage.placements())

    # ---- inside; the lock is held ----

    def _find(self, key: ObjectKey, lookup: Lookup) -> tuple[int, ObjectRecord] | None:
        wanted = lookup.layouts.get(key.object_group_id, UNKNOWN_LAYOUT)
        for stored in reversed(self.catalog.find_all(key)):
            if stored.layout.may_be(wanted):
                found = self.storage.find(stored.book_key)
                if found is not None:
                    return found
        return None

    def _may_wait(
        self, lookup: Lookup, hits: Sequence[tuple[int, ObjectRecord] | None], now: float
    ) -> bool:
        if self.storage.is_opening and now < lookup.deadline:
            return True
        if not self._questions.is_used:
            return False
        missing = [key for key, hit in zip(lookup.keys, hits, strict=True) if hit is None]
        names = [name for key in missing if (name := self._expected_name(key, lookup)) is not None]
        return self._questions.is_pending(lookup, names, now)

    def _expected_name(self, key: ObjectKey, lookup: Lookup) -> ObjectName | None:
        layout = lookup.layouts.get(key.object_group_id, UNKNOWN_LAYOUT)
        if not layout.shapes:
            return None
        return name_of(key, self.catalog.number(context_of(key, layout)), layout.size_bytes)

    def _reserve(self, wish: StoreWish) -> tuple[int, ObjectRecord] | StoreState:
        number = self.catalog.number(context_of(wish.key, wish.layout))
        name = name_of(wish.key, number, wish.size_bytes)
        if name is None or name.group >= len(self.storage.groups):
            return StoreState.NEVER
        owner = self._quotas.owner(wish.key.cache_salt)
        spec = ObjectSpec(name.group, name.parent_hash, name.run, first_block=0, owner=owner)
        outcome = self.storage.reserve(spec)
        if not isinstance(outcome, Refusal):
            return outcome
        if outcome is Refusal.FULL:
            self._looked_at_version = -1  # upkeep can make room, though nothing has changed
        return state_of(
            outcome,
            is_readable=self.storage.find(spec.key) is not None,
            is_opening=self.storage.is_opening,
        )

    def _plan_load(
        self, stored: StoredObject, place: int, record: ObjectRecord, addresses: tuple[int, ...]
    ) -> LoadJob:
        self.storage.tiers[place].pin(record, loading=True)
        transfer = transfer_of(self.storage, place, record, addresses)
        kept = keep_copy(self.storage, place, record)
        kept_job_id = 0
        if kept is not None:
            transfer = msgspec.structs.replace(transfer, kept_tier=0, kept_rows=kept.target.rows)
            kept_job_id = self.jobs.open(JobKind.COPY, None, [kept])
        if stored.key not in self.locks:  # else the lookup was the use
            self._uses.used([stored.key])
        self._version += 1
        planned = PlannedObject(tier=place, record=record)
        job_id = self.jobs.open(JobKind.LOAD, None, [planned])
        return LoadJob(job_id, "", (transfer,), kept_job_id=kept_job_id)

    def _owner_of(self, name: ObjectName) -> str:
        stored = self.catalog.read(name) if self._quotas else None
        return self._quotas.owner(stored.key.cache_salt if stored is not None else None)
