"""Stand-ins that tests share: contents that follow from names, tiers with faults, small books."""

import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256, shake_128

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from opal_connector.events import Copy, Delete, EventLog, Insert, KVCEvent, Move, ObjectFact
from opal_connector.eviction import LRUPolicy
from opal_connector.keys import AttentionGroup, OpalTokenDatabase, plain_layout
from opal_connector.managers import (
    FullAttentionManager,
    OpalKVCacheManager,
    OpalRequest,
    OpalStorageBackend,
    OpalStorageManager,
    TierPool,
    Unitary,
    one_table,
)
from opal_connector.managers.watermarks import TierLimits
from opal_connector.tiers import PagedBlocks, TierStore
from opal_connector.transfers import JobResult, LoadJob, ObjectTransfer, StoreJob

BLOCK_TOKENS = 2
ROW_BYTES = 24
COMPUTED_IDS = 1 << 20  # paged blocks of what the host has computed, see `plan_load`
Row = NDArray[np.uint8]


def heed_interrupts() -> None:
    """For `preexec_fn`: a test run that was started in the background ignores SIGINT for all."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def stamp(number: int) -> bytes:
    """A block hash for tests that need names and no tokens."""
    return sha256(number.to_bytes(4, "little")).digest()


def content(block_hash: bytes, rank: int = 0, row_bytes: int = ROW_BYTES) -> Row:
    """The byte oracle: what the KV block of that hash holds on that rank."""
    digest = shake_128(bytes([rank]) + block_hash).digest(row_bytes)
    return np.frombuffer(digest, dtype=np.uint8)


def transfer(
    tier_rows: Sequence[int], block_ids: Sequence[int], stamps: Sequence[bytes], tier: int = 0
) -> ObjectTransfer:
    """One object's part of a job."""
    return ObjectTransfer(tier, 0, tuple(tier_rows), tuple(block_ids), b"".join(stamps))


class FakeClock:
    """Seconds that pass when the test says so."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class FaultyTier(TierStore):
    """A tier that raises what `fault` gives for a transfer, and otherwise does what `inner` does.

    Mutable state: the calls it saw.
    """

    def __init__(
        self, inner: TierStore, fault: Callable[[ObjectTransfer], Exception | None]
    ) -> None:
        self.name = inner.name
        self.inner = inner
        self.fault = fault
        self.calls: list[tuple[str, ObjectTransfer]] = []

    @override
    def write(self, item: ObjectTransfer, paged: PagedBlocks, after: object) -> int:
        self.calls.append(("write", item))
        self._raise(item)
        return self.inner.write(item, paged, after)

    @override
    def read(self, item: ObjectTransfer, paged: PagedBlocks, after: object) -> int:
        self.calls.append(("read", item))
        self._raise(item)
        return self.inner.read(item, paged, after)

    def _raise(self, item: ObjectTransfer) -> None:
        error = self.fault(item)
        if error is not None:
            raise error


class GatedTier(TierStore):
    """A tier whose calls stop until the test opens the gate of their first row.

    Mutable state: the order in which calls began, guarded by `_began`.
    """

    def __init__(self, inner: TierStore) -> None:
        self.name = inner.name
        self.inner = inner
        self.order: list[tuple[str, int]] = []
        self._began = threading.Condition()
        self._gates: dict[int, threading.Event] = {}
        self._all_open = threading.Event()

    def gate(self, row: int) -> threading.Event:
        """The gate of calls whose first row this is; closed until set."""
        with self._began:
            return self._gates.setdefault(row, threading.Event())

    def open_all(self) -> None:
        """Let everything through, now and later."""
        self._all_open.set()
        with self._began:
            for gate in self._gates.values():
                gate.set()

    def wait_until_begun(self, count: int, timeout_seconds: float = 10.0) -> None:
        """Block until so many calls have begun."""
        with self._began:
            assert self._began.wait_for(lambda: len(self.order) >= count, timeout_seconds)

    @override
    def write(self, item: ObjectTransfer, paged: PagedBlocks, after: object) -> int:
        self._pass("write", item)
        return self.inner.write(item, paged, after)

    @override
    def read(self, item: ObjectTransfer, paged: PagedBlocks, after: object) -> int:
        self._pass("read", item)
        return self.inner.read(item, paged, after)

    def _pass(self, call: str, item: ObjectTransfer) -> None:
        gate = self.gate(item.tier_rows[0])
        with self._began:
            self.order.append((call, item.tier_rows[0]))
            self._began.notify_all()
        if not self._all_open.is_set():
            assert gate.wait(30), "nobody opened the gate"


def make_manager(
    *,
    rows: int | Sequence[int],
    chunk_blocks: int = 2,
    ranks: int = 1,
    tiers: Sequence[str] = ("CPUMemory",),
    save_unfull_chunk: bool = True,
    eviction_threshold: float = 1.0,
) -> OpalKVCacheManager:
    """Books of one group over tiers of so many rows each, with the event log on."""
    log = EventLog(enabled=True)
    row_counts = [rows] * len(tiers) if isinstance(rows, int) else list(rows)
    storage = OpalStorageManager(
        [
            OpalStorageBackend(
                tier=name,
                space=TierPool(capacity_rows=count, row_bytes=ROW_BYTES),
                policy=LRUPolicy(),
                log=log,
                limits=TierLimits(threshold=eviction_threshold),
            )
            for name, count in zip(tiers, row_counts, strict=True)
        ],
        log,
    )
    single_type = FullAttentionManager(
        attention=AttentionGroup(block_tokens=BLOCK_TOKENS),
        chunk_tokens=chunk_blocks * BLOCK_TOKENS,
        save_unfull_chunk=save_unfull_chunk,
    )
    return OpalKVCacheManager(
        database=OpalTokenDatabase(
            block_tokens=BLOCK_TOKENS,
            chunk_blocks=chunk_blocks,
            save_unfull_chunk=save_unfull_chunk,
        ),
        storage=storage,
        coordinator=Unitary(storage, [single_type], plain_layout(BLOCK_TOKENS)),
        ranks=ranks,
    )


def tokens_of(blocks: Iterable[int]) -> list[int]:
    """A token sequence whose equal numbers are equal blocks."""
    return [block * BLOCK_TOKENS + place for block in blocks for place in range(BLOCK_TOKENS)]


def start(manager: OpalKVCacheManager, blocks: Iterable[int], request_id: str = "r") -> OpalRequest:
    """A request over these blocks, with its chain."""
    request = manager.new_request(request_id)
    request.extend(tokens_of(blocks))
    return request


def plan(
    manager: OpalKVCacheManager, request: OpalRequest, *, include_tail: bool = True
) -> StoreJob | None:
    """Plan to store all that the request has; its paged blocks are numbered from 0."""
    count = len(request.chain.hashes)
    return manager.plan_store(
        request, full_blocks=count, tables=one_table(range(count)), include_tail=include_tail
    )


def plan_load(
    manager: OpalKVCacheManager, request: OpalRequest, ids: Iterable[int], computed: int = 0
) -> LoadJob:
    """Plan to fill the paged blocks `ids` with what follows the `computed` blocks.

    Those that are computed lie in blocks of their own, which no load may name.
    """
    wanted = list(ids)
    before = range(COMPUTED_IDS, COMPUTED_IDS + computed)
    tables = one_table([*before, *wanted])
    return manager.plan_load(request, tables, first_block=computed, block_count=len(wanted))


def done(job: StoreJob | LoadJob | None, **failed: object) -> JobResult:
    """A rank's answer that everything went well, or not (`failed`, as JobResult has it)."""
    assert job is not None
    return JobResult(job.job_id, 0, **failed)  # type: ignore[arg-type]


