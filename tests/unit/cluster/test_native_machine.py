"""What an instance's native channel may go through, one fault at a time."""

import logging

import pytest
from ingest_world import IngestWorld
from naive_kvbm import NaiveKVBM
from simulated_instance import DISK, MEMORY, SimulatedInstance, sample_object

from opal_connector.cluster.ingest import NativeMachine, SourceLimits, SourceState
from opal_connector.cluster.kvbm import KVBM
from opal_connector.events import DEVICE_TIER
from opal_connector.events.channel import (
    FORMAT_VERSION,
    AskContents,
    AskReplay,
    Contents,
    Refused,
)


def loaded(*numbers: int, tier: str = MEMORY, **settings: int) -> SimulatedInstance:
    instance = SimulatedInstance(**settings)
    for number in numbers:
        instance.insert(sample_object(number), tier)
    instance.flush()
    return instance


def known(world: IngestWorld) -> dict[tuple[int, str], set[bytes]]:
    return world.kvbm.blocks(world.instance.instance_id)


def is_equal(world: IngestWorld) -> bool:
    return known(world) == world.instance.blocks()


def contents_asked(world: IngestWorld) -> list[AskContents]:
    return [question for question in world.asked if isinstance(question, AskContents)]


def test_it_subscribes_before_it_asks_what_there_is() -> None:
    """A batch between the answer and the subscription would be missed."""
    world = IngestWorld(instance=loaded(0, 1))
    world.tick()
    world.answer()
    world.reply()

    assert world.subscriptions == ["tcp://*:1"]
    assert len(world.asked) == 2
    assert world.machine.state is SourceState.SYNCING


def test_an_index_newer_than_the_instance_knows_all_it_holds() -> None:
    """A router that starts later, or again, or takes over from another, must not begin empty."""
    world = IngestWorld(instance=loaded(0, 1, 2, replay_batches=0)).settled()

    assert is_equal(world)
    assert known(world)


def test_every_tier_is_announced_and_withdrawn() -> None:
    """Stores into host tiers that are not seen, or removals that never come, leave phantoms."""
    world = IngestWorld().settled()
    for tier in (DEVICE_TIER, MEMORY, DISK):
        world.instance.insert(sample_object(4), tier)
    world.settle()
    assert {tier for _, tier in known(world)} == {DEVICE_TIER, MEMORY, DISK}
    world.instance.delete_everything()
    world.settle()
    assert known(world) == {}


def test_batches_during_a_synchronisation_wait_and_follow() -> None:
    world = IngestWorld(instance=loaded(0, 1))
    world.tick()
    world.answer()
    world.reply()
    world.instance.insert(sample_object(7), MEMORY)
    world.flush()
    world.deliver()
    assert known(world) == {}
    world.drain()

    assert is_equal(world)


def test_a_batch_older_than_a_tiers_contents_is_not_applied_to_it() -> None:
    """The contents are later than their label may say, and a move between tiers of two labels."""
    world = IngestWorld(instance=loaded(0))
    world.instance.insert(sample_object(4), DISK)
    world.instance.flush()
    world.tick()
    world.answer()
    world.reply()  # the description
    world.answer()
    world.reply()  # digests
    world.instance.move(sample_object(0), MEMORY, DISK)
    world.instance.insert(sample_object(9), MEMORY)
    world.flush(1)
    world.drain()

    assert is_equal(world)
    assert world.machine.metrics.digest_mismatches == 0


def test_a_repeated_batch_is_counted_and_not_applied() -> None:
    world = IngestWorld().settled()
    world.instance.insert(sample_object(0), MEMORY)
    world.flush()
    world.deliver(keep=True)
    world.instance.delete(sample_object(0), MEMORY)
    world.flush()
    world.deliver(1)
    world.deliver()

    assert world.machine.metrics.duplicates == 1
    assert is_equal(world)


def test_batches_in_the_wrong_order_are_put_right_without_a_question() -> None:
    world = IngestWorld().settled()
    asked = len(world.asked)
    for number in (0, 2, 4):
        world.instance.insert(sample_object(number), MEMORY)
    world.flush(1)
    world.deliver(2)
    assert world.machine.state is SourceState.GAP
    world.deliver(1)
    world.deliver(0)

    assert world.machine.state is SourceState.LIVE
    assert is_equal(world)
    assert len(world.asked) == asked


