"""Everything at once: threads of LMCache's kind over small tiers, against what was stored."""

import random
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")

import torch
from l2_world import Host, Told, buffer_of, key_of, layout_of, tiers_of
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from opal_connector.events import Copy, Delete, Insert, KVCEvent, Move
from opal_connector.integrations.lmcache.identity import StoredObject

KEYS, SIZES = 48, (20_000, 64 << 10, 150_000)
PATIENCE_SECONDS = 60.0


def size_of(number: int) -> int:
    """Every key has its size."""
    return SIZES[number % len(SIZES)] // 4 * 4


class Storing:
    """LMCache's store controller: it alone pops what has been stored."""

    def __init__(self, host: Host, seed: int, turns: int) -> None:
        self._host, self._random, self._turns = host, random.Random(seed), turns
        self.errors: list[BaseException] = []

    def run(self) -> None:
        try:
            for _ in range(self._turns):
                first = self._random.randrange(KEYS)
                numbers = [(first + n) % KEYS for n in range(self._random.randint(1, 6))]
                items = [buffer_of(size_of(n), n + 1) for n in numbers]
                self._host.store([key_of(n, salt=f"t{n % 2}") for n in numbers], items)
                if self._random.random() < 0.2:
                    number = self._random.randrange(KEYS)
                    self._host.adapter.delete([key_of(number, salt=f"t{number % 2}")])
        except BaseException as error:  # noqa: BLE001 - said in the test's own thread
            self.errors.append(error)


class Prefetching(Storing):
    """LMCache's prefetch controller: looks up and locks, loads what it found, unlocks."""

    def run(self) -> None:
        try:
            for _ in range(self._turns):
                first = self._random.randrange(KEYS)
                numbers = [(first + n) % KEYS for n in range(self._random.randint(1, 8))]
                self._fetch(numbers)
        except BaseException as error:  # noqa: BLE001 - said in the test's own thread
            self.errors.append(error)

    def _fetch(self, numbers: list[int]) -> None:
        keys = [key_of(n, salt=f"t{n % 2}") for n in numbers]
        found = self._host.look_up(keys)
        hits = [n for n, is_hit in zip(numbers, found, strict=True) if is_hit]
        locked = [key_of(n, salt=f"t{n % 2}") for n in hits]
        targets = [buffer_of(size_of(n)) for n in hits]
        loaded = self._host.load(locked, targets) if hits else []
        assert all(loaded), "what is locked can be loaded"
        for number, target in zip(hits, targets, strict=True):
            assert torch.equal(target.raw_data, buffer_of(size_of(number), number + 1).raw_data)
        self._host.adapter.submit_unlock(locked)


class Replica:
    """What the tiers hold, by the snapshot at the start and every event since."""

    def __init__(self, host: Host) -> None:
        self.tiers: dict[str, set[ObjectKey]] = {name: set() for name in host.books.tier_names}
        for tier, stored in host.adapter.follow(self.hear):
            self.tiers[tier].add(stored.key)

    def hear(self, event: KVCEvent, stored: StoredObject) -> None:
        match event:
            case Insert():
                self.tiers[event.tier].add(stored.key)
            case Copy():
                self.tiers[event.target_tier].add(stored.key)
            case Move():
                self.tiers[event.source_tier].remove(stored.key)
                self.tiers[event.target_tier].add(stored.key)
            case Delete():
                self.tiers[event.tier].remove(stored.key)


@pytest.mark.parametrize(
    ("write", "policy", "quotas"),
    [("through", "LRU", {}), ("demote", "SIEVE", {"t0": 0.4}), ("demote", "ARC", {})],
)
def test_nothing_is_lost_mixed_up_or_left_over(
    tmp_path: Path, write: str, policy: str, quotas: dict[str, float]
) -> None:
    """Loads bring what was stored; the books agree; in the end all promises have been kept."""
    params = tiers_of(
        tmp_path,
        memory="1MiB",
        disk="3MiB",
        quotas=quotas,
        CPUMemory={"eviction_policy": policy},
        LocalNVMe={"write": write, "eviction_policy": policy, "admission": "always"},
    )
    host = Host(params)
    replica = Replica(host)
    workers: list[Any] = [Storing(host, 1, 60), Prefetching(host, 2, 60)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), "a task has not ended"
    errors = [error for worker in workers for error in worker.errors]
    assert not errors, errors

    host.settle()
    adapter: L2AdapterInterface = host.adapter
    assert replica.tiers == Replica(host).tiers
    assert len(host.books.locks) == len(host.adapter._runtime.lent) == 0
    listed = adapter.list_l2_keys(page_size=1000).entries
    assert host.told.there == {
        key_of(number, salt=f"t{number % 2}"): size_of(number)
        for number in (int(entry.key.chunk_hash_hex, 16) for entry in listed)
    }
    assert adapter.get_usage().total_bytes_used == sum(host.told.there.values())
    for tier in host.books.storage.tiers:
        assert tier.used_bytes <= tier.capacity_bytes
    host.close()

    again = Host(params)
    on_disk = {entry.key.chunk_hash_hex for entry in listed}
    again.look_up([key_of(0)], layout_of(buffer_of(size_of(0))))
    again.settle()
    found = again.adapter.list_l2_keys(page_size=1000).entries
    assert {entry.key.chunk_hash_hex for entry in found} <= on_disk
    assert isinstance(again.told, Told)
    again.close()
