"""A host of the books and the bytes, as an engine is one: steps, jobs, ranks, paged blocks.

Every block of every rank has bytes that follow from its hash, so whatever is loaded can be judged.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from fakes import BLOCK_TOKENS, Row, content, plan_load, replay

from opal_connector.config import (
    CPUMemoryConfig,
    DistributedFSConfig,
    EngineTierConfig,
    LocalNVMeConfig,
    OpalConfig,
)
from opal_connector.events import EventLog, ObjectFact
from opal_connector.keys import plain_layout
from opal_connector.managers import (
    OpalKVCacheManager,
    OpalRequest,
    build_manager,
    one_table,
    tier_space,
)
from opal_connector.sharing import link_shared_tier
from opal_connector.tiers import (
    ArrayBlocks,
    CPUMemory,
    LaneSettings,
    Mover,
    allocate_host_rows,
    file_bytes,
    make_keyed_tier,
)
from opal_connector.tiers.engines import UNLIMITED_BYTES
from opal_connector.transfers import JobBatch, JobResult, LoadJob, StoreJob, TierHealth

NAMESPACE = sha256(b"soak").digest()
TIERS = ("CPUMemory", "LocalNVMe", "DistributedFS")
UNTOUCHED, REUSED = 0xA5, 0xEE
T = TypeVar("T")


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of a host is made of. Capacities of files are bytes, of memory blocks."""

    chunk_blocks: int = 1
    ranks: int = 1
    row_bytes: int = 512
    memory_blocks: int = 8
    near_bytes: int = 1 << 20
    far_bytes: int = 1 << 20
    writes: tuple[str, str] = ("through", "through")
    policies: tuple[str, str, str] = ("LRU", "LRU", "LRU")
    timeout_seconds: float = 0.3
    threads: int = 2
    paged_blocks: int = 256
    tiers: tuple[str, ...] = TIERS
    store: EngineTierConfig | None = None  # of the tier that is an engine which others run


class Load(msgspec.Struct, eq=False):
    """A load in motion or ended, and what its blocks must hold."""

    job: LoadJob
    hashes: list[bytes]
    ranks_left: int
    failed: set[int] = set()

    @property
    def block_ids(self) -> list[int]:
        """All paged blocks that it was given."""
        blocks = [block for item in self.job.objects for block in item.block_ids]
        return [*blocks, *self.job.missing_block_ids]