def test_a_lost_batch_is_replayed() -> None:
    """A gap that is passed over leaves the index wrong for ever."""
    world = IngestWorld().settled()
    for number in (0, 2):
        world.instance.insert(sample_object(number), MEMORY)
    world.flush(1)
    del world.published[0]
    world.drain()
    assert not is_equal(world)
    world.tick(0.2)
    world.drain()

    assert is_equal(world)
    assert (world.machine.metrics.gaps, world.machine.metrics.replays) == (1, 1)
    assert not contents_asked(world)


def test_a_lost_last_batch_is_found_by_the_next_heartbeat() -> None:
    """No later sequence number tells of it."""
    world = IngestWorld().settled()
    world.instance.insert(sample_object(0), MEMORY)
    world.flush()
    world.published.clear()
    world.heartbeat()
    world.drain()
    assert world.machine.state is SourceState.GAP
    world.tick(0.2)
    world.drain()

    assert is_equal(world)
    assert world.machine.metrics.lost_tails == 1


def test_what_cannot_be_replayed_is_asked_for_as_contents() -> None:
    world = IngestWorld(instance=SimulatedInstance(replay_batches=0)).settled()
    for number in (0, 2):
        world.instance.insert(sample_object(number), MEMORY)
    world.flush(1)
    del world.published[0]
    world.drain()
    world.tick(0.2)
    world.drain()

    assert world.machine.state is SourceState.LIVE
    assert is_equal(world)
    assert contents_asked(world)


def test_silent_drift_is_repaired_bucket_by_bucket() -> None:
    """A whole dump of millions of blocks for one that differs blocks everything for a minute."""
    world = IngestWorld(instance=loaded(*range(16))).settled()
    (lost, *_) = sorted(known(world)[0, MEMORY])
    del world.kvbm.workers["a"].tiers[0, MEMORY][lost]
    world.kvbm.workers["a"].tiers[0, MEMORY][b"\x07" * 32] = b""
    asked = len(contents_asked(world))
    world.settle()

    assert is_equal(world)
    (question,) = contents_asked(world)[asked:]
    assert set(question.buckets) == {lost[0], 7}
    assert world.machine.metrics.repaired_blocks == 2


def test_batches_during_a_repair_are_not_undone_by_it() -> None:
    """The answer may be older than what was applied while it was on its way."""
    world = IngestWorld(instance=loaded(*range(4))).settled()
    kept = world.kvbm.workers["a"].tiers[0, MEMORY]
    kept.clear()
    world.heartbeat()
    world.deliver()
    world.answer()
    world.instance.delete(sample_object(0), MEMORY)
    world.instance.insert(sample_object(9), MEMORY)
    world.flush(1)
    while world.published:
        world.deliver()
    while world.replies:
        world.reply()

    assert is_equal(world)


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


def test_an_answer_to_an_earlier_question_is_dropped() -> None:
    world = IngestWorld(instance=loaded(0)).settled()
    stale = Contents(FORMAT_VERSION, 1, world.instance.incarnation, 99, (), is_last=True)
    world.act(world.machine.on_reply(stale, 10, world.now))

    assert is_equal(world)
    assert world.machine.metrics.late == 1


def test_a_lost_part_of_an_answer_is_noticed() -> None:
    """A full socket drops the middle of an answer and delivers its end."""
    world = IngestWorld(instance=loaded(*range(12), part_facts=4))
    world.tick()
    for _ in range(2):
        world.answer()
        world.reply()
    world.answer()
    assert len(world.replies) > 2
    del world.replies[1]
    world.drain()
    assert world.machine.state is SourceState.SYNCING
    world.settle()
    assert is_equal(world)


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


def test_too_many_waiting_batches_begin_the_synchronisation_again() -> None:
    world = IngestWorld(instance=loaded(0), limits=SourceLimits(buffered_batches=3))
    world.tick()
    world.answer()
    world.reply()
    for number in range(2, 14):
        world.instance.insert(sample_object(number), MEMORY)
    world.flush(1)
    while world.published:
        world.deliver()
    assert world.machine.metrics.overflows > 0
    world.settle()
    assert is_equal(world)


