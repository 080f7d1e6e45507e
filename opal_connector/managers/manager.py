"""`OpalKVCacheManager`: the top of the books. Plans under one lock, commits under the same lock.

Three verbs change state. plan_* decides and promises rows; the caller executes without any lock;
`commit` writes down what really happened, for success and failure alike.
"""

import threading
from collections.abc import Sequence

from opal_connector.events import KVCEvent
from opal_connector.keys import OpalTokenDatabase, RequestIdentity
from opal_connector.managers.coordinator import OpalKVCacheCoordinator
from opal_connector.managers.counters import BookCounters, add
from opal_connector.managers.jobs import JobKind, OpenJob, PlannedObject
from opal_connector.managers.lookups import MISS, WAIT, LookupResult, LookupState
from opal_connector.managers.planning import (
    StoreDraft,
    before_any_load,
    draft_load,
    draft_store,
)
from opal_connector.managers.request import Lease, OpalRequest, block_count
from opal_connector.managers.single_type import Segment
from opal_connector.managers.storage_backend import Refusal
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.transfers import FailureKind, JobResult, LoadJob, StoreJob

LEASE_SECONDS = 60.0
WAIT_SECONDS = 1.0  # how long a lookup may answer "ask again" for what another one moves


_NOT_A_FAULT = frozenset({FailureKind.AFTER_FAILURE, FailureKind.MISSING})


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
        ranks: int = 1,
    ) -> None:
        self.database = database
        self.storage = storage
        self.tier_names = tuple(tier.tier for tier in storage.tiers)
        self._coordinator = coordinator
        self._ranks = ranks
        self._lock = threading.Lock()
        self._version = 0
        self._next_job_id = 0
        self._jobs: dict[int, OpenJob] = {}
        self._leased: dict[int, OpalRequest] = {}  # by identity: an id may come again
        self._counters = BookCounters()

    def __repr__(self) -> str:
        counts = f"{len(self._jobs)} jobs, {len(self._leased)} leases"
        return f"<OpalKVCacheManager {counts}, {self.storage!r}>"

    def new_request(
        self,
        request_id: str,
        identity: RequestIdentity | None = None,
        *,
        lora_name: str | None = None,
    ) -> OpalRequest:
        """The books' view of a request. Nothing is promised yet."""
        return OpalRequest(request_id, self.database.chain(identity), lora_name)

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
            lease = request.lease
            asked = (self._version, computed_blocks, max_blocks)
            if lease is None or lease.asked != asked:
                lease = self._walk(request, asked, now)
                if lease is None:
                    return WAIT
            lease.deadline = now + LEASE_SECONDS
            if not lease.segments:
                return MISS
            return LookupResult(
                LookupState.HIT, block_count(lease.segments), self._tier_tokens(lease.segments)
            )

    def release(self, request: OpalRequest) -> None:
        """End the promise of a lookup that no load will follow."""
        with self._lock:
            self._release(request)

    def expire(self, now: float) -> int:
        """End leases past their deadline; returns how many there were."""
        with self._lock:
            late = [
                request
                for request in self._leased.values()
                if request.lease is not None and request.lease.deadline < now
            ]
            for request in late:
                self._release(request)
            return len(late)

    # ---- plan ----

    def plan_load(self, request: OpalRequest, block_ids: Sequence[int]) -> LoadJob:
        """Turn the leased hit into a job that fills `block_ids`, the blocks behind the computed.

        Destinations that the lease does not cover are named in the job as missing, so that the
        host recomputes them.
        """
        with self._lock:
            lease = request.lease
            draft = draft_load(
                lease.segments if lease is not None else (),
                block_ids,
                self.storage,
                self.database.block_tokens,
            )
            self._release(request)
            self._version += bool(draft.planned)  # whoever else was promised these must wait
            request.waiting_since = None
            for item in draft.planned:
                add(request.hit_tokens, self.tier_names[item.tier], item.tokens)
            for item in reversed(draft.planned):
                self.storage.tiers[item.tier].touch([item.record.key])
            covered = sum(len(transfer.block_ids) for transfer in draft.transfers)
            return LoadJob(
                self._open(JobKind.LOAD, request, draft.planned),
                request.request_id,
                tuple(draft.transfers),
                tuple(block_ids[covered:]),
            )

    def plan_store(
        self,
        request: OpalRequest,
        *,
        full_blocks: int,
        block_ids: Sequence[int],
        include_tail: bool,
        tokens: Sequence[int] = (),
        max_blocks: int | None = None,
    ) -> StoreJob | None:
        """Reserve room for what is computed and not stored: whole chunks, and the tail if asked.

        Args:
            request: Whose chain it is.
            full_blocks: Blocks whose KV is, or will surely be at the end of this step, complete.
            block_ids: The request's paged blocks from its first block on.
            include_tail: Also store whole blocks after the last whole chunk.
            tokens: The request's tokens, for events.
            max_blocks: Store no more than that many blocks now; the rest is dropped this time.

        Returns:
            A job, or None when there is nothing to store.
        """
        full_blocks = min(full_blocks, len(block_ids), len(request.chain.hashes))
        block_tokens = self.database.block_tokens
        with self._lock:
            draft = self._draft_store(request, full_blocks, block_ids, include_tail, max_blocks)
            if draft.drop_reason == Refusal.NO_PARENT and request.next_chunk:
                # What was stored of the head has left since: begin there again.
                request.next_chunk = 0
                draft = self._draft_store(request, full_blocks, block_ids, include_tail, max_blocks)
            if draft.drop_reason is not None:
                add(self._counters.dropped_stores, draft.drop_reason, 1)
            request.drop_reason = draft.drop_reason
            request.next_chunk = draft.next_chunk
            request.stored_tokens = max(request.stored_tokens, draft.stored_blocks * block_tokens)
            if not draft.planned:
                return None
            if self.storage.log.enabled:
                for item in draft.planned:
                    start = item.first_block * block_tokens
                    stop = start + len(item.record.rows) * block_tokens
                    item.token_ids = tuple(tokens[start:stop])
            self._version += 1
            return StoreJob(
                self._open(JobKind.STORE, request, draft.planned), tuple(draft.transfers)
            )

    # ---- commit ----

    def commit(self, result: JobResult) -> OpenJob | None:
        """Take one rank's result; if it was the last, change the books and return the job."""
        with self._lock:
            job = self._jobs.get(result.job_id)
            if job is None:
                return None
            bytes_moved = (
                (self._counters.load_bytes, self._counters.load_seconds)
                if job.kind is JobKind.LOAD
                else (self._counters.store_bytes, self._counters.store_seconds)
            )
            for place, (moved_bytes, seconds) in result.moved.items():
                add(bytes_moved[0], self.tier_names[place], moved_bytes)
                add(bytes_moved[1], self.tier_names[place], seconds)
            if not job.answer(result):
                return None
            del self._jobs[job.job_id]
            self._version += 1
            for position, item in enumerate(job.objects):
                failure = job.failed.get(position)
                if failure is not None:
                    add(self._counters.failures, failure.value, 1)
                if job.kind is JobKind.LOAD:
                    self._end_load(job.request, item, failure)
                else:
                    self._end_store(job.request, item, failure)
            return job

    def end_request(self, request: OpalRequest) -> None:
        """Give back what the request was promised and record its use of the chain."""
        with self._lock:
            self._release(request)
            self.storage.touch(self._coordinator.chain_keys(request.chain.hashes))

    def count_admission(self, hit_tokens: dict[str, int], queried_tokens: int) -> None:
        """Count a lookup once, when the host has acted on it."""
        with self._lock:
            self._counters.add_admission(self.tier_names, hit_tokens, queried_tokens)

    def reset(self) -> None:
        """Empty every tier. Loads in motion finish; stores in motion end in nothing."""
        with self._lock:
            for request in list(self._leased.values()):
                self._release(request)
            self.storage.clear()
            self._version += 1

    # ---- reports ----

    @property
    def open_job_count(self) -> int:
        """Jobs that some rank has not answered."""
        return len(self._jobs)

    @property
    def lease_count(self) -> int:
        """Requests that hold a promise."""
        return len(self._leased)

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
            self.storage.check()
            leases: dict[int, int] = {}
            for request in self._leased.values():
                assert request.lease is not None
                for segment in request.lease.segments:
                    leases[id(segment.record)] = leases.get(id(segment.record), 0) + 1
            for job in self._jobs.values():
                if job.kind is JobKind.LOAD:
                    for item in job.objects:
                        leases[id(item.record)] = leases.get(id(item.record), 0) + 1
            for tier in self.storage.tiers:
                tier.check_leases(leases)

    # ---- inside; the lock is held ----

    def _open(self, kind: JobKind, request: OpalRequest, objects: list[PlannedObject]) -> int:
        self._next_job_id += 1
        self._jobs[self._next_job_id] = OpenJob(
            self._next_job_id, kind, request, objects, self._ranks
        )
        return self._next_job_id

    def _draft_store(
        self,
        request: OpalRequest,
        full_blocks: int,
        block_ids: Sequence[int],
        include_tail: bool,
        max_blocks: int | None,
    ) -> StoreDraft:
        specs = self._coordinator.storable(
            request.chain.hashes,
            first_chunk=request.next_chunk,
            full_blocks=full_blocks,
            include_tail=include_tail,
        )
        return draft_store(
            specs,
            block_ids=block_ids,
            storage=self.storage,
            chunk_blocks=self.database.chunk_blocks,
            next_chunk=request.next_chunk,
            max_blocks=full_blocks if max_blocks is None else max_blocks,
        )

    def _walk(self, request: OpalRequest, asked: tuple[int, int, int], now: float) -> Lease | None:
        """Lease what there is now; None to wait for what another request moves.

        A lease on the same question is continued from its end: what it holds cannot have left.
        """
        _, computed_blocks, max_blocks = asked
        old = request.lease
        kept = old.segments if old is not None and old.still_answers(asked) else ()
        plan = self._coordinator.find_hit(
            request.chain.hashes,
            computed_blocks=computed_blocks + block_count(kept),
            max_blocks=max_blocks,
        )
        found = before_any_load(plan)
        moving = plan.is_waiting or len(found) < len(plan.segments)
        if moving and self._may_wait(request, now):
            self._release(request)
            return None
        for segment in (*kept, *found):
            self.storage.tiers[segment.tier].pin(segment.record)
        self._release(request)
        request.lease = Lease(
            asked=asked, computed_blocks=computed_blocks, segments=(*kept, *found)
        )
        self._leased[id(request)] = request
        return request.lease

    def _may_wait(self, request: OpalRequest, now: float) -> bool:
        if request.waiting_since is None:
            request.waiting_since = now
        return now - request.waiting_since < WAIT_SECONDS

    def _release(self, request: OpalRequest) -> None:
        lease, request.lease = request.lease, None
        if lease is None:
            return
        del self._leased[id(request)]
        for segment in lease.segments:
            self.storage.tiers[segment.tier].unpin(segment.record)

    def _tier_tokens(self, segments: Sequence[Segment]) -> dict[str, int]:
        tokens: dict[str, int] = {}
        for segment in segments:
            add(
                tokens,
                self.tier_names[segment.tier],
                segment.block_count * self.database.block_tokens,
            )
        return tokens

    def _end_load(
        self, request: OpalRequest, item: PlannedObject, failure: FailureKind | None
    ) -> None:
        tier = self.storage.tiers[item.tier]
        if failure is not None:
            add(request.hit_tokens, tier.tier, -item.tokens)
            if failure not in _NOT_A_FAULT:
                tier.quarantine(item.record)
        tier.unpin(item.record, loading=True)

    def _end_store(
        self, request: OpalRequest, item: PlannedObject, failure: FailureKind | None
    ) -> None:
        tier = self.storage.tiers[item.tier]
        stored = tier.commit(
            item.record,
            stored=failure is None,
            token_ids=item.token_ids,
            lora_name=request.lora_name,
        )
        if not stored and failure is not None:
            # The next plan tries this chunk again; a failed key is never "present".
            chunk = item.first_block // self.database.chunk_blocks
            request.next_chunk = min(request.next_chunk, chunk)
            stored_tokens = item.first_block * self.database.block_tokens
            request.stored_tokens = min(request.stored_tokens, stored_tokens)
