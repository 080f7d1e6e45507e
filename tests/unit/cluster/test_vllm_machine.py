"""What an engine's own event stream may go through, one fault at a time."""

import logging
from typing import Any

import msgspec
import pytest
from engine_world import EngineWorld
from naive_kvbm import NaiveKVBM
from simulated_engine import BLOCK_TOKENS, SimulatedEngine, digest_of_node, tokens_of

from opal_connector.cluster.ingest import SourceLimits, SourceState, VllmMachine
from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.request import PrefixRequest
from opal_connector.events import DEVICE_TIER

pack = msgspec.msgpack.Encoder().encode
LIMITS = SourceLimits(request_attempts=2)


def known(world: EngineWorld, worker: str = "engine") -> dict[tuple[int, str], set[bytes]]:
    return world.kvbm.blocks(worker)


def following(*nodes: int, has_replay: bool = True, **settings: Any) -> EngineWorld:
    world = EngineWorld(engine=SimulatedEngine(**settings), has_replay=has_replay, limits=LIMITS)
    world.connect()
    world.drain()
    for node in nodes:
        world.engine.store(node)
    world.flush(1)
    world.drain()
    return world


def is_equal(world: EngineWorld) -> bool:
    return known(world) == world.engine.blocks()


def event(machine: VllmMachine, sequence: int, *events: Any, rank: int | None = None) -> None:
    machine.on_message(sequence, pack([float(sequence), list(events), rank]), 1.0)


def stored(hashes: list[int], parent: int | None, tokens: list[int], **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        **more,
    }


def test_a_router_newer_than_its_engine_replays_from_the_beginning() -> None:
    """Parents that were stored before it started are unknown, and nothing ever matches."""
    engine = SimulatedEngine()
    for node in (0, 1, 3):
        engine.store(node)
    engine.flush(1)
    world = EngineWorld(engine=engine)
    world.connect()
    assert world.machine.state is SourceState.SYNCING
    world.drain()

    assert world.machine.state is SourceState.LIVE
    assert is_equal(world)


def test_blocks_of_unknown_parents_wait_for_them_and_are_not_moved_to_the_root() -> None:
    """Re-rooted, they would be credited to prompts that begin with them."""
    kvbm = KVBM()
    machine = VllmMachine(kvbm, "engine", has_replay=False)
    machine.on_connected(0.0)
    event(machine, 5, stored([2], 1, [3, 4]))
    machine.on_tick(2.0)
    assert machine.metrics.parked == 1
    assert kvbm.scorer(PrefixRequest(model="", token_ids=[3, 4])) == {}
    event(machine, 6, stored([1], None, [1, 2]))

    assert kvbm.scorer(PrefixRequest(model="", token_ids=[1, 2, 3, 4])) == {"engine": 1.0}
    assert kvbm.scorer(PrefixRequest(model="", token_ids=[3, 4])) == {}


def test_removals_of_unknown_blocks_leave_nothing_behind() -> None:
    """Entries for what was never stored pile up until the router is killed."""
    kvbm = KVBM()
    machine = VllmMachine(kvbm, "engine", has_replay=False)
    event(machine, 0, stored([1], None, [1, 2]))
    for sequence in range(1, 50):
        event(
            machine, sequence, {"type": "BlockRemoved", "block_hashes": [sequence], "medium": "GPU"}
        )

    assert kvbm.used_bytes == 0


def test_a_lost_batch_is_replayed_and_the_rest_follows_in_order() -> None:
    world = following(0)
    for node in (1, 3):
        world.engine.store(node)
    world.flush(1)
    del world.published[0]
    world.drain()
    assert world.machine.state is SourceState.GAP
    world.tick(0.2)
    world.drain()

    assert is_equal(world)
    assert world.machine.metrics.purges == 0


def test_a_lost_batch_without_a_replay_costs_what_was_known_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """To go on as if nothing had happened credits what may be gone."""
    world = following(0, 1, has_replay=False)
    world.engine.remove(0)
    world.engine.store(2)
    world.engine.clear()
    world.engine.store(0)
    world.flush(1)
    del world.published[0]
    world.drain()
    with caplog.at_level(logging.WARNING):
        world.tick(0.2)

    assert known(world) == {(0, DEVICE_TIER): {digest_of_node(0)}}
    assert world.machine.metrics.purges == 1
    assert "not known any more" in caplog.text


