"""vLLM's event stream and counters tell exactly what the tiers hold and gave."""

import pytest

pytest.importorskip("vllm")

from byte_model import Identity
from engine_without_model import Engine
from transfer_fakes import FailingTier
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm_parts import announced, prompt, replay

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("chunk_blocks", [1, 2, 4])
@pytest.mark.parametrize("tier_blocks", [6, 16, 200])
def test_events_are_the_contents(tier_blocks: int, chunk_blocks: int) -> None:
    """Stores, siblings, evictions, failures, a reset: replaying the stream gives the tier."""
    engine = Engine(tier_blocks=tier_blocks, chunk_blocks=chunk_blocks, wrap_tier=FailingTier)
    for number in range(30):
        shared = prompt(number % 4, 20 + 16 * (number % 3))
        engine.generate(f"r{number}", [*shared, *prompt(number, 37)], max_tokens=number % 7 + 1)
        if number % 5 == 4:
            engine.forget_device()
        if number == 20:
            engine.scheduler.reset_connector_cache()
            engine.run()
        engine.tier().fails_write = lambda item, number=number: number % 6 == 5
        engine.tier().fails_read = lambda item, number=number: number % 4 == 3
        assert replay(engine.events) == announced(engine.held_hashes())

    assert any(isinstance(event, BlockRemoved) for event in engine.events)
    engine.assert_idle()


def test_events_are_collected_and_then_leave_an_idle_engine() -> None:
    """`kvcevent_coalesce_time`: one batch after the interval, also when no request is left."""
    engine = Engine(kvcevent_coalesce_time=0.5)
    engine.answer("a", prompt(1, 100))
    for _ in range(5):
        engine.step()
        assert replay(engine.events) == set()
    assert engine.connector.has_pending_push_work()

    engine.clock.now += 0.51
    engine.step()

    assert replay(engine.events) == announced(engine.held_hashes()) != set()
    assert not engine.connector.has_pending_push_work()
    engine.assert_idle()


def test_events_are_dropped_where_nobody_listens() -> None:
    """Without `enable_kv_cache_events` nothing is kept, and the engine goes idle at once."""
    engine = Engine(events=False, kvcevent_coalesce_time=60)
    engine.generate("a", prompt(1, 100))

    assert len(engine.held_hashes()) == 6
    assert engine.events == []
    engine.assert_idle()


def test_tier_events_stand_beside_the_device_events() -> None:
    """The medium tells them apart; a tier's event describes itself."""
    engine = Engine()
    engine.generate("a", prompt(1, 64), identity=Identity(salt="x"))
    stored = [event for event in engine.events if isinstance(event, BlockStored)]
    ours = [event for event in stored if event.medium == "CPU"]

    assert {event.medium for event in stored} == {"CPU", "GPU"}
    assert {event.locality for event in ours} == {"LOCAL"}
    assert all(len(event.token_ids) == 16 * len(event.block_hashes) for event in ours)


def test_hits_are_counted_once_and_by_source() -> None:
    """VLLM's external hits, Opal's own counters and the responses agree."""
    engine = Engine()
    for number in range(3):
        engine.generate(f"r{number}", prompt(1, 100))
        engine.forget_device()
    engine.generate("other", prompt(2, 50))
    in_responses = sum(result.hit_tokens for result in engine.results.values())
    external = [stats.connector_prefix_cache_stats for stats in engine.stats]
    by_source = [stats.hits_by_source.get(CacheHitSource.HOST, 0) for stats in external]
    ours = [stats.kv_connector_stats or {} for stats in engine.stats]

    assert in_responses == 2 * 96
    assert sum(stats.hits for stats in external) == in_responses
    assert sum(by_source) == in_responses
    assert sum(data.get("hit_tokens", {}).get("CPUMemory", 0) for data in ours) == in_responses
    missed = sum(data.get("miss_tokens", {}).get("CPUMemory", 0) for data in ours)
    assert in_responses + missed == sum(stats.queries for stats in external) == 350
