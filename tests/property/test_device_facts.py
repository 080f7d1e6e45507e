"""What the device holds, learned from vLLM's events, against vLLM's own map of cached blocks."""

import random

import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("vllm")

import msgspec
from hybrid_engine import MODELS, HybridEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_events import KVEventBatch

from opal_connector.cluster.ingest.vllm_machine import VllmMachine
from opal_connector.cluster.kvbm import KVBM
from opal_connector.events import DEVICE_TIER, Delete, Insert
from opal_connector.integrations.vllm.device_tap import DeviceFacts, DeviceTap
from opal_connector.keys import HASH_BYTES

pytestmark = pytest.mark.vllm


class Tapped:
    """What is heard of an engine from within."""

    def __init__(self, engine: HybridEngine) -> None:
        self.engine = engine
        self.heard: list[object] = []
        self.tap = DeviceTap(engine.pool, self.heard.append)
        self.facts = DeviceFacts(engine.pool.medium, {}.get, engine.layout)
        self.known: dict[int, set[bytes]] = {number: set() for number in self.facts.groups}

    def hear(self) -> None:
        self.engine.manager.take_events()
        heard, self.heard[:] = list(self.heard), []
        for raw in heard:
            for event in self.facts.translate(raw):
                assert isinstance(event, Insert | Delete)
                assert event.tier == DEVICE_TIER
                run = event.fact.block_hashes
                blocks = {run[at : at + HASH_BYTES] for at in range(0, len(run), HASH_BYTES)}
                known = self.known[event.fact.group]
                if isinstance(event, Insert):
                    assert not blocks & known, "stored twice"
                    known |= blocks
                else:
                    assert blocks <= known, "removed and not there"
                    known -= blocks

    def expected(self, position: int) -> set[bytes]:
        kv_groups = self.engine.layout.groups[position].kv_groups
        return set.intersection(*(self.engine.held(kv_group) for kv_group in kv_groups))

    def check(self) -> None:
        for position in self.facts.groups:
            assert self.known[position] == self.expected(position)
            assert {name for _, name in self.facts.held(position)} == self.known[position]


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_facts_of_every_group_are_exactly_what_all_its_kv_groups_hold(
    model: str, seed: int
) -> None:
    """Also where vLLM announces few blocks of a span, or none, and when blocks are taken back."""
    rng = random.Random(seed)
    engine = HybridEngine(model, rng)
    tapped = Tapped(engine)
    for _ in range(rng.randint(1, 30)):
        engine.live()
        tapped.hear()
        tapped.check()
    tapped.tap.remove()
    assert "cache_full_blocks" not in vars(engine.pool)


# Who only reads the stream is not told which blocks of a span are there. Another group's events
# may tell; where none does, the blocks are not known.
NAMED = {
    "dense": {0},
    "gemma": {0, 1, 2},
    "windows": set[int](),
    "one window": set[int](),
    "chunks": {0, 1},
    "sizes": {0, 1},
    "large chain": {0},
    "states": {0, 1, 2},
    "large states": {0, 1},
    "scratch": {0, 1},
}


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_stream_is_never_taken_for_more_than_there_is_and_for_all_that_can_be_named(
    model: str, seed: int
) -> None:
    """Of an engine without Opal, by kv group; what a sparse group leaves out is nobody's chain."""
    rng = random.Random(seed)
    engine = HybridEngine(model, rng, publishes=True)
    kvbm = KVBM()
    machine = VllmMachine(kvbm, "engine", has_replay=False)
    for number in range(rng.randint(1, 30)):
        engine.live()
        batch = KVEventBatch(ts=1.0, events=engine.manager.take_events(), data_parallel_rank=0)
        machine.on_message(number, msgspec.msgpack.encode(batch), float(number))
        for group in range(len(engine.manager.kv_cache_config.kv_cache_groups)):
            known: set[bytes] = set()
            if "engine" in kvbm.workers:
                known = {name for _, name in kvbm.contents("engine", group, DEVICE_TIER)}
            there = engine.held(group)
            assert known <= there
            if group in NAMED[model]:
                assert known == there
    kvbm.check()