def test_a_replay_that_does_not_answer_costs_what_was_known() -> None:
    world = following(0)
    for node in (1, 2):
        world.engine.store(node)
    world.flush(1)
    del world.published[0]
    world.deliver()
    for _ in range(12):
        world.tick(1.0)
        world.question = None

    assert world.machine.metrics.purges == 1
    assert world.machine.state is SourceState.LIVE
    assert known(world) == {}, "the parent of what came is not known any more"


def test_a_restart_in_place_is_seen_by_a_number_that_comes_again() -> None:
    """Old prefixes go on scoring, and new events are dropped until they pass the old number."""
    world = following(0, 1, 2)
    world.engine.restart()
    world.engine.store(0)
    world.flush()
    world.deliver()
    assert known(world) == {}, "at once"
    world.drain()

    assert is_equal(world)
    assert world.machine.metrics.restarts == 1


def test_a_restart_that_has_overtaken_is_seen_by_the_replay() -> None:
    """The new engine's number is higher than the old one's: it looks like a gap."""
    world = following(0, 1)
    world.engine.restart()
    for node in (0, 2, 5, 6):
        world.engine.store(node)
    world.flush(1)
    del world.published[:3]
    world.drain()
    world.tick(0.2)
    world.drain()

    assert is_equal(world)
    assert world.machine.metrics.restarts == 1


def test_a_repeated_batch_is_no_restart() -> None:
    world = following(0)
    world.engine.store(1)
    world.flush()
    world.deliver(keep=True)
    world.drain()

    assert is_equal(world)
    assert (world.machine.metrics.duplicates, world.machine.metrics.restarts) == (1, 0)


def test_a_lost_last_batch_is_found_when_the_stream_is_quiet() -> None:
    """No later number tells of it, and there are no heartbeats."""
    world = following(0)
    world.engine.store(1)
    world.flush()
    world.published.clear()
    world.tick(6.0)
    world.drain()

    assert is_equal(world)
    assert world.machine.metrics.lost_tails == 1


def test_a_restart_that_says_nothing_is_found_when_the_stream_is_quiet() -> None:
    world = following(0, 1)
    world.engine.restart()
    world.tick(6.0)
    world.drain()

    assert known(world) == {}
    assert world.machine.metrics.restarts == 1


def test_a_reset_clears_the_device_and_nothing_else() -> None:
    """Host tiers survive it; wiped with it, their hits are never asked for again."""
    world = following(0)
    world.engine.store(0, "CPU")
    world.engine.clear()
    world.flush()
    world.drain()

    assert known(world) == {(0, "CPU"): {digest_of_node(0)}}


def test_a_disconnected_engine_is_not_scored_and_is_checked_when_it_is_back() -> None:
    world = following(0)
    world.disconnect()
    assert world.machine.state is SourceState.STALE
    assert not world.kvbm.workers["engine"].is_live
    world.connect()
    assert world.machine.state is SourceState.STALE, "it may be another one"
    world.drain()

    assert world.kvbm.workers["engine"].is_live
    assert world.machine.state is SourceState.LIVE
    assert is_equal(world)


def test_without_a_replay_an_absence_costs_what_was_known() -> None:
    """Whether it is the same process, and what it did meanwhile, cannot be told."""
    world = following(0, has_replay=False)
    world.disconnect()
    world.connect()

    assert known(world) == {}
    assert world.machine.state is SourceState.LIVE
    assert world.machine.metrics.purges == 1


def test_ranks_are_workers_of_their_own() -> None:
    """Taken for one worker, each rank is credited with what only the others hold."""
    kvbm = NaiveKVBM()
    machine = VllmMachine(kvbm, "engine", has_replay=False)
    event(machine, 0, stored([1], None, [1, 2]), rank=0)
    event(machine, 1, stored([2], None, [3, 4]), rank=3)

    assert set(kvbm.workers) == {"engine", "engine/dp3"}
    assert kvbm.blocks("engine") != kvbm.blocks("engine/dp3")


