"""Which objects go to other tiers besides the one that they were stored in, and when.

A tier that is written through gets a copy of what the faster ones take, soon and in the
background; it makes their evictions free. A tier that is demoted to gets what a faster one is
about to give up. What is read from a slower tier is kept in the first one, if there is room, and
the copy below stays.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

from opal_connector.managers.admission import Admission
from opal_connector.managers.counters import BookCounters, add
from opal_connector.managers.jobs import PlannedCopy
from opal_connector.managers.records import ObjectKey, ObjectRecord
from opal_connector.managers.refusals import Refusal
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.transfers import ObjectCopy

_QUEUE_OBJECTS = 16384  # beyond it the oldest wish is forgotten, and only a demotion can follow
_FLIGHT_BYTES = 256 << 20  # of copies to one tier at a time
_FLIGHT_OBJECTS = 64
_LOOKS_AT_ONCE = 128  # bounds the time of one step
_RETRY = frozenset({Refusal.FULL, Refusal.LEAVING, Refusal.UNAVAILABLE})


class TierRules(msgspec.Struct, frozen=True):
    """How one tier gets its objects: `through`, `demote`, or `off` (only what others refuse)."""

    write: str = "through"
    admission: str = "adaptive"


class Placement:
    """Decides on copies between tiers.

    Mutable state: per target tier the queue of wishes and what is in flight, per source tier the
    bytes that are moving out; guarded by the lock of `OpalKVCacheManager`.
    """

    def __init__(
        self, storage: OpalStorageManager, rules: Sequence[TierRules], counters: BookCounters
    ) -> None:
        self._storage = storage
        self._rules = tuple(rules)
        self._counters = counters
        self._queues: list[deque[ObjectKey]] = [deque() for _ in self._rules]
        self._flight_bytes = [0] * len(self._rules)
        self._flight_objects = [0] * len(self._rules)
        self._moving_bytes = [0] * len(self._rules)
        self.admissions = [
            Admission(tier, is_adaptive=rule.admission == "adaptive", faster=storage.tiers[:place])
            for place, (tier, rule) in enumerate(zip(storage.tiers, self._rules, strict=True))
        ]

    def offer(self, key: ObjectKey, place: int) -> None:
        """An object is readable, or will be with its parent, in the tier at `place`."""
        for target in range(place + 1, len(self._rules)):
            if self._rules[target].write != "through":
                continue
            if self._storage.tiers[target].knows(key) or not self.admissions[target].admits(key):
                continue
            queue = self._queues[target]
            if len(queue) == _QUEUE_OBJECTS:
                queue.popleft()
                add(self._counters.dropped_stores, "backlog", 1)
            queue.append(key)

    def seen(self, keys: Sequence[ObjectKey]) -> None:
        """A request that has these chunks has ended: some may have become worth a slower tier."""
        for target, admission in enumerate(self.admissions):
            if target == 0 or not admission.is_adaptive:
                continue
            for key in admission.count_sight(keys):
                found = self._storage.find(key)
                if found is not None and found[0] < target:
                    self.offer(key, found[0])

    def wants_upkeep(self) -> bool:
        """Whether `draft` may find something to do."""
        if any(self._queues):
            return True
        return any(tier.levels.is_due for tier in self._storage.tiers)

    def draft(self) -> tuple[list[PlannedCopy], list[ObjectCopy]]:
        """Copies to begin now, as far as what is in flight allows."""
        planned: list[PlannedCopy] = []
        for target in range(1, len(self._rules)):
            self._draft_queue(target, planned)
        for place in range(len(self._rules)):
            self._draft_demotions(place, planned)
        transfers = [
            ObjectCopy(
                self._storage.name_of(item.target),
                item.source_tier,
                item.source.rows if item.source is not None else (),
                item.target_tier,
                item.target.rows,
            )
            for item in planned
        ]
        return planned, transfers

    def end_copy(self, item: PlannedCopy) -> None:
        """A copy has ended, well or not."""
        if item.source is not None:
            self._flight_bytes[item.target_tier] -= item.target.size_bytes
            self._flight_objects[item.target_tier] -= 1
            if item.is_move:
                self._moving_bytes[item.source_tier] -= item.source.size_bytes

    def clear(self) -> None:
        """Forget all wishes; what is in flight ends by itself."""
        for queue in self._queues:
            queue.clear()

    def check(self, copies: Sequence[PlannedCopy]) -> None:
        """Raise AssertionError if what is in flight is not `copies`."""
        for target in range(len(self._rules)):
            sizes = [
                item.target.size_bytes
                for item in copies
                if item.target_tier == target and item.source is not None
            ]
            assert self._flight_bytes[target] == sum(sizes), "bytes in flight differ"
            assert self._flight_objects[target] == len(sizes), "objects in flight differ"
            moving = [
                item.source.size_bytes
                for item in copies
                if item.is_move and item.source is not None and item.source_tier == target
            ]
            assert self._moving_bytes[target] == sum(moving), "bytes moving out differ"

    # ---- inside ----

    def _draft_queue(self, target: int, planned: list[PlannedCopy]) -> None:
        queue = self._queues[target]
        for _ in range(min(len(queue), _LOOKS_AT_ONCE)):
            if not self._has_room_in_flight(target):
                return
            key = queue.popleft()
            found = self._storage.find(key)
            if found is None:
                if any(tier.knows(key) for tier in self._storage.tiers[:target]):
                    queue.append(key)  # it waits for its parent, or its tier for better times
                continue
            if found[0] >= target:
                continue
            outcome = self._plan(found[0], found[1], target, planned, is_move=False)
            if outcome in _RETRY and not _is_unworthy(found[1], outcome):
                queue.appendleft(key)
                return

    def _draft_demotions(self, place: int, planned: list[PlannedCopy]) -> None:
        """Give up what a tier has too much of: what is below already at once, the rest by MOVE."""
        tier = self._storage.tiers[place]
        excess_bytes = tier.levels.take_excess_bytes()
        if excess_bytes <= 0 or not tier.is_readable:
            return
        target = self._demotion_target(place)
        if target is None:
            tier.evict_ahead(excess_bytes)
            return
        # What is on its way out makes room when it has left: no other object has to go for it.
        excess_bytes -= self._moving_bytes[place]
        for record in tier.order.next_victims(_FLIGHT_OBJECTS):
            if excess_bytes <= 0:
                return
            excess_bytes -= record.size_bytes
            is_below = any(below.contains(record.key) for below in self._storage.tiers[place + 1 :])
            if is_below or self._storage.is_worthless(record.key):
                tier.eviction_count += tier.remove(record.key)
            elif not self._has_room_in_flight(target):
                return
            else:
                outcome = self._plan(place, record, target, planned, is_move=True)
                if outcome is not None and (outcome not in _RETRY or _is_unworthy(record, outcome)):
                    tier.eviction_count += tier.remove(record.key)  # nobody below takes it

    def _demotion_target(self, place: int) -> int | None:
        for target in range(place + 1, len(self._rules)):
            if self._rules[target].write == "demote" and self._storage.tiers[target].is_readable:
                return target
        return None

    def _has_room_in_flight(self, target: int) -> bool:
        return (
            self._flight_bytes[target] < _FLIGHT_BYTES
            and self._flight_objects[target] < _FLIGHT_OBJECTS
        )

    def _plan(
        self,
        place: int,
        source: ObjectRecord,
        target: int,
        planned: list[PlannedCopy],
        *,
        is_move: bool,
    ) -> Refusal | None:
        outcome = self._storage.tiers[target].reserve(source.as_spec())
        if isinstance(outcome, Refusal):
            return outcome
        outcome.describe_as(source)
        self._storage.tiers[place].pin(source)
        self._flight_bytes[target] += outcome.size_bytes
        self._flight_objects[target] += 1
        self._moving_bytes[place] += source.size_bytes if is_move else 0
        planned.append(
            PlannedCopy(
                source_tier=place,
                source=source,
                target_tier=target,
                target=outcome,
                is_move=is_move,
            )
        )
        return None


def _is_unworthy(record: ObjectRecord, outcome: Refusal | None) -> bool:
    """Whether a full tier will make no room for this one: others must not wait behind it."""
    return record.is_passing and outcome is Refusal.FULL
