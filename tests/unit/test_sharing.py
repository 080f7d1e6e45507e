"""Two instances over one directory: what one stores the other finds, and the limit holds."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_keeper import FakeKeeper
from fakes import make_manager

from opal_connector.config import load_config
from opal_connector.engine import OpalKVCacheEngine
from opal_connector.events import Delete, EventLog, Insert, KVCEvent
from opal_connector.eviction import LRUPolicy
from opal_connector.keys import OpalEngineMetadata
from opal_connector.managers import LookupState, OpalStorageBackend, SharedSpace
from opal_connector.sharing import SharedTierLink, slices
from opal_connector.tiers import ArrayBlocks, Need, SharedDirectory, SharedKeeper
from opal_connector.tiers.shared_directory import Refresh
from opal_connector.transfers import ObjectName, SharedNews

BLOCK_TOKENS, CHUNK_TOKENS, ROW_BYTES = 2, 8, 4096
METADATA = OpalEngineMetadata(
    weights_id="w",
    dtype="f32",
    kv_cache_dtype="f32",
    block_tokens=BLOCK_TOKENS,
    chunk_tokens=CHUNK_TOKENS,
    group_page_bytes=(ROW_BYTES,),
    quantization="none",
    attention_backend="x",
    cpu_isa="x",
    kv_layout="x",
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    context_parallel_size=1,
)


class Instance:
    """An engine with its own paged blocks, of which the first 32 hold something.

    Mutable state: the engine's.
    """

    def __init__(self, directory: Path, *, capacity: str = "4MiB", memory: str = "64KiB") -> None:
        config = load_config(
            {
                "kvc_tiers": ["CPUMemory", "DistributedFS"],
                "chunk_size": CHUNK_TOKENS,
                "CPUMemory": {"capacity_GB": memory},
                "DistributedFS": {
                    "path": str(directory),
                    "capacity_GB": capacity,
                    "refresh_seconds": 0.1,
                    "lookup_timeout_seconds": 5,
                },
            }
        )
        draw = np.random.default_rng(0)
        self.paged = ArrayBlocks(draw.integers(0, 255, (64, ROW_BYTES), dtype=np.uint8))
        self.engine = OpalKVCacheEngine(config, METADATA, self.paged, with_events=True)

    def store(self, tokens: list[int]) -> int:
        return self.engine.store(tokens, range(len(tokens) // BLOCK_TOKENS))

    def wait_for(self, tokens: list[int], expected: int) -> None:
        """Look until a lookup finds so much, within the time of a few refreshes."""
        deadline = time.monotonic() + 20
        while self.engine.lookup(tokens)[0] != expected:
            assert time.monotonic() < deadline, self.engine.lookup(tokens)
            threading.Event().wait(0.05)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Instance, Instance]]:
    instances = Instance(tmp_path), Instance(tmp_path)
    yield instances
    for instance in instances:
        instance.engine.manager.check()
        instance.engine.close()


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_other_instance_finds_chunks_and_tail_at_once(pair: tuple[Instance, Instance]) -> None:
    """The lookup itself asks the directory: whole chunks, and the tail of just this prompt."""
    writer, reader = pair
    text = tokens(0, 28)
    writer.store(text)
    source = writer.paged.blocks[:14].copy()
    reader.paged.blocks[:] = 0

    mask, by_tier = reader.engine.retrieve(text, range(14))

    assert mask.all()
    assert by_tier == {"DistributedFS": 28}
    assert np.array_equal(reader.paged.blocks[:14], source)


def test_prompt_that_parts_inside_a_chunk_hits_after_a_refresh(
    pair: tuple[Instance, Instance],
) -> None:
    """The listing brings what no question could name: the common run of blocks of a sibling."""
    writer, reader = pair
    writer.store(tokens(0, 24))

    reader.wait_for([*tokens(0, 20), *tokens(900, 8)], 20)


def test_question_is_asked_once(pair: tuple[Instance, Instance]) -> None:
    """What is not there is not asked for again at every step."""
    _, reader = pair
    manager = reader.engine.manager
    request = manager.new_request("r")
    request.extend(tokens(0, 24))

    states = []
    questions = []
    for now in (0.0, 0.001, 0.002):
        result = manager.lookup(request, computed_blocks=0, max_blocks=12, now=now)
        states.append(result.state)
        questions += manager.take_questions()
    late = manager.lookup(request, computed_blocks=0, max_blocks=12, now=10.0)

    assert states == [LookupState.WAIT] * 3
    assert len(questions) == 1
    assert late.state is LookupState.MISS, "an answer that does not come is a miss"
    assert manager.lookup(request, computed_blocks=0, max_blocks=12, now=10.1).state is (
        LookupState.MISS
    )
    assert manager.take_questions() == []


def test_limit_holds_for_all_together(tmp_path: Path) -> None:
    """Three instances that write far more than fits never pass the limit, and still store."""
    instances = [Instance(tmp_path, capacity="400KiB") for _ in range(3)]
    limit_bytes = 400 << 10
    most = 0
    for step in range(40):
        instances[step % 3].store(tokens(10_000 * step, 24))
        found = [path.stat().st_blocks * 512 for path in tmp_path.rglob("*.opal")]
        most = max(most, sum(found))
        assert most <= limit_bytes
    stored = tokens(10_000 * 39, 24)
    for instance in instances:
        instance.engine.manager.check()

    assert most > limit_bytes // 2
    assert instances[0].engine.lookup(stored)[0] == 24, "the newest is there for all"
    for instance in instances:
        instance.engine.close()


def test_object_that_another_one_evicted_is_a_miss(pair: tuple[Instance, Instance]) -> None:
    """Nobody breaks over a file that is gone, and the books of the other one follow."""
    writer, reader = pair
    text = tokens(0, 24)
    writer.store(text)
    assert reader.engine.lookup(text)[0] == 24
    for path in Path(writer.engine._tiers[1].directory).rglob("*.opal"):  # type: ignore[union-attr]
        path.unlink()

    mask, _ = reader.engine.retrieve(text, range(12))

    assert not mask.any()
    reader.wait_for(text, 0)
    assert reader.engine.manager.storage.tiers[1].used_bytes == 0


def test_leaving_gives_the_grant_back(tmp_path: Path) -> None:
    """Instances that come and go do not use up the limit."""
    for _ in range(20):
        instance = Instance(tmp_path, capacity="256KiB")
        assert instance.store(tokens(0, 8)) == 8
        instance.engine.close()
    last = Instance(tmp_path, capacity="256KiB")
    last.store(tokens(5000, 24))
    tier = last.engine.manager.storage.tiers[1]

    assert tier.used_bytes == sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*.opal"))
    assert len(tier) == 4
    last.engine.close()


def test_keeper_that_hangs_is_asked_no_more_after_a_while(
    pair: tuple[Instance, Instance],
) -> None:
    """Questions that nobody answers are bounded, and then lookups do not wait for answers."""
    _, reader = pair
    manager = reader.engine.manager
    states = []
    for number in range(200):
        request = manager.new_request(f"r{number}")
        request.extend(tokens(100 * number, 24))
        for now in (float(number), number + 0.9):
            result = manager.lookup(request, computed_blocks=0, max_blocks=12, now=now)
        states.append(result.state)
        manager.end_request(request)

    asked = manager.take_questions()
    assert 0 < len(asked) <= 64
    assert states[-1] is LookupState.MISS
    manager.hear(SharedNews(1, tuple(question.question_id for question in asked)), now=300.0)
    request = manager.new_request("later")
    request.extend(tokens(90_000, 24))
    manager.lookup(request, computed_blocks=0, max_blocks=12, now=300.0)
    assert len(manager.take_questions()) == 1, "answers make room for new questions"


def test_quiet_directory_makes_no_news(tmp_path: Path) -> None:
    """An engine that stands idle polls nothing: what says nothing must not pile up."""
    shared = SharedDirectory(tmp_path, namespace=bytes(32), ranks=1, limit_bytes=1 << 20)
    refreshed = threading.Semaphore(0)
    refresh = shared.refresh

    def counted() -> Refresh:
        refreshed.release()
        return refresh()

    shared.refresh = counted  # type: ignore[method-assign]
    keeper = SharedKeeper(shared, tier=0, refresh_seconds=0.001, is_held=lambda _: False)
    for _ in range(5):
        assert refreshed.acquire(timeout=20)
    keeper.close(unused_bytes=0)

    assert not keeper.has_news


def test_instance_that_stands_idle_hears_what_others_wrote_and_removed(
    pair: tuple[Instance, Instance],
) -> None:
    """No step of its own is needed: else what it says of the tier would stay wrong for ever."""
    writer, idle = pair
    heard: list[KVCEvent] = []
    idle.engine.manager.storage.log.listener = heard.append

    def wait_for_event(kind: type) -> None:
        deadline = time.monotonic() + 20
        while not any(isinstance(event, kind) for event in list(heard)):
            assert time.monotonic() < deadline
            threading.Event().wait(0.02)

    writer.store(tokens(0, 24))
    wait_for_event(Insert)
    writer.engine.clear()
    wait_for_event(Delete)


def test_idle_news_are_written_in_slices() -> None:
    """A request that comes meanwhile waits for one slice, not for a whole directory."""
    names = tuple(ObjectName(0, b"p" * 32, bytes([place]) * 32) for place in range(200))
    news = SharedNews(0, (7,), names, tuple(name.run for name in names), is_grant=True)

    parts = list(slices(news, 64))

    assert [len(part.found) for part in parts] == [64, 64, 64, 8]
    assert sum((part.found for part in parts), ()) == names
    assert sum((part.gone for part in parts), ()) == news.gone
    assert [(part.answered, part.is_grant) for part in parts] == [((7,), True), *[((), False)] * 3]


class Keeper(FakeKeeper):
    """A keeper that grants what is asked for, and notes the needs."""

    def __init__(self) -> None:
        super().__init__()
        self.needs: list[Need] = []

    def renew(self, need: Need) -> None:
        self.needs.append(need)
        self.news.append(SharedNews(0, is_grant=True, granted_bytes=need.wanted_bytes))


def test_grants_are_for_the_files_of_all_ranks() -> None:
    """The books count one file of an object; every rank writes its own into the directory."""
    space = SharedSpace(
        capacity_bytes=6400, file_bytes=lambda blocks, members: 100 * blocks * members
    )
    tier = OpalStorageBackend(
        tier="DistributedFS", space=space, policy=LRUPolicy(), log=EventLog(enabled=False)
    )
    manager = make_manager(rows=0)
    manager.storage.tiers = (tier,)
    keeper = Keeper()
    link = SharedTierLink(manager, keeper, space, ranks=2)  # type: ignore[arg-type]

    link.poll()
    link.poll()
    assert (keeper.needs, space.unused_bytes) == ([Need(200, 0)], 100)
    assert space.allocate(1) is not None
    assert space.allocate(1) is None
    link.poll()

    assert keeper.needs[-1].unused_bytes == 200, "both files that are being written"
