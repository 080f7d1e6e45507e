"""`OpalKVCacheManager`: the top of the books. Plans under one lock, commits under the same lock.

Three verbs change state. plan_* decides and promises rows; the caller executes without any lock;
`commit` writes down what really happened, for success and failure alike.
"""

import threading
import time
from collections.abc import Callable, Sequence

from opal_connector.events import KVCEvent
from opal_connector.keys import OpalTokenDatabase, RequestIdentity
from opal_connector.managers.asking import Asking
from opal_connector.managers.audit import audit_promises, audit_tier
from opal_connector.managers.block_tables import BlockTables, StateBlock
from opal_connector.managers.coordinator import OpalKVCacheCoordinator
from opal_connector.managers.counters import BookCounters, add
from opal_connector.managers.hints import NO_HINTS, RequestHints
from opal_connector.managers.jobs import JobKind, JobTable, OpenJob
from opal_connector.managers.leases import Leases
from opal_connector.managers.load_planning import draft_load, tier_tokens
from opal_connector.managers.lookups import MISS, WAIT, LookupResult, LookupState
from opal_connector.managers.placement import Placement, TierRules
from opal_connector.managers.planning import StorePlan, describe_stores
from opal_connector.managers.quotas import Quotas
from opal_connector.managers.records import ObjectKey, group_of
from opal_connector.managers.refusals import Refusal
from opal_connector.managers.request import OpalRequest
from opal_connector.managers.settlement import Settlement
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.managers.upkeep import Upkeep
from opal_connector.transfers import (
    InventoryPage,
    JobBatch,
    JobResult,
    LoadJob,
    Question,
    SharedNews,
    StoreJob,
    TierHealth,
)

_EXPIRY_SECONDS = 1.0  # between looks for objects that nobody used for too long