class Host:
    """One engine: its books, a mover per rank, and the paged blocks of every rank.

    Mutable state: the paged blocks that are free, the jobs in motion, the replay of all events,
    and counts of what went wrong. Used by one thread.
    """

    def __init__(self, settings: HostSettings, root: Path) -> None:
        self.settings = settings
        self.root = root
        self.contents: dict[tuple[str, bytes], ObjectFact] = {}
        self.failures: dict[str, int] = {}
        self.wrong_bytes = 0
        self.loads: dict[int, Load] = {}
        self.stores: dict[int, tuple[StoreJob, list[int]]] = {}
        self.load_ended: Callable[[Load], None] = lambda load: None
        self._step_seconds = 0.0
        self.health: list[tuple[TierHealth, ...]] = [()] * settings.ranks
        self.free_blocks = list(range(settings.paged_blocks))
        config = self._config()
        self.manager = self._books(config)
        self.paged = [
            ArrayBlocks(np.full((settings.paged_blocks, settings.row_bytes), REUSED, np.uint8))
            for _ in range(settings.ranks)
        ]
        self.movers = [self._mover(config, rank) for rank in range(settings.ranks)]
        self.shared = link_shared_tier(
            config, self.manager, namespace=NAMESPACE, ranks=settings.ranks
        )
        for mover in self.movers:
            mover.open(NAMESPACE)

    def _config(self) -> OpalConfig:
        settings = self.settings
        memory_policy, near_policy, far_policy = settings.policies
        common = {"timeout_seconds": settings.timeout_seconds, "concurrency": settings.threads}
        return OpalConfig(
            kvc_tiers=settings.tiers,
            CPUMemory=CPUMemoryConfig(eviction_policy=memory_policy),  # type: ignore[arg-type]
            LocalNVMe=LocalNVMeConfig(
                path=str(self.root / "near"),
                capacity_GB=f"{settings.near_bytes}B",
                write=settings.writes[0],  # type: ignore[arg-type]
                eviction_policy=near_policy,  # type: ignore[arg-type]
                **common,  # type: ignore[arg-type]
            ),
            DistributedFS=DistributedFSConfig(
                path=str(self.root / "far"),
                capacity_GB=f"{settings.far_bytes}B",
                write=settings.writes[1],  # type: ignore[arg-type]
                eviction_policy=far_policy,  # type: ignore[arg-type]
                lookup_timeout_seconds=0.01,
                refresh_seconds=0.5,
                **common,  # type: ignore[arg-type]
            ),
            **self._store(),  # type: ignore[arg-type]
        )

    def _store(self) -> dict[str, EngineTierConfig]:
        settings = self.settings
        if settings.store is None:
            return {}
        return {
            settings.tiers[-1]: msgspec.structs.replace(
                settings.store,
                timeout_seconds=settings.timeout_seconds,
                concurrency=settings.threads,
            )
        }

    def _books(self, config: OpalConfig) -> OpalKVCacheManager:
        settings = self.settings
        capacities = {
            "CPUMemory": settings.memory_blocks * settings.row_bytes,
            "LocalNVMe": settings.near_bytes,
            "DistributedFS": settings.far_bytes,
        }
        if settings.store is not None:
            capacities[settings.tiers[-1]] = UNLIMITED_BYTES
        return build_manager(
            config,
            layout=plain_layout(BLOCK_TOKENS),
            chunk_blocks=settings.chunk_blocks,
            spaces={
                name: tier_space(
                    config,
                    name,
                    capacity_bytes=capacities[name],
                    row_bytes=settings.row_bytes,
                    file_bytes=file_bytes,
                )
                for name in settings.tiers
            },
            log=EventLog(enabled=True),
            ranks=settings.ranks,
        )

    def _mover(self, config: OpalConfig, rank: int) -> Mover:
        settings = self.settings
        stores: list[object] = []
        lanes: list[LaneSettings] = []
        for name in settings.tiers:
            file_settings = config.keyed_tier(name)
            if file_settings is None:
                rows = allocate_host_rows(
                    row_count=settings.memory_blocks, row_bytes=settings.row_bytes
                )
                stores.append(CPUMemory(rows))
                lanes.append(LaneSettings(threads=settings.threads))
            else:
                stores.append(
                    make_keyed_tier(name, file_settings, row_bytes=settings.row_bytes, rank=rank)[0]
                )
                lanes.append(
                    LaneSettings(threads=settings.threads, timeout_seconds=settings.timeout_seconds)
                )
        return Mover(stores, self.paged[rank], rank=rank, lanes=lanes)  # type: ignore[arg-type]

    # ---- one step ----

    def step(self, now: float) -> None:
        """What an engine does between two batches of requests."""
        for rank, mover in enumerate(self.movers):
            health = mover.health
            if health != self.health[rank]:
                self.health[rank] = health
                self.timed(
                    lambda rank=rank, health=health: self.manager.report_health(rank, health)
                )
            for job, result in mover.take_results():
                self._book(job, result, rank)
            for page in mover.take_pages():
                self.timed(partial(self.manager.adopt, page))
        if self.shared is not None:
            self.timed(self.shared.poll)
        self.manager.expire(now)
        if self.manager.wants_upkeep:
            self.hand_over(self.timed(self.manager.plan_upkeep))
        self.follow()

    def hand_over(self, batch: JobBatch) -> None:
        """Give jobs of upkeep to every rank."""
        for mover in self.movers:
            for job in (*batch.drops, *batch.copies):
                mover.submit(job)
            mover.touch(batch.touches)

    def follow(self) -> None:
        """Replay what was logged."""
        replay(self.contents, self.manager.take_events())

    def timed(self, call: Callable[[], T]) -> T:
        """Call the books, and count the time to this step."""
        began = time.thread_time()
        try:
            return call()
        finally:
            self._step_seconds += time.thread_time() - began

    def end_step(self) -> float:
        """CPU seconds that the books took since the last call."""
        seconds, self._step_seconds = self._step_seconds, 0.0
        return seconds

    # ---- jobs ----

    def store(
        self, request: OpalRequest, tokens: Sequence[int], *, max_blocks: int | None = None
    ) -> StoreJob | None:
        """Compute what a request has, and begin to store it."""
        hashes = request.chain.hashes
        if len(hashes) > len(self.free_blocks):
            return None
        blocks = [self.free_blocks.pop() for _ in hashes]
        job = self.timed(
            lambda: self.manager.plan_store(
                request,
                full_blocks=len(hashes),
                tables=one_table(blocks),
                include_tail=True,
                tokens=tokens,
                max_blocks=max_blocks,
            )
        )
        if job is None:
            self.give_back(blocks)
            return None
        for rank, paged in enumerate(self.paged):
            for block, block_hash in zip(blocks, hashes, strict=True):
                paged.blocks[block] = self.oracle(block_hash, rank)
        self.stores[job.job_id] = (job, blocks)
        for mover in self.movers:
            mover.submit(job)
        return job

    def load(self, request: OpalRequest, block_count: int, computed: int = 0) -> Load | None:
        """Begin to load what a lookup promised."""
        if block_count > len(self.free_blocks):
            return None
        blocks = [self.free_blocks.pop() for _ in range(block_count)]
        for paged in self.paged:
            paged.blocks[blocks] = UNTOUCHED
        job = self.timed(lambda: plan_load(self.manager, request, blocks, computed))
        load = Load(
            job=job,
            hashes=request.chain.hashes[computed : computed + block_count],
            ranks_left=len(self.movers),
        )
        self.loads[job.job_id] = load
        for mover in self.movers:
            mover.submit(job)
        return load

    def give_back(self, blocks: Sequence[int]) -> None:
        """Let others have these blocks; whoever still reads or writes there is wrong."""
        for paged in self.paged:
            paged.blocks[list(blocks)] = REUSED
        self.free_blocks = [*blocks, *self.free_blocks]

    def oracle(self, block_hash: bytes, rank: int) -> Row:
        """What a block must hold."""
        return content(block_hash, rank, self.settings.row_bytes)

    def _book(self, job: object, result: JobResult, rank: int) -> None:
        if isinstance(job, LoadJob):
            self._judge(self.loads[job.job_id], result, rank)
        for kind in result.failed.values():
            self.failures[kind.value] = self.failures.get(kind.value, 0) + 1
        ended = self.timed(lambda: self.manager.commit(result))
        if ended is None:
            return
        if result.job_id in self.stores:
            _, blocks = self.stores.pop(result.job_id)
            self.give_back(blocks)
        elif result.job_id in self.loads:
            self.load_ended(self.loads.pop(result.job_id))

    def _judge(self, load: Load, result: JobResult, rank: int) -> None:
        """Compare what a rank says that it loaded with what it must be."""
        load.ranks_left -= 1
        load.failed |= set(result.failed)
        self.wrong_bytes += self.wrong_blocks(load, rank, set(result.failed))

    def wrong_blocks(self, load: Load, rank: int, failed: set[int]) -> int:
        """Blocks of a rank that were loaded and hold something else."""
        wrong = 0
        first = 0
        for position, item in enumerate(load.job.objects):
            for block, block_hash in zip(
                item.block_ids, load.hashes[first : first + len(item.block_ids)], strict=True
            ):
                right = self.oracle(block_hash, rank)
                if position not in failed:
                    wrong += not np.array_equal(self.paged[rank].blocks[block], right)
            first += len(item.block_ids)
        return wrong

    # ---- the end ----

    def run_until(
        self, is_done: Callable[[], bool], *, timeout_seconds: float = 30.0, now: float = 0.0
    ) -> None:
        """Take steps until something is so."""
        deadline = time.monotonic() + timeout_seconds
        while not is_done():
            assert time.monotonic() < deadline, f"it never came to that: {self.manager!r}"
            self.step(now)
            threading.Event().wait(0.002)

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is in motion or due."""
        return not (
            self.manager.open_job_count
            or self.manager.wants_upkeep
            or self.manager.storage.is_opening
            or (self.shared is not None and self.shared.is_waiting)
            or any(mover.open_job_count for mover in self.movers)
        )

    def open(self) -> None:
        """Take steps until all tiers are open."""
        self.run_until(lambda: not self.manager.storage.is_opening)

    def close(self, timeout_seconds: float = 4.0) -> float:
        """End everything, as long as the slowest of the processes that it stands for would take."""
        took: list[float] = []
        for mover in self.movers:
            began = time.monotonic()
            mover.close(timeout_seconds)
            took.append(time.monotonic() - began)
        began = time.monotonic()
        if self.shared is not None:
            self.shared.close()
        return max(*took, time.monotonic() - began)
