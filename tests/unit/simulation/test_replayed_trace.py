"""Replays: the real books serve a whole trace, and every figure adds up."""

from collections.abc import Callable

import pytest

from opal_connector.config import CPUMemoryConfig, DistributedFSConfig, LocalNVMeConfig, OpalConfig
from opal_connector.eviction import POLICIES
from opal_connector.simulation import (
    CACHE_MISS,
    Replay,
    ReplayReport,
    ReplaySettings,
    Trace,
    generated_chats,
    replay_belady,
)

TOKENS = 16
BYTES_PER_TOKEN = 64 << 10
ROW_BYTES = TOKENS * BYTES_PER_TOKEN
PLENTY = 100_000


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Three hundred requests of chats, some of them at nearly the same time."""
    return generated_chats(
        3, 300, turn_chance=0.6, chats_kept=20, block_tokens=TOKENS, mean_gap_seconds=0.02
    )


def size(blocks: int) -> str:
    return f"{blocks * ROW_BYTES}B"


def settings(
    *,
    memory: int = PLENTY,
    disk: int = 0,
    shared: int = 0,
    write: str = "through",
    admission: str = "always",
    policy: str = "LRU",
    **others: object,
) -> ReplaySettings:
    """Tiers of so many blocks; those of 0 are left out."""
    names = {"CPUMemory": memory, "LocalNVMe": disk, "DistributedFS": shared}
    config = OpalConfig(
        kvc_tiers=tuple(name for name, blocks in names.items() if blocks),
        CPUMemory=CPUMemoryConfig(capacity_GB=size(max(1, memory)), eviction_policy=policy),  # type: ignore[arg-type]
        LocalNVMe=LocalNVMeConfig(
            path="unused",
            capacity_GB=size(max(1, disk)),
            write=write,  # type: ignore[arg-type]
            admission=admission,  # type: ignore[arg-type]
            eviction_policy=policy,  # type: ignore[arg-type]
        ),
        DistributedFS=DistributedFSConfig(
            path="unused",
            capacity_GB=size(max(1, shared)),
            write=write,  # type: ignore[arg-type]
            admission=admission,  # type: ignore[arg-type]
        ),
    )
    return ReplaySettings(config=config, bytes_per_token=BYTES_PER_TOKEN, **others)  # type: ignore[arg-type]


def served(trace: Trace, given: ReplaySettings) -> ReplayReport:
    """The report of a replay whose books were audited at its end."""
    replay = Replay(trace, given)
    report = replay.run("LRU")
    replay.check()
    assert sum(report.tier_tokens.values()) == trace.input_tokens
    assert list(report.tier_tokens)[-1] == CACHE_MISS
    return report


def infinite_hit_tokens(trace: Trace) -> int:
    """What a cache that never forgets brings: by prefixes seen, without any of the books."""
    seen: set[bytes] = set()
    tokens = 0
    for request in trace.requests:
        usable = min(len(request.hashes), (request.input_tokens - 1) // trace.block_tokens)
        found = 0
        while found < usable and request.hashes[found] in seen:
            found += 1
        tokens += found * trace.block_tokens
        seen.update(request.hashes)
    return tokens


@pytest.mark.parametrize(
    "given",
    [
        settings(),
        settings(is_sequential=True),
        settings(chunk_tokens=4 * TOKENS, is_sequential=True),
        settings(memory=0, disk=PLENTY, is_sequential=True),
        settings(memory=40, disk=PLENTY, is_sequential=True),
        settings(memory=40, shared=PLENTY, is_sequential=True),
        settings(device_blocks=50, is_sequential=True),
        settings(device_blocks=PLENTY, is_sequential=True),
    ],
    ids=[
        "timed",
        "alone",
        "chunks",
        "disk",
        "memory-disk",
        "memory-shared",
        "device",
        "all-device",
    ],
)
def test_tiers_that_hold_everything_hit_all_that_can_be_hit(
    trace: Trace, given: ReplaySettings
) -> None:
    """The hit tokens are those of a cache that never forgets, to the token."""
    report = served(trace, given)

    assert trace.input_tokens - report.tier_tokens[CACHE_MISS] == infinite_hit_tokens(trace)


@pytest.mark.parametrize("admission", ["always", "adaptive"])
@pytest.mark.parametrize("write", ["through", "demote", "off"])
@pytest.mark.parametrize("is_sequential", [False, True])
def test_books_are_whole_after_every_way_to_place(
    trace: Trace, write: str, admission: str, is_sequential: bool
) -> None:
    """Full tiers, copies, moves and drops leave no lease and no job, and the events are true."""
    report = served(
        trace,
        settings(
            memory=60, disk=200, shared=500, write=write, admission=admission,
            is_sequential=is_sequential, prefill_tokens_per_second=20_000,
            decode_tokens_per_second=100,
        ),
    )  # fmt: skip

    assert report.tiers["CPUMemory"].evictions + report.events["MOVE"] > 0
    assert 0 < report.hit_rate <= infinite_hit_tokens(trace) / trace.input_tokens


def test_pressure_on_a_shared_tier_removes_its_oldest_files(trace: Trace) -> None:
    """The keeper of a shared directory makes the room that it grants, within the limit."""
    report = served(trace, settings(memory=60, shared=300, is_sequential=True))

    shared = report.tiers["DistributedFS"]
    assert shared.evictions > 0
    assert 0 < shared.used_bytes <= shared.capacity_bytes
    assert shared.hit_tokens > 0


def test_same_trace_gives_the_same_report(trace: Trace) -> None:
    """Nothing depends on the machine, on the wall clock or on the order of a set."""

    def run() -> ReplayReport:
        report = served(trace, settings(memory=60, disk=200, policy="AUTO"))
        report.replay_seconds = 0.0
        return report

    assert run() == run()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("blocks", [30, 100, 300])
def test_no_policy_beats_the_one_that_knows_the_future(
    trace: Trace, policy: str, blocks: int
) -> None:
    """Belady is a bound: a policy above it would count hits that there are not."""
    given = settings(memory=blocks, policy=policy, is_sequential=True)

    report = served(trace, given)

    bound = replay_belady(trace, given)
    assert report.hit_rate <= bound.hit_rate
    assert report.hit_rate > 0


def test_bound_with_room_for_everything_is_the_infinite_cache(trace: Trace) -> None:
    """The bound counts hits as the books do: whole blocks, one token left."""
    report = replay_belady(trace, settings())

    assert report.tier_tokens["Belady"] == infinite_hit_tokens(trace)
    assert sum(report.tier_tokens.values()) == trace.input_tokens


def test_disk_that_holds_everything_is_written_once_per_chunk(trace: Trace) -> None:
    """A promotion leaves the copy below clean, so evicting it again from memory costs no write."""
    report = served(trace, settings(memory=60, disk=PLENTY, is_sequential=True))

    assert report.tiers["CPUMemory"].evictions > report.unique_chunks
    assert report.tiers["LocalNVMe"].hit_tokens > 0
    assert 0.95 <= report.tiers["LocalNVMe"].writes_per_unique_chunk <= 1.05


def test_time_passes_for_bytes_prefill_and_decode(trace: Trace) -> None:
    """A slower prefill and a slower device are seen in the time to the first token."""

    def mean_ttft(**others: object) -> float:
        given = settings(memory=60, disk=PLENTY, is_sequential=True, **others)  # type: ignore[arg-type]
        return served(trace, given).ttft_seconds["mean"]

    free = mean_ttft()
    misses = trace.input_tokens - infinite_hit_tokens(trace)

    assert free > 0
    assert mean_ttft(prefill_tokens_per_second=1000) - free == pytest.approx(
        misses / 1000 / len(trace.requests)
    )


def test_progress_counts_every_request(trace: Trace) -> None:
    """A bar that is told everything ends at its end."""
    told: list[float] = []
    advance: Callable[[float], None] = told.append

    Replay(trace, settings()).run("LRU", advance)

    assert sum(told) == len(trace.requests)