def test_a_worker_that_another_source_feeds_is_left_alone() -> None:
    kvbm, instance = NaiveKVBM(), SimulatedInstance()
    machine = NativeMachine(kvbm, "second", claim=lambda worker_id: False)
    (ask,) = machine.on_tick(1.0)
    (reply,) = instance.answer(ask.question)  # type: ignore[union-attr]
    machine.on_reply(reply, 10, 1.0)

    assert machine.state is SourceState.INIT
    assert machine.metrics.conflicts == 1
    assert kvbm.workers == {}


def test_a_changed_description_is_fetched_without_a_new_synchronisation() -> None:
    world = IngestWorld(instance=loaded(0)).settled()
    synchronised = world.machine.metrics.snapshots
    world.instance.revision += 1
    world.heartbeat()
    world.drain()

    assert world.machine.state is SourceState.LIVE
    assert world.machine.metrics.snapshots == synchronised
    assert is_equal(world)


def test_a_refusal_is_asked_again_later() -> None:
    world = IngestWorld(instance=loaded(0))
    world.tick()
    refused = Refused(FORMAT_VERSION, world.asked[-1].request_id, "begun anew")
    world.act(world.machine.on_reply(refused, 10, world.now))
    world.questions.clear()
    assert world.machine.metrics.refused == 1
    world.tick(1.0)
    world.settle()
    assert is_equal(world)


def test_one_refusal_does_not_cost_what_is_known() -> None:
    """An instance that begins anew refuses what was asked before; its disk is still its disk."""
    world = IngestWorld(instance=loaded(0, tier=DISK)).settled()
    world.machine.on_fault(world.now)
    world.tick(1.0)
    refused = Refused(FORMAT_VERSION, world.asked[-1].request_id, "begun anew")
    world.act(world.machine.on_reply(refused, 10, world.now))

    assert world.machine.metrics.purges == 0
    assert is_equal(world)


def test_an_index_that_is_too_small_is_not_asked_to_repair_itself_for_ever() -> None:
    """It differs after every repair; the questions become rarer and rarer."""
    world = IngestWorld(KVBM(max_entries=3), instance=loaded(*range(16)))
    world.tick()
    for _ in range(120):
        world.heartbeat()
        world.drain()
        world.tick(1.0)

    assert world.machine.metrics.digest_mismatches < 12


def test_a_wild_sequence_number_does_not_stop_the_source() -> None:
    world = IngestWorld(instance=loaded(0)).settled()
    sequence, world.instance.sequence = world.instance.sequence, 1 << 60
    world.instance.insert(sample_object(2), MEMORY)
    wild = world.instance.flush()
    world.instance.sequence = sequence
    world.published += wild
    world.deliver()
    world.settle()

    assert is_equal(world)


def test_replay_is_asked_from_the_first_missing_batch() -> None:
    world = IngestWorld().settled()
    for number in range(3):
        world.instance.insert(sample_object(number), MEMORY)
    world.flush(1)
    del world.published[1]
    world.drain()
    world.tick(0.2)

    assert isinstance(world.asked[-1], AskReplay)
    assert world.asked[-1].first_sequence == 1


def test_a_repair_during_which_too_much_happened_is_done_again() -> None:
    limits = SourceLimits(buffered_batches=1)
    world = IngestWorld(instance=loaded(*range(0, 8, 2)), limits=limits).settled()
    world.kvbm.workers["a"].tiers[0, MEMORY].clear()
    world.heartbeat()
    world.deliver()
    world.answer()
    for number in range(8, 40):
        world.instance.insert(sample_object(number), MEMORY)
    world.flush(1)
    while world.published:
        world.deliver()
    while world.replies:
        world.reply()
    assert len(known(world)[0, MEMORY]) >= 32, "an old answer must not undo what came since"
    world.settle()

    assert is_equal(world)


def test_time_in_each_state_is_counted() -> None:
    world = IngestWorld(instance=loaded(0)).settled()
    before = world.machine.metrics.seconds[SourceState.LIVE]
    world.tick(1.5)
    world.tick(1.0)

    assert world.machine.metrics.seconds[SourceState.LIVE] - before == pytest.approx(2.5)
