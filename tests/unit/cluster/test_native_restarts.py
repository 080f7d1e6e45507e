"""Restarts, resets and absences of an instance, one at a time."""

import logging

import pytest
from ingest_world import IngestWorld, contents_asked, is_equal, known, loaded
from simulated_instance import DISK, MEMORY, sample_object

from opal_connector.cluster.ingest import SourceState
from opal_connector.events import DEVICE_TIER
from opal_connector.events.channel import (
    FORMAT_VERSION,
    Refused,
)


def test_an_index_newer_than_the_instance_knows_all_it_holds() -> None:
    """A router that starts later, or again, or takes over from another, must not begin empty."""
    world = IngestWorld(instance=loaded(0, 1, 2, replay_batches=0)).settled()

    assert is_equal(world)
    assert known(world)


def test_neither_replay_nor_contents_forgets_all_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = IngestWorld(instance=loaded(0, 1)).settled()
    for number in (4, 6):
        world.instance.insert(sample_object(number), MEMORY)
    world.flush(1)
    del world.published[0]
    world.deliver()
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            world.heartbeat()
            world.deliver()
            world.tick(1.0)

    assert known(world) == {}
    assert world.machine.state is SourceState.SYNCING
    assert world.machine.metrics.purges == 1
    (record,) = caplog.records
    assert "not known any more" in record.getMessage()
    world.questions.clear()
    world.settle()
    assert is_equal(world)


def test_a_restart_in_place_drops_device_and_memory_at_once_and_keeps_the_disk() -> None:
    """The restarted engine's old prefixes go on scoring; or its new events are taken for old."""
    world = IngestWorld()
    for tier in (DEVICE_TIER, MEMORY, DISK):
        world.instance.insert(sample_object(0), tier)
    world.settled()
    disk = known(world)[0, DISK]
    world.instance.restart()
    world.instance.insert(sample_object(4), MEMORY)
    world.flush()
    world.deliver()
    assert known(world) == {(0, DISK): disk}
    world.settle()
    assert known(world)[0, DISK] == disk, "what is not found yet is not gone"
    world.instance.find_on_disk(10)
    world.settle()

    assert is_equal(world)
    assert world.machine.metrics.restarts == 1


def test_what_left_the_disk_while_the_process_was_down_leaves_when_it_was_looked_through() -> None:
    world = IngestWorld(instance=loaded(0, 2, 4, tier=DISK)).settled()
    world.instance.restart(lost_on_disk=2)
    world.settle()
    assert len(known(world)[0, DISK]) == 6
    world.instance.find_on_disk(10)
    world.settle()

    assert is_equal(world)


def test_only_a_part_of_what_survived_is_asked_for_again() -> None:
    """A persistent tier that comes back as it was costs its digests, not its contents."""
    world = IngestWorld(instance=loaded(*range(8), tier=DISK)).settled()
    world.instance.restart()
    world.instance.find_on_disk(100)
    world.flush()
    world.published.clear()
    asked = len(contents_asked(world))
    world.settle()

    assert is_equal(world)
    assert len(contents_asked(world)) == asked


def test_messages_of_an_ended_incarnation_change_nothing() -> None:
    world = IngestWorld(instance=loaded(0)).settled()
    world.instance.insert(sample_object(2), MEMORY)
    late = world.instance.flush()
    world.instance.restart()
    world.settle()
    world.published += late
    world.drain()

    assert known(world) == {}
    assert world.machine.metrics.late == 1
    assert world.machine.metrics.restarts == 1


def test_sequence_numbers_that_go_back_within_an_incarnation_begin_it_anew() -> None:
    world = IngestWorld().settled()
    for number in range(5):
        world.instance.insert(sample_object(number), MEMORY)
    world.flush(1)
    world.settle()
    world.instance.incarnation -= 1
    world.instance.restart()
    for _ in range(3):
        world.heartbeat()
        world.deliver()
    assert known(world) == {}, "at once"
    world.instance.insert(sample_object(6), MEMORY)
    world.settle(rounds=5)

    assert is_equal(world)
    assert world.machine.metrics.restarts >= 1


def test_an_instance_that_is_not_heard_is_not_scored_until_it_was_compared() -> None:
    """A dead worker keeps its credit until somebody's health check acts."""
    world = IngestWorld(instance=loaded(0)).settled()
    world.tick(4.0)
    assert world.machine.state is SourceState.STALE
    assert not world.kvbm.workers["a"].is_live
    assert world.machine.metrics.lost_heartbeats == 1
    world.instance.insert(sample_object(2), MEMORY)
    world.flush()
    world.published.clear()
    world.heartbeat()
    world.drain()
    assert world.machine.state is SourceState.STALE, "it lacks a batch"
    world.settle()
    assert world.kvbm.workers["a"].is_live
    assert is_equal(world)


def test_a_reset_that_an_idle_engine_publishes_clears_the_device_only() -> None:
    """Resets invisible while idle, or that take the host tiers with them, credit the wrong."""
    world = IngestWorld()
    world.instance.insert(sample_object(0), DEVICE_TIER)
    world.instance.insert(sample_object(0), MEMORY)
    world.settled()
    world.instance.clear_device()
    world.settle()

    assert {tier for _, tier in known(world)} == {MEMORY}


def test_one_refusal_does_not_cost_what_is_known() -> None:
    """An instance that begins anew refuses what was asked before; its disk is still its disk."""
    world = IngestWorld(instance=loaded(0, tier=DISK)).settled()
    world.machine.on_fault(world.now)
    world.tick(1.0)
    refused = Refused(FORMAT_VERSION, world.asked[-1].request_id, "begun anew")
    world.act(world.machine.on_reply(refused, 10, world.now))

    assert world.machine.metrics.purges == 0
    assert is_equal(world)