class OpalKVCacheManager:
    """All decisions over all tiers.

    Mutable state: the tiers' books, the leases, the open jobs, the counters and `_version`, which
    changes whenever a lookup could answer differently. One lock guards it; nothing blocks in it.
    """

    def __init__(
        self,
        *,
        database: OpalTokenDatabase,
        storage: OpalStorageManager,
        coordinator: OpalKVCacheCoordinator,
        rules: Sequence[TierRules] = (),
        asking: Asking | None = None,
        quotas: Quotas | None = None,
        ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.database = database
        self.storage = storage
        self.layout = coordinator.layout
        self.tier_names = tuple(tier.tier for tier in storage.tiers)
        self.coordinator = coordinator
        if not self.layout.is_plain:
            storage.tie(self.layout)
        self._lock = threading.Lock()
        self._version = 0
        self._looked_at_version = -1
        self._jobs = JobTable(ranks)
        self._asking = asking
        self._quotas = quotas or Quotas()
        self._clock = clock
        self._next_expiry = float("-inf")
        self._leases = Leases(storage, coordinator, asking)
        self._counters = BookCounters()
        self._placement = Placement(
            storage, rules or [TierRules()] * len(storage.tiers), self._counters
        )
        self._settlement = Settlement(storage, self._placement, self._counters, coordinator)
        self._upkeep = Upkeep(storage, self._placement, self._jobs, ranks)

    def __repr__(self) -> str:
        counts = f"{len(self._jobs)} jobs, {len(self._leases)} leases"
        return f"<OpalKVCacheManager {counts}, {self.storage!r}>"

    def new_request(
        self,
        request_id: str,
        identity: RequestIdentity | None = None,
        *,
        lora_name: str | None = None,
        hints: RequestHints = NO_HINTS,
    ) -> OpalRequest:
        """The books' view of a request. Nothing is promised yet."""
        owner = self._quotas.owner(identity.cache_salt if identity is not None else None)
        chain = self.database.chain(identity)
        groups = max(1, len(self.coordinator.managers))
        return OpalRequest(request_id, chain, lora_name, owner=owner, hints=hints, groups=groups)

    # ---- lookup ----

    def lookup(
        self, request: OpalRequest, *, computed_blocks: int, max_blocks: int, now: float
    ) -> LookupResult:
        """What the tiers can add to `computed_blocks`, at most up to block `max_blocks`.

        Idempotent and cheap: asked again while the books are unchanged, it answers from the lease
        that the first call took. A hit's objects stay until load, end or deadline.
        """
        max_blocks = min(max_blocks, len(request.chain.hashes))
        with self._lock:
            self._expire_objects(now)
            lease = self._leases.answer(request, (self._version, computed_blocks, max_blocks), now)
            if lease is None:
                return WAIT
            request.joins.update((computed_blocks, computed_blocks + lease.block_count, max_blocks))
            if not lease.segments:
                return MISS
            tokens = tier_tokens(lease.segments, self.tier_names)
            return LookupResult(LookupState.HIT, lease.block_count, tokens)

    def release(self, request: OpalRequest) -> None:
        """End the promise of a lookup that no load will follow."""
        with self._lock:
            self._leases.release(request)

    def expire(self, now: float) -> int:
        """End leases past their deadline; returns how many there were."""
        with self._lock:
            self._expire_objects(now)
            return self._leases.expire(now)

    # ---- plan ----

    def plan_load(
        self, request: OpalRequest, tables: BlockTables, *, first_block: int, block_count: int
    ) -> LoadJob:
        """Turn the leased hit into a job that fills so many blocks from `first_block` on.

        Blocks of the database, as in `lookup`. Destinations that the lease does not cover are named
        in the job as missing, so that the host recomputes them.
        """
        block_tokens = self.database.block_tokens
        with self._lock:
            lease = request.lease
            draft = draft_load(
                lease.segments if lease is not None else (),
                tables,
                self.storage,
                self.layout,
                first_token=first_block * block_tokens,
                stop_token=(first_block + block_count) * block_tokens,
            )
            self._leases.release(request)
            self._version += bool(draft.planned)  # whoever else was promised these must wait
            request.waiting_since = None
            is_lost = bool(draft.missing) and not self.layout.is_plain
            request.failed_loads += is_lost  # the host will take it for failed as a whole
            for item in draft.planned:
                if is_lost:
                    item.tokens = 0
                if item.tokens:
                    add(request.hit_tokens, self.tier_names[item.tier], item.tokens)
            for item in reversed(draft.planned):
                self.storage.tiers[item.tier].touch([item.record.key])
            kept = [draft.kept.get(position) for position in range(len(draft.planned))]
            return LoadJob(
                self._jobs.open(JobKind.LOAD, request, draft.planned),
                request.request_id,
                tuple(draft.transfers),
                draft.missing,
                self._jobs.open(JobKind.COPY, None, kept) if draft.kept else 0,
            )

    def plan_store(
        self,
        request: OpalRequest,
        *,
        full_blocks: int,
        tables: BlockTables,
        include_tail: bool,
        tokens: Sequence[int] = (),
        states: Sequence[StateBlock] = (),
        max_blocks: int | None = None,
    ) -> StoreJob | None:
        """Reserve room for what is computed and not stored: whole chunks, and the tail if asked.

        Args:
            request: Whose chain it is.
            full_blocks: Blocks whose KV is, or will surely be at the end of this step, complete.
            tables: The request's paged blocks from its first block on.
            include_tail: Also store whole blocks after the last whole chunk.
            tokens: The request's tokens, for events.
            states: Blocks that the host has handed over, because a table does not name them.
            max_blocks: Store no more than that many blocks now; the rest is dropped this time.

        Returns:
            A job, or None when there is nothing to store.
        """
        if request.hints.drop:
            return None
        with self._lock:
            plan = StorePlan(request, self.storage, self.coordinator, tables, max_blocks=max_blocks)
            if not request.joins:  # nothing was looked up: others may, where the prompt ends
                request.joins.add(len(request.chain.hashes))
            plan.add_states(states)  # offered once, and few: before chunks, which come again
            plan.add_chunks(full_blocks, include_tail=include_tail)
            draft = plan.draft
            if draft.drop_reason is not None:
                add(self._counters.dropped_stores, draft.drop_reason, 1)
            if draft.drop_reason == Refusal.FULL:
                self._looked_at_version = -1  # upkeep can make room, though nothing has changed
            request.drop_reason = draft.drop_reason
            request.next_chunks = draft.next_chunks
            request.stored_tokens = max(request.stored_tokens, draft.stored_tokens)
            if not draft.planned:
                return None
            if self.storage.log.enabled:
                describe_stores(draft.planned, request.chain.identity, tokens, self.layout.groups)
            self._version += 1
            return StoreJob(
                self._jobs.open(JobKind.STORE, request, draft.planned), tuple(draft.transfers)
            )

    def plan_upkeep(self) -> JobBatch:
        """Copies, moves and deletions that are due, and uses that must survive a restart.

        Cheap when nothing is due. To be called once a step.
        """
        with self._lock:
            batch = self._upkeep.plan()
            if batch:
                self._version += 1
            self._looked_at_version = self._version
            return batch

    # ---- commit ----

    def commit(self, result: JobResult) -> OpenJob | None:
        """Take one rank's result; if it was the last, change the books and return the job."""
        with self._lock:
            job = self._jobs.get(result.job_id)
            if job is None:
                return None
            self._count_moved(job, result)
            if not job.answer(result):
                return None
            self._jobs.close(job)
            self._version += 1
            self._settlement.settle(job)
            return job

    def adopt(self, page: InventoryPage) -> None:
        """Enter objects that a tier had before this process; the last page opens the tier."""
        with self._lock:
            self._upkeep.adopt(page)
            self._version += 1

    def take_questions(self) -> list[Question]:
        """What lookups want to know of a shared tier, since the last call."""
        if self._asking is None or not self._asking.has_questions:
            return []
        with self._lock:
            return self._asking.take()

    def hear(self, news: SharedNews, now: float) -> None:
        """Take note of what a shared tier's keeper has found out."""
        with self._lock:
            self._upkeep.hear(news)
            if self._asking is not None:
                self._asking.answer(news.answered, news.found, now)
            self._version += 1

    def is_held(self, key: bytes) -> bool:
        """Whether some copy of an object is promised or in motion. May be called by any thread."""
        with self._lock:
            return self.storage.is_held(ObjectKey(key))

    def report_health(self, rank: int, health: Sequence[TierHealth]) -> None:
        """Take note of what the tiers of a rank can do now, by place."""
        with self._lock:
            self._upkeep.report_health(rank, health)
            self._version += 1

    def end_request(self, request: OpalRequest) -> None:
        """Give back what the request was promised and record its use of the chain."""
        with self._lock:
            self._leases.release(request)
            keys = self.coordinator.chain_keys(request.chain, request.joins)
            self._end_windows(request, keys)
            self.storage.touch(keys, request.used)
            self._upkeep.used(keys)
            if request.hints is not NO_HINTS:
                self.storage.take_hints(keys, request.hints, self._clock())

    def count_admission(self, hit_tokens: dict[str, int], queried_tokens: int) -> None:
        """Count a lookup once, when the host has acted on it."""
        with self._lock:
            self._counters.add_admission(self.tier_names, hit_tokens, queried_tokens)

    def reset(self) -> None:
        """Empty every tier. Loads in motion finish; stores in motion end in nothing."""
        with self._lock:
            self._leases.release_all()
            self.storage.clear()
            self._placement.clear()
            self._upkeep.wipe()
            self._version += 1

    # ---- reports ----

    @property
    def open_job_count(self) -> int:
        """Jobs that some rank has not answered."""
        return len(self._jobs)

    @property
    def wants_upkeep(self) -> bool:
        """Whether `plan_upkeep` has something to do."""
        # What could not be done is not tried again before something has changed.
        return self._version != self._looked_at_version and self._upkeep.is_due

    @property
    def lease_count(self) -> int:
        """Requests that hold a promise."""
        return len(self._leases)

    def take_events(self) -> list[KVCEvent]:
        """Events since the last call, in order."""
        with self._lock:
            return self.storage.log.take()

    def take_counters(self) -> dict[str, dict[str, int | float]]:
        """Counter increments since the last call, and the evictions and use of every tier."""
        with self._lock:
            taken = self._counters.take()
            evictions = self.storage.take_evictions()
            if evictions:
                taken["evictions"] = evictions
            return taken

    def check(self) -> None:
        """Audit every book.

        Raises:
            AssertionError: Two of them disagree.
        """
        with self._lock:
            for tier in self.storage.tiers:
                audit_tier(tier)
            if self.storage.ties is not None:
                self.storage.ties.check()
            promised = [segment.record for segment in self._leases.segments()]
            copies = audit_promises(self.storage.tiers, promised, self._jobs)
            self._placement.check(copies)

    # ---- inside; the lock is held ----

    def _count_moved(self, job: OpenJob, result: JobResult) -> None:
        counters = self._counters
        if job.kind is JobKind.LOAD:
            counts, seconds_spent = counters.load_bytes, counters.load_seconds
        else:
            counts, seconds_spent = counters.store_bytes, counters.store_seconds
        for place, (moved_bytes, seconds) in result.moved.items():
            add(counts, self.tier_names[place], moved_bytes)
            add(seconds_spent, self.tier_names[place], seconds)

    def _expire_objects(self, now: float) -> None:
        if now < self._next_expiry:
            return
        self._next_expiry = now + _EXPIRY_SECONDS
        self._version += bool(self.storage.expire(now))

    def _end_windows(self, request: OpalRequest, keys: Sequence[ObjectKey]) -> None:
        """Of what a request stored of windows, let go first what is behind it and nobody used."""
        if self.layout.is_plain:
            return
        needed = set(keys)
        for key in request.used:
            if key not in needed and not self.storage.groups[group_of(key)].is_chain:
                self.storage.discourage_unused(key)
