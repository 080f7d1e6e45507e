"""The ordered tiers as one: where an object is read from, where a new one goes."""

from collections.abc import Container, Iterator, Sequence

from opal_connector.events import EventLog
from opal_connector.keys import AttentionLayout
from opal_connector.managers.hints import RequestHints
from opal_connector.managers.records import (
    PLAIN_GROUPS,
    ObjectGroup,
    ObjectKey,
    ObjectRecord,
    ObjectSpec,
)
from opal_connector.managers.refusals import Refusal
from opal_connector.managers.storage_backend import OpalStorageBackend
from opal_connector.managers.ties import Ties
from opal_connector.transfers import ObjectName, TierHealth


class OpalStorageManager:
    """Tiers from fastest to slowest.

    It has no state of its own besides the tiers, the ties between their objects and the event log,
    which the lock of `OpalKVCacheManager` guards.
    """

    def __init__(
        self,
        tiers: Sequence[OpalStorageBackend],
        log: EventLog,
        groups: Sequence[ObjectGroup] = PLAIN_GROUPS,
    ) -> None:
        self.tiers = tuple(tiers)
        self.log = log
        self.groups = tuple(groups)
        self.ties: Ties | None = None
        for tier in self.tiers:
            tier.neighbours = tuple(other for other in self.tiers if other is not tier)

    def __repr__(self) -> str:
        return f"<OpalStorageManager {list(self.tiers)}>"

    def tie(self, layout: AttentionLayout) -> None:
        """Let objects go first that are worth nothing without what has left of other groups.

        Not where others store too: what is not in these books may be there.
        """
        if any(tier.space.is_shared for tier in self.tiers):
            return
        self.ties = Ties(layout, [(tier.index, tier.order) for tier in self.tiers])
        for tier in self.tiers:
            tier.index.watcher = self.ties

    @property
    def is_opening(self) -> bool:
        """Whether some tier does not know yet what it holds."""
        return any(tier.health is TierHealth.OPENING for tier in self.tiers)

    def members(self, group: int) -> int:
        """Rows for every block of an object of that group."""
        return self.groups[group].members

    def name_of(self, record: ObjectRecord) -> ObjectName:
        """The full name of an object."""
        members = self.groups[record.group].members
        return ObjectName(record.group, record.parent_hash, record.run, members)

    def file_name(self, record: ObjectRecord, place: int) -> ObjectName | None:
        """What a tier of files has to know of an object; rows of memory need no name."""
        return self.name_of(record) if self.tiers[place].space.frees_later else None

    def is_coming(self, key: ObjectKey) -> bool:
        """Whether an object is being written or loaded in some tier, or readable there."""
        return any(tier.is_readable and tier.knows(key) for tier in self.tiers)

    def find(self, key: ObjectKey) -> tuple[int, ObjectRecord] | None:
        """The fastest readable copy: the tier's place and the record."""
        for place, tier in enumerate(self.tiers):
            record = tier.get(key)
            if record is not None:
                return place, record
        return None

    def find_run(self, wanted: bytes, group: int) -> tuple[int, ObjectRecord | None, int]:
        """The copy that shares most blocks with `wanted`, the fastest tier at a tie."""
        best: tuple[int, ObjectRecord | None, int] = (0, None, 0)
        for place, tier in enumerate(self.tiers):
            record, blocks = tier.longest_run(wanted, group)
            if blocks > best[2]:
                best = (place, record, blocks)
        return best

    def coming_blocks(self, wanted: bytes, group: int) -> int:
        """Blocks of `wanted` that a write in motion will make readable."""
        return max((tier.index.longest_write(wanted, group) for tier in self.tiers), default=0)

    def get_block_mapping(self, keys: Sequence[ObjectKey]) -> list[tuple[str, int, int]]:
        """Runs `(tier, start, end)` of positions in `keys`, from 0 to the first gap.

        Each key counts for the fastest tier that holds it, whatever its neighbours do.
        """
        runs: list[tuple[str, int, int]] = []
        for position, key in enumerate(keys):
            found = self.find(key)
            if found is None:
                break
            name = self.tiers[found[0]].tier
            if runs and runs[-1][0] == name:
                runs[-1] = (name, runs[-1][1], position + 1)
            else:
                runs.append((name, position, position + 1))
        return runs

    def reserve(self, spec: ObjectSpec) -> tuple[int, ObjectRecord] | Refusal:
        """A place for a new object: the first tier that takes it.

        Presence in any tier that can be read comes before fit in the first, so nothing is stored
        twice.
        """
        if any(tier.is_readable and tier.holds(spec) for tier in self.tiers[1:]):
            return Refusal.PRESENT
        refusal = Refusal.FULL
        for place, tier in enumerate(self.tiers):
            outcome = tier.reserve(spec)
            if isinstance(outcome, ObjectRecord):
                return place, outcome
            if outcome is Refusal.PRESENT:
                return outcome
            if place == 0 or outcome is not Refusal.UNAVAILABLE:
                refusal = outcome
        return refusal

    def touch(self, keys: Sequence[ObjectKey], counted: Container[ObjectKey] = ()) -> None:
        """Record one use of a chain in every tier that holds parts of it; see `Departures`."""
        for tier in self.tiers:
            tier.touch(keys, counted)

    def remove(self, key: ObjectKey, *, force: bool = True) -> int:
        """Take an object out of every tier, one DELETE event each; returns how many."""
        return sum(tier.remove(key, force=force) for tier in self.tiers)

    def expire(self, now: float) -> int:
        """Take out what nobody used for too long; returns how many."""
        return sum(tier.expire(now) for tier in self.tiers)

    def take_hints(self, keys: Sequence[ObjectKey], hints: RequestHints, now: float) -> None:
        """Do what a request that has ended says about its chain, wherever parts of it are."""
        for tier in self.tiers:
            here = [key for key in keys if tier.knows(key)]
            if hints.keep_seconds:
                tier.order.keep(here, now + hints.keep_seconds)
            if hints.session == "ends":
                tier.order.discourage(here)
            if hints.ttl is not None:
                for key in here:
                    tier.expiry.limit(key, hints.ttl, now)

    def discourage_unused(self, key: ObjectKey) -> None:
        """Let an object that nobody used since it was stored leave before others."""
        for tier in self.tiers:
            record = tier.index.get(key)
            if record is not None and not record.is_used:
                record.is_passing = True
                tier.order.discourage([key])

    def is_worthless(self, key: ObjectKey) -> bool:
        """Whether no request can use an object as things are; see `Ties`."""
        return self.ties is not None and key in self.ties

    def is_held(self, key: ObjectKey) -> bool:
        """Whether some tier's copy is promised or in motion."""
        records = (tier.index.records.get(key) for tier in self.tiers)
        return any(record is not None and record.is_held for record in records)

    def clear(self) -> None:
        """Empty every tier."""
        for tier in self.tiers:
            tier.index.watcher = None  # all of it goes, in whatever order
            tier.clear()
        if self.ties is not None:
            self.ties.clear()
            for tier in self.tiers:
                tier.index.watcher = self.ties

    def take_evictions(self) -> dict[str, int | float]:
        """Evictions per tier since the last call, of tiers that had any."""
        evictions: dict[str, int | float] = {}
        for tier in self.tiers:
            if tier.eviction_count:
                evictions[tier.tier] = tier.eviction_count
                tier.eviction_count = 0
        return evictions

    def placements(self) -> Iterator[tuple[str, ObjectKey]]:
        """Every readable object of every tier."""
        for tier in self.tiers:
            for key in tier.index.readable_keys():
                yield tier.tier, key