def store(
    manager: OpalKVCacheManager,
    blocks: Iterable[int],
    *,
    include_tail: bool = True,
    request_id: str = "store",
) -> OpalRequest:
    """Store a sequence at once and end its request."""
    request = start(manager, blocks, request_id)
    job = plan(manager, request, include_tail=include_tail)
    if job is not None:
        manager.commit(done(job))
    manager.end_request(request)
    return request


def hit_blocks(manager: OpalKVCacheManager, blocks: Sequence[int], computed: int = 0) -> int:
    """What a lookup of the whole sequence would add now; promises nothing."""
    request = start(manager, blocks, "probe")
    result = manager.lookup(request, computed_blocks=computed, max_blocks=len(blocks), now=1e9)
    manager.release(request)
    return result.block_count


def replay(
    contents: dict[tuple[str, bytes], ObjectFact], events: Iterable[KVCEvent]
) -> dict[tuple[str, bytes], ObjectFact]:
    """Contents by tier and object key after these events; a fact that cannot be is an error."""

    def add(tier: str, fact: ObjectFact) -> None:
        assert name(tier, fact) not in contents, "inserted twice"
        contents[name(tier, fact)] = fact

    def drop(tier: str, fact: ObjectFact) -> None:
        known = contents.pop(name(tier, fact))
        assert known.block_hashes == fact.block_hashes
        assert known.parent_hash == fact.parent_hash

    def name(tier: str, fact: ObjectFact) -> tuple[str, bytes]:
        return tier, fact.chunk_hash + fact.group.to_bytes(2, "little")

    for event in events:
        match event:
            case Insert(fact, tier):
                add(tier, fact)
            case Delete(fact, tier):
                drop(tier, fact)
            case Copy(fact, _, target_tier):
                add(target_tier, fact)
            case Move(fact, source_tier, target_tier):
                add(target_tier, fact)
                drop(source_tier, fact)
    return contents
