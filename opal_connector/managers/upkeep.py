"""What the books do between requests: copies, moves, deletions, and news from the workers."""

from collections.abc import Callable, Sequence

from opal_connector.managers.jobs import JobKind, JobTable, PlannedDrop, PlannedWipe
from opal_connector.managers.placement import Placement
from opal_connector.managers.quotas import NOBODY
from opal_connector.managers.records import ObjectKey
from opal_connector.managers.shared_space import SharedSpace
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.transfers import (
    CopyJob,
    DropJob,
    InventoryPage,
    JobBatch,
    ObjectName,
    SharedNews,
    TierHealth,
)

_DROPS_AT_ONCE = 256  # names in one step: bounds what crosses to the workers
_TOUCHES_AT_ONCE = 1024


class Upkeep:
    """Collects what is due.

    Mutable state: per tier of files the uses not yet reported, what the ranks hold, what is not
    theirs and how they are; guarded by the lock of `OpalKVCacheManager`. `owner_of` knows who
    pays for what was there before; otherwise nobody does.
    """

    def __init__(
        self,
        storage: OpalStorageManager,
        placement: Placement,
        jobs: JobTable,
        ranks: int,
        owner_of: Callable[[ObjectName], str] = lambda _: NOBODY,
    ) -> None:
        self._owner_of = owner_of
        self._storage = storage
        self._placement = placement
        self._jobs = jobs
        self._ranks = ranks
        self._touched: dict[int, list[ObjectKey]] = {
            place: [] for place, tier in enumerate(storage.tiers) if tier.space.frees_later
        }
        self._opening: dict[int, dict[ObjectName, int]] = {}
        self._ended = dict.fromkeys(self._touched, 0)
        self._borrowers = dict.fromkeys(self._touched, 0)
        self._foreign_bytes = dict.fromkeys(self._touched, 0)
        self._health: dict[int, dict[int, TierHealth]] = {place: {} for place in self._touched}
        for place in self._touched:
            storage.tiers[place].health = TierHealth.OPENING

    @property
    def is_due(self) -> bool:
        """Whether `plan` has something to do."""
        return (
            any(self._touched.values())
            or any(
                (tier.leaving.is_due or tier.leaving.wipe.is_due) and tier.is_readable
                for tier in self._storage.tiers
            )
            or self._placement.wants_upkeep()
        )

    def plan(self) -> JobBatch:
        """The jobs that are due now."""
        planned, transfers = self._placement.draft()
        copies = (
            (CopyJob(self._jobs.open(JobKind.COPY, None, planned), tuple(transfers)),)
            if planned
            else ()
        )
        touches: dict[int, tuple[bytes, ...]] = {}
        for place, keys in self._touched.items():
            if keys:
                touches[place] = tuple(keys[:_TOUCHES_AT_ONCE])
                del keys[:_TOUCHES_AT_ONCE]
        return JobBatch(copies=copies, drops=tuple(self._plan_drops()), touches=touches)

    def used(self, keys: Sequence[ObjectKey]) -> None:
        """A request over these chunks, head first, has ended."""
        if not self._touched:
            return
        self._placement.seen(keys)
        for place, touched in self._touched.items():
            tier = self._storage.tiers[place]
            touched += [key for key in reversed(keys) if tier.knows(key)]

    def wipe(self) -> None:
        """Have the directories of all tiers of files emptied."""
        for place, touched in self._touched.items():
            self._storage.tiers[place].leaving.wipe.want()
            touched.clear()

    def adopt(self, page: InventoryPage) -> None:
        """Enter what every rank has that stores; what only some have is deleted where it is."""
        tier = self._storage.tiers[page.tier]
        if self._ranks == 1:
            for name in page.names:
                tier.adopt(name, self._owner_of(name))
        else:
            seen = self._opening.setdefault(page.tier, {})
            for name in page.names:
                # A rank may have to begin again after an error, and then names them twice.
                seen[name] = seen.get(name, 0) | 1 << page.rank
        if not page.is_last:
            return
        self._ended[page.tier] += 1
        self._borrowers[page.tier] += page.is_borrowed
        found_bytes = max(self._foreign_bytes[page.tier], page.foreign_bytes)
        self._foreign_bytes[page.tier] = found_bytes
        if self._ended[page.tier] < self._ranks:
            return
        tier.space.shrink(found_bytes)  # once: these books are those of any one of the ranks
        storing_ranks = self._ranks - self._borrowers[page.tier]
        for name, ranks in self._opening.pop(page.tier, {}).items():
            if ranks.bit_count() == storing_ranks:
                tier.adopt(name, self._owner_of(name))
            else:
                tier.discard(name)
        self._settle_health(page.tier)

    def hear(self, news: SharedNews) -> None:
        """Enter what others wrote to a shared tier, take out what they removed, write more."""
        tier = self._storage.tiers[news.tier]
        for name in news.found:
            tier.adopt(name, self._owner_of(name))
        for key in news.gone:
            tier.forget(ObjectKey(key))
        if news.is_grant and isinstance(tier.space, SharedSpace):
            tier.space.grant(news.granted_bytes, was_crowded=news.was_crowded)

    def report_health(self, rank: int, health: Sequence[TierHealth]) -> None:
        """Take note of how a rank's tiers are, by place."""
        for place, ranks in self._health.items():
            ranks[rank] = health[place]
            self._settle_health(place)

    def _settle_health(self, place: int) -> None:
        """A tier is as well as its worst rank."""
        found = set(self._health[place].values())
        tier = self._storage.tiers[place]
        before = tier.health
        if TierHealth.SUSPENDED in found:
            tier.health = TierHealth.SUSPENDED
        elif self._ended[place] < self._ranks:
            tier.health = TierHealth.OPENING
        elif TierHealth.NO_SPACE in found:
            tier.health = TierHealth.NO_SPACE
        else:
            tier.health = TierHealth.OK
        if tier.health is not before:
            tier.leaving.retry()

    def _plan_drops(self) -> list[DropJob]:
        jobs: list[DropJob] = []
        for place in self._touched:
            leaving = self._storage.tiers[place].leaving
            if not self._storage.tiers[place].is_readable:
                continue  # nobody could delete anything there now
            is_wipe = leaving.wipe.take_due()
            records = leaving.take_all() if is_wipe else leaving.take_due(_DROPS_AT_ONCE)
            if not (records or is_wipe):
                continue
            planned: list[PlannedDrop | PlannedWipe] = [
                PlannedDrop(tier=place, record=record) for record in records
            ]
            planned += [PlannedWipe(tier=place)] if is_wipe else []
            names = () if is_wipe else tuple(map(self._storage.name_of, records))
            job_id = self._jobs.open(JobKind.DROP, None, planned)
            jobs.append(DropJob(job_id, place, names, is_wipe=is_wipe, object_count=len(planned)))
        return jobs
