"""Books over several tiers and their workers, driven by hand: for directed tests."""

from collections.abc import Iterable, Sequence

from fakes import plan_load, replay, start
from tier_world import World, file_bytes, tiered_manager

from opal_connector.events import KVCEvent, ObjectFact
from opal_connector.managers import OpalKVCacheManager, OpalRequest, one_table
from opal_connector.transfers import (
    CopyJob,
    FailureKind,
    JobBatch,
    JobResult,
    LoadJob,
    StoreJob,
)

NEAR, FAR = 1, 2


class Bench:
    """Books and a world of workers, driven as a host drives them.

    Mutable state: the manager, the world, the events so far and what they say is where.
    """

    def __init__(
        self,
        *,
        memory: int = 4,
        files: Sequence[int] = (8, 8),
        writes: Sequence[str] = ("through", "through"),
        ranks: int = 1,
        admission: str = "always",
        threshold: float = 1.0,
    ) -> None:
        self.manager: OpalKVCacheManager = tiered_manager(
            memory_blocks=memory,
            file_tier_bytes=[blocks * file_bytes(1) for blocks in files],
            writes=writes,
            ranks=ranks,
            admission=admission,
            eviction_threshold=threshold,
        )
        self.world = World(ranks)
        self.events: list[KVCEvent] = []
        self.contents: dict[tuple[str, bytes], ObjectFact] = {}
        self.open()

    def open(self) -> None:
        for place in range(1, len(self.manager.storage.tiers)):
            for rank in range(len(self.world.ranks)):
                for page in self.world.pages(place, rank):
                    self.manager.adopt(page)

    def plan(self, blocks: Iterable[int]) -> StoreJob | None:
        """A store that is not executed; its request has ended."""
        request = start(self.manager, blocks)
        count = len(request.chain.hashes)
        job = self.manager.plan_store(
            request, full_blocks=count, tables=one_table(range(count)), include_tail=True
        )
        self.manager.end_request(request)
        return job

    def store(self, blocks: Iterable[int]) -> None:
        self.world.hand_over(self.plan(blocks))
        self.work()

    def look(self, blocks: Iterable[int], now: float = 1e9) -> tuple[OpalRequest, int]:
        request = start(self.manager, blocks)
        result = self.manager.lookup(
            request, computed_blocks=0, max_blocks=len(request.chain.hashes), now=now
        )
        return request, result.block_count

    def load(self, blocks: Iterable[int]) -> LoadJob:
        """A load that is not executed."""
        request, count = self.look(blocks)
        job = plan_load(self.manager, request, range(100, 100 + count))
        self.manager.end_request(request)
        return job

    def upkeep(self) -> JobBatch:
        """The jobs that are due, not executed; nothing if the books say that nothing is."""
        return self.manager.plan_upkeep() if self.manager.wants_upkeep else JobBatch()

    def work(self, fault: FailureKind | None = None) -> None:
        """Execute and book what is handed over."""
        self.world.work(fault)
        while self.world.results:
            self.manager.commit(self.world.results.pop(0))
        taken = self.manager.take_events()
        self.events += taken
        replay(self.contents, taken)
        assert set(self.contents) == set(self.manager.storage.placements())
        self.manager.check()

    def rest(self) -> list[JobBatch]:
        """Do all that is due until nothing is; the batches that it took."""
        batches: list[JobBatch] = []
        for _ in range(50):
            batch = self.upkeep()
            if not batch and self.world.is_idle:
                return batches
            batches.append(batch)
            self.world.hand_over(batch)
            self.work()
        raise AssertionError("the books never come to rest")

    def answer(self, job: StoreJob | LoadJob | CopyJob, kind: FailureKind) -> None:
        """A job that ended in nothing."""
        self.manager.commit(JobResult(job.job_id, 0, dict.fromkeys(range(len(job.objects)), kind)))

    def held(self, place: int) -> int:
        """Readable objects of a tier."""
        return len(self.manager.storage.tiers[place].index.readable_keys())

    def used_blocks(self, place: int) -> float:
        tier = self.manager.storage.tiers[place]
        return tier.used_bytes / tier.space.size_bytes(1)


def kinds(events: Iterable[KVCEvent]) -> list[str]:
    return [type(event).__name__ for event in events]