def test_blocks_of_another_size_are_counted_and_left_out() -> None:
    """A block size that does not match must not pass for a match of nothing, silently."""
    kvbm = NaiveKVBM()
    machine = VllmMachine(kvbm, "engine", has_replay=False)
    event(machine, 0, stored([1], None, [1, 2]))
    event(machine, 1, stored([2], None, [1, 2, 3], block_size=3))

    assert machine.metrics.other_block_sizes == 1
    assert len(kvbm.blocks("engine")[0, DEVICE_TIER]) == 1


def test_groups_keep_their_kind() -> None:
    """Sliding windows counted as full attention are prefixes that cannot be had."""
    kvbm = NaiveKVBM()
    machine = VllmMachine(kvbm, "engine", has_replay=False)
    event(machine, 0, stored([1], None, [1, 2], group_idx=0, kv_cache_spec_kind="full_attention"))
    event(machine, 1, stored([1], None, [1, 2], group_idx=1, kv_cache_spec_kind="sliding_window"))

    groups = {one.group: one.kind for one in kvbm.workers["engine"].description.groups}
    assert groups == {0: "full_attention", 1: "sliding_window"}


def test_events_without_tokens_are_counted_and_name_only_what_is_known() -> None:
    """Placeholders of a host tier name blocks that nobody described."""
    kvbm = NaiveKVBM()
    machine = VllmMachine(kvbm, "engine", has_replay=False)
    event(machine, 0, stored([1], None, [1, 2]))
    event(machine, 1, stored([1], None, [], block_size=0, medium="CPU"))
    event(machine, 2, stored([9], None, [], block_size=0, medium="CPU"))

    assert kvbm.blocks("engine")[0, "CPU"] == kvbm.blocks("engine")[0, DEVICE_TIER]


def test_an_unreadable_batch_costs_what_was_known() -> None:
    """It may have been a removal."""
    world = following(0)
    world.machine.on_message(1, b"\xc1", world.now)

    assert known(world) == {}
    assert world.machine.metrics.malformed == 1


def test_an_unreadable_batch_that_is_replayed_is_no_restart() -> None:
    """Else the engine would be begun anew at every look at its last batch."""
    world = following(0)
    world.engine.sequence += 1
    world.engine.log.append((world.engine.sequence, b"\xc1"))
    world.published.append(world.engine.log[-1])
    world.drain()
    for _ in range(3):
        world.tick(6.0)
        world.drain()

    assert world.machine.metrics.restarts == 0
    assert world.machine.metrics.malformed == 1


@pytest.mark.parametrize("has_replay", [True, False])
def test_a_message_before_its_connection_is_told_of_is_kept(has_replay: bool) -> None:
    """Two sockets tell of them, in any order."""
    world = EngineWorld(has_replay=has_replay)
    world.engine.store(0)
    world.flush()
    world.deliver()
    world.connect()
    world.drain()

    assert is_equal(world)
    assert world.machine.metrics.connections == 1


def test_an_adapters_blocks_match_only_requests_for_it() -> None:
    kvbm = KVBM()
    machine = VllmMachine(kvbm, "engine", has_replay=False)
    event(machine, 0, stored([1], None, [1, 2], lora_name="a", extra_keys=[["a"]]))
    request = PrefixRequest(model="", token_ids=[1, 2])

    assert kvbm.scorer(request) == {}
    assert kvbm.scorer(msgspec.structs.replace(request, lora_name="a")) == {"engine": 1.0}


def test_tokens_of_a_request_match_what_the_engine_said() -> None:
    """A hash that differs between router and engine is an overlap of 0 that looks healthy."""
    kvbm = KVBM()
    world = EngineWorld(kvbm, has_replay=False)
    world.connect()
    for node in (0, 1, 3):
        world.engine.store(node)
    world.flush()
    world.drain()
    tokens = [token for node in (0, 1, 3) for token in tokens_of(node)]

    assert kvbm.scorer(PrefixRequest(model="m", token_ids=tokens)) == {"engine": 1.0}
    assert kvbm.workers["engine"].description.block_tokens == BLOCK_TOKENS
