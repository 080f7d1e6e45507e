"""On data without holes the KVBM answers what Dynamo's RadixTree answers."""

import json
import random
from hashlib import sha256
from typing import Any

import pytest

from opal_connector.cluster.kvbm import KVBM
from opal_connector.events import DEVICE_TIER, Delete, Insert, ObjectFact
from opal_connector.events.channel import InstanceDescription
from opal_connector.keys import CHAIN_ROOT

core = pytest.importorskip("dynamo._core", reason="ai-dynamo-runtime is not installed")

WORKERS = 5


def short(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:8], "little")


class Both:
    def __init__(self) -> None:
        self.tree = core.RadixTree()
        self.kvbm = KVBM()
        for worker in range(WORKERS):
            self.kvbm.join(
                InstanceDescription(
                    instance_id=str(worker), incarnation=1, model="m", block_tokens=16
                )
            )
        self._events = 0

    def _tell(self, worker: int, data: dict[str, Any]) -> None:
        self._events += 1
        event = {"event_id": self._events, "data": data, "dp_rank": 0}
        self.tree.apply_event(worker, json.dumps(event).encode())

    def store(self, worker: int, run: list[bytes], parent_hash: bytes | None) -> None:
        blocks = [{"block_hash": short(found), "tokens_hash": short(found)} for found in run]
        above = None if parent_hash is None else short(parent_hash)
        data = {"parent_hash": above, "start_position": None, "blocks": blocks}
        self._tell(worker, {"stored": data})
        fact = ObjectFact(0, parent_hash or CHAIN_ROOT, b"".join(run))
        self.kvbm.process_kvc_events(str(worker), [Insert(fact, DEVICE_TIER)])

    def remove(self, worker: int, run: list[bytes]) -> None:
        self._tell(worker, {"removed": {"block_hashes": [short(found) for found in run]}})
        fact = ObjectFact(0, b"", b"".join(run))
        self.kvbm.process_kvc_events(str(worker), [Delete(fact, DEVICE_TIER)])

    def expect_equal(self, path: list[bytes]) -> None:
        theirs = self.tree.find_matches([short(found) for found in path]).scores
        ours = self.kvbm.matched_blocks(self.kvbm.models()[0], path)
        assert ours == {str(worker): depth for (worker, _), depth in dict(theirs).items()}


def conversations(rng: random.Random) -> list[list[bytes]]:
    """Forks of forks: each goes on from somewhere inside an earlier one."""
    found: list[list[bytes]] = []
    for number in range(12):
        start = found[rng.randrange(len(found))] if found else []
        head = start[: rng.randint(0, len(start))]
        tail = [sha256(f"{number}/{place}".encode()).digest() for place in range(40)]
        found.append([*head, *tail])
    return found


@pytest.mark.parametrize("seed", range(6))
def test_the_answers_are_equal_after_any_stores_and_evictions_from_the_tail(seed: int) -> None:
    rng = random.Random(seed)
    paths = conversations(rng)
    both = Both()
    held: dict[int, dict[bytes, bytes | None]] = {worker: {} for worker in range(WORKERS)}
    for _ in range(300):
        worker, path = rng.randrange(WORKERS), rng.choice(paths)
        mine = held[worker]
        if rng.random() < 0.6:
            first = next((at for at, found in enumerate(path) if found not in mine), len(path))
            run = path[first : first + rng.randint(1, 15)]
            if run:
                above = path[first - 1] if first else None
                both.store(worker, run, above)
                mine.update(zip(run, [above, *run], strict=False))
        else:
            leaves = [found for found in path if found in mine and found not in mine.values()]
            for leaf in leaves[-1:]:
                del mine[leaf]
                both.remove(worker, [leaf])
        both.expect_equal(rng.choice(paths))
    for path in paths:
        both.expect_equal(path)
    both.kvbm.check()
