"""What the end of a job changes in the books: the "commit" of plan, execute, commit.

Success and failure take the same way. Called by the manager, under its lock.
"""

from array import array

from opal_connector.events import Copy, Insert, KVCEvent, Move, ObjectFact
from opal_connector.managers.coordinator import OpalKVCacheCoordinator
from opal_connector.managers.counters import BookCounters, add
from opal_connector.managers.jobs import (
    JobKind,
    OpenJob,
    PlannedCopy,
    PlannedDrop,
    PlannedObject,
    PlannedWipe,
)
from opal_connector.managers.placement import Placement
from opal_connector.managers.request import OpalRequest
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.transfers import FailureKind

# The object is as good as before: nobody found anything wrong with its bytes.
_NOT_A_FAULT = frozenset(
    {
        FailureKind.AFTER_FAILURE,
        FailureKind.MISSING,
        FailureKind.TIMEOUT,
        FailureKind.SUSPENDED,
        FailureKind.DROPPED,
    }
)
# A copy could not read what it was to copy.
_SOURCE_FAULTS = frozenset({FailureKind.CHECKSUM, FailureKind.GONE, FailureKind.UNREADABLE})


class Settlement:
    """Ends the objects of jobs. Holds no state of its own."""

    def __init__(
        self,
        storage: OpalStorageManager,
        placement: Placement,
        counters: BookCounters,
        coordinator: OpalKVCacheCoordinator,
    ) -> None:
        self._storage = storage
        self._placement = placement
        self._counters = counters
        self._managers = coordinator.managers
        self._keeps_parts = coordinator.layout.is_plain

    def settle(self, job: OpenJob) -> None:
        """Write down what became of every object of a job that all ranks have answered.

        A load that failed in part has brought its beginning, where all that counts is a prefix;
        elsewhere nothing, because the request is computed as a whole.
        """
        is_lost = bool(job.failed) and not self._keeps_parts
        if is_lost and job.kind is JobKind.LOAD and job.request is not None:
            job.request.failed_loads += 1
        for position, item in enumerate(job.objects):
            if item is None:
                continue
            failure = job.failed.get(position)
            if failure is not None:
                add(self._counters.failures, failure.value, 1)
            if isinstance(item, PlannedCopy):
                self._end_copy(item, failure)
            elif isinstance(item, PlannedDrop):
                self._end_drop(item, failure)
            elif isinstance(item, PlannedWipe):
                self._storage.tiers[item.tier].leaving.wipe.end(is_done=failure is None)
            elif job.kind is JobKind.LOAD:
                if job.request is not None and item.tokens and (is_lost or failure is not None):
                    tier = self._storage.tiers[item.tier].tier
                    add(job.request.hit_tokens, tier, -item.tokens)
                self._end_load(item, failure)
            else:
                self._end_store(job.request, item, failure)

    def _end_load(self, item: PlannedObject, failure: FailureKind | None) -> None:
        tier = self._storage.tiers[item.tier]
        if failure is not None and failure not in _NOT_A_FAULT:
            tier.quarantine(item.record)
        tier.unpin(item.record, loading=True)

    def _end_store(
        self, request: OpalRequest | None, item: PlannedObject, failure: FailureKind | None
    ) -> None:
        """End one write. A host that has no requests plans again by itself."""
        tier = self._storage.tiers[item.tier]
        lora_name = request.lora_name if request is not None else None

        if item.token_ids:  # for the copies that follow, too
            item.record.tokens = array("I", item.token_ids).tobytes()
            item.record.lora_name = lora_name
            item.record.extra_keys = item.extra_keys

        def announce(fact: ObjectFact) -> KVCEvent:
            return Insert(fact, tier.tier, item.token_ids, lora_name, item.extra_keys)

        tier.space.end_write(item.record.size_bytes)
        stored = tier.commit(item.record, stored=failure is None, announce=announce)
        if stored:
            self._placement.offer(item.record.key, item.tier)
        elif failure is not None and request is not None:
            # The next plan tries this chunk again; a failed key is never "present".
            group = item.record.group
            manager = self._managers[group]
            chunk = item.first_block // manager.chunk_blocks
            request.next_chunks[group] = min(request.next_chunks[group], chunk)
            if manager.is_chain:
                stored_tokens = item.first_block * manager.attention.block_tokens
                request.stored_tokens = min(request.stored_tokens, stored_tokens)

    def _end_copy(self, item: PlannedCopy, failure: FailureKind | None) -> None:
        source, target = (
            self._storage.tiers[item.source_tier],
            self._storage.tiers[item.target_tier],
        )
        self._placement.end_copy(item)
        if failure in _SOURCE_FAULTS and item.source is not None:
            source.quarantine(item.source)  # what cannot be read cannot be copied
        is_moving = (
            item.is_move and item.source is not None and source.index.is_current(item.source)
        )

        def announce(fact: ObjectFact) -> KVCEvent:
            # A copy that waits for its parent is announced later, and the source stays until then.
            record = item.target
            said = record.token_ids, record.lora_name, record.extra_keys
            if not is_moving or item.source is None:
                return Copy(fact, source.tier, target.tier, *said)
            shared_blocks = source.index.shared_without(item.source)
            return Move(fact, source.tier, target.tier, shared_blocks, *said)

        target.space.end_write(item.target.size_bytes)
        stored = target.commit(item.target, stored=failure is None, announce=announce)
        has_moved = is_moving and stored and item.target.is_readable
        is_moving = False
        if item.source is None:
            return
        source.unpin(item.source)
        if has_moved:
            source.move_out(item.source)
        elif stored:
            self._placement.offer(item.target.key, item.target_tier)

    def _end_drop(self, item: PlannedDrop, failure: FailureKind | None) -> None:
        self._storage.tiers[item.tier].leaving.end_drop(item.record, is_gone=failure is None)
