"""What an instance's native channel may go through, one fault at a time."""

import pytest
from ingest_world import IngestWorld, contents_asked, is_equal, known, loaded
from naive_kvbm import NaiveKVBM
from simulated_instance import DISK, MEMORY, SimulatedInstance, sample_object

from opal_connector.cluster.ingest import NativeMachine, SourceLimits, SourceState
from opal_connector.cluster.kvbm import KVBM
from opal_connector.events import DEVICE_TIER
from opal_connector.events.channel import (
    FORMAT_VERSION,
    AskReplay,
    Contents,
    Refused,
)


def test_it_subscribes_before_it_asks_what_there_is() -> None:
    """A batch between the answer and the subscription would be missed."""
    world = IngestWorld(instance=loaded(0, 1))
    world.tick()
    world.answer()
    world.reply()

    assert world.subscriptions == ["tcp://*:1"]
    assert len(world.asked) == 2
    assert world.machine.state is SourceState.SYNCING


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
