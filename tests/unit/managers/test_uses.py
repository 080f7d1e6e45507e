"""What counts as a use of a chunk: one per request, and storing it is not using it again."""

import pytest
from fakes import BLOCK_TOKENS, ROW_BYTES, done, hit_blocks, plan_load, start, store

from opal_connector.config import CPUMemoryConfig, OpalConfig
from opal_connector.events import EventLog
from opal_connector.eviction import POLICIES, LRUPolicy
from opal_connector.keys import plain_layout
from opal_connector.managers import LookupState, OpalKVCacheManager, TierPool, build_manager

ROWS = 8


def books(policy: str) -> OpalKVCacheManager:
    config = OpalConfig(CPUMemory=CPUMemoryConfig(eviction_policy=policy))  # type: ignore[arg-type]
    return build_manager(
        config,
        layout=plain_layout(BLOCK_TOKENS),
        chunk_blocks=1,
        spaces={"CPUMemory": TierPool(capacity_rows=ROWS, row_bytes=ROW_BYTES)},
        log=EventLog(enabled=False),
    )


def load(manager: OpalKVCacheManager, block: int) -> None:
    """A request that finds its block and ends."""
    request = start(manager, [block])
    result = manager.lookup(request, computed_blocks=0, max_blocks=1, now=0.0)
    assert result.state is LookupState.HIT
    manager.commit(done(plan_load(manager, request, [0])))
    manager.end_request(request)


@pytest.mark.parametrize("policy", ["ARC", "S3-FIFO", "SIEVE"])
def test_chunks_of_one_request_do_not_displace_what_is_used_again(policy: str) -> None:
    """If storing counted as a use, every chunk would look wanted, and no policy could tell."""
    manager = books(policy)
    store(manager, [1000])
    store(manager, [1001])
    load(manager, 1000)

    for block in range(2 * ROWS):
        store(manager, [block])
        if block % 4 == 3:
            load(manager, 1000)

    assert hit_blocks(manager, [1000]) == 1
    assert hit_blocks(manager, [1001]) == 0


class CountingPolicy(LRUPolicy):
    """Counts the accesses of every key."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: list[bytes] = []

    def touch(self, key: bytes) -> None:
        self.uses.append(key)
        super().touch(key)

    def renew(self, key: bytes) -> None:
        assert key in self


def counting(monkeypatch: pytest.MonkeyPatch) -> tuple[OpalKVCacheManager, CountingPolicy]:
    """Books whose policy counts, with two blocks stored."""
    made: list[CountingPolicy] = []

    def make() -> CountingPolicy:
        made.append(CountingPolicy())
        return made[-1]

    monkeypatch.setitem(POLICIES, "LRU", make)  # type: ignore[arg-type]
    manager = books("LRU")
    store(manager, [1, 2])
    return manager, made[-1]


def test_store_is_no_use_beyond_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy knows of it by `insert`."""
    _, policy = counting(monkeypatch)

    assert policy.uses == []


def test_load_is_one_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of the load is the use; the end of the same request is not another one."""
    manager, policy = counting(monkeypatch)

    load(manager, 1)

    assert len(policy.uses) == 1


def test_device_hit_is_a_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM had on the device is used too, though no load asked for it."""
    manager, policy = counting(monkeypatch)

    manager.end_request(start(manager, [1, 2]))

    assert len(policy.uses) == 2
