"""What the end of a job changes in the books: the "commit" of plan, execute, commit.

Success and failure take the same way. Called by the manager, under its lock.
"""

from array import array

from opal_connector.events import Copy, Insert, KVCEvent, Move, ObjectFact
from opal_connector.managers.counters import BookCounters, add
from opal_connector.managers.jobs import (
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
        *,
        chunk_blocks: int,
        block_tokens: int,
    ) -> None:
        self._storage = storage
        self._placement = placement
        self._counters = counters
        self._chunk_blocks = chunk_blocks
        self._block_tokens = block_tokens

    def settle(self, job: OpenJob) -> None:
        """Write down what became of every object of a job that all ranks have answered."""
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
            elif item.tokens:
                assert job.request is not None
                self._end_load(job.request, item, failure)
            else:
                assert job.request is not None
                self._end_store(job.request, item, failure)

    def _end_load(
        self, request: OpalRequest, item: PlannedObject, failure: FailureKind | None
    ) -> None:
        tier = self._storage.tiers[item.tier]
        if failure is not None:
            add(request.hit_tokens, tier.tier, -item.tokens)
            if failure not in _NOT_A_FAULT:
                tier.quarantine(item.record)
        tier.unpin(item.record, loading=True)

    def _end_store(
        self, request: OpalRequest, item: PlannedObject, failure: FailureKind | None
    ) -> None:
        tier = self._storage.tiers[item.tier]

        if item.token_ids:  # for the copies that follow, too
            item.record.tokens = array("I", item.token_ids).tobytes()
            item.record.lora_name = request.lora_name
            item.record.extra_keys = item.extra_keys

        def announce(fact: ObjectFact) -> KVCEvent:
            return Insert(fact, tier.tier, item.token_ids, request.lora_name, item.extra_keys)

        tier.space.end_write(len(item.record.rows))
        stored = tier.commit(item.record, stored=failure is None, announce=announce)
        if stored:
            self._placement.offer(item.record.key, item.tier)
        elif failure is not None:
            # The next plan tries this chunk again; a failed key is never "present".
            chunk = item.first_block // self._chunk_blocks
            request.next_chunk = min(request.next_chunk, chunk)
            stored_tokens = item.first_block * self._block_tokens
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

        target.space.end_write(len(item.target.rows))
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
