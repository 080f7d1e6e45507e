"""The parts that both kinds of source are made of."""

from collections.abc import Iterable

import pytest
from simulated_instance import DISK, MEMORY, SimulatedInstance, sample_object

from opal_connector.cluster.ingest import SourceLimits, SourceMetrics
from opal_connector.cluster.ingest.answers import ContentsParts
from opal_connector.cluster.ingest.conversation import Conversation
from opal_connector.cluster.ingest.follower import Follower
from opal_connector.cluster.ingest.pending import PendingBatches
from opal_connector.cluster.ingest.selection import Wanted, differences, events_for
from opal_connector.events import Copy, Delete, Insert, KVCEvent, Move, ObjectFact
from opal_connector.events.channel import (
    FORMAT_VERSION,
    AskDigests,
    Batch,
    Contents,
    TierDigest,
    decode_published,
)

FACT = ObjectFact(0, b"", b"a" * 32 + b"b" * 32, 1)
LIMITS = SourceLimits(buffered_batches=2, request_attempts=2, request_seconds=1.0)


def batches_of(instance: SimulatedInstance, size: int = 1) -> list[Batch]:
    made = [decode_published(payload) for payload in instance.flush(size)]
    return [batch for batch in made if isinstance(batch, Batch)]


class _Applied:
    """Remembers what was applied."""

    def __init__(self) -> None:
        self.events: list[KVCEvent] = []

    def __call__(self, events: Iterable[KVCEvent]) -> None:
        self.events += events


def follower() -> tuple[Follower, _Applied, SourceMetrics]:
    applied, metrics = _Applied(), SourceMetrics()
    return Follower(applied, LIMITS, metrics), applied, metrics


# ---- which facts are about which tier ----


def test_a_move_is_cut_where_it_touches_one_wanted_tier() -> None:
    """Each side keeps its own number of shared blocks."""
    move = Move(FACT, MEMORY, DISK, 0)

    assert events_for([move], lambda key: True) == [move]
    assert events_for([move], lambda key: key[1] == DISK) == [Insert(FACT, DISK)]
    left = ObjectFact(0, b"", FACT.block_hashes, 0)
    assert events_for([move], lambda key: key[1] == MEMORY) == [Delete(left, MEMORY)]
    assert events_for([move], lambda key: False) == []


def test_a_copy_is_about_its_target_alone() -> None:
    copy = Copy(FACT, MEMORY, DISK)

    assert events_for([copy], lambda key: key[1] == DISK) == [copy]
    assert events_for([copy], lambda key: key[1] == MEMORY) == []


def test_another_groups_facts_are_left_out() -> None:
    other = ObjectFact(1, b"", b"a" * 32)

    assert events_for([Insert(other, MEMORY)], lambda key: key == (0, MEMORY)) == []


# ---- in which tiers two sides differ ----


def digest(numbers: dict[int, int], *, count: int = 1, is_complete: bool = True) -> TierDigest:
    buckets = [numbers.get(number, 0) for number in range(256)]
    raw = b"".join(bucket.to_bytes(8, "little") for bucket in buckets)
    return TierDigest(0, MEMORY, count, raw, is_complete)


def test_few_differing_buckets_are_asked_for_singly_and_many_together() -> None:
    key = (0, MEMORY)
    few = differences(
        {key: digest({1: 5, 9: 7})}, {key: digest({1: 5, 9: 8})}, with_incomplete=True
    )
    many = {number: number + 1 for number in range(100)}
    all_of_it = differences({key: digest({})}, {key: digest(many)}, with_incomplete=True)

    assert few == [Wanted(key, bytes([9]))]
    assert all_of_it == [Wanted(key)]


def test_a_tier_that_is_still_looked_through_differs_only_by_what_it_has_more() -> None:
    key = (0, MEMORY)
    ours = {key: digest({1: 5, 2: 6}, count=2)}
    fewer = {key: digest({1: 5}, count=1, is_complete=False)}
    more = {key: digest({1: 5, 3: 7, 4: 8}, count=3, is_complete=False)}

    assert differences(ours, fewer, with_incomplete=False) == []
    assert differences(ours, fewer, with_incomplete=True)
    assert differences(ours, more, with_incomplete=False)


# ---- following ----


def test_a_tier_skips_the_batches_up_to_its_own_label() -> None:
    """Its contents have them already; applied again they would undo what came later."""
    instance = SimulatedInstance()
    for number in range(3):
        instance.insert(sample_object(2 * number), MEMORY)
        instance.insert(sample_object(2 * number), DISK)
    batches = batches_of(instance, 2)
    follows, applied, _ = follower()
    follows.resume(-1, {(0, MEMORY): 1}, 1.0)
    for batch in batches:
        assert follows.offer(batch, 10, 1.0)

    tiers = [event.tier for event in applied.events if isinstance(event, Insert)]
    assert tiers == [DISK, DISK, MEMORY, DISK]


def test_what_was_applied_during_a_repair_is_applied_to_it_again() -> None:
    instance = SimulatedInstance()
    for number in range(3):
        instance.insert(sample_object(2 * number), MEMORY)
    first, *rest = batches_of(instance)
    follows, applied, _ = follower()
    follows.resume(-1, {}, 1.0)
    follows.offer(first, 10, 1.0)
    follows.remember()
    for batch in rest:
        follows.offer(batch, 10, 1.0)
    applied.events.clear()
    follows.reapply((0, MEMORY), 1)

    assert applied.events == list(rest[1].events)
    assert not follows.is_remembering


def test_too_much_during_a_repair_is_not_remembered() -> None:
    """The repair is given up then, and found again by the next heartbeat."""
    instance = SimulatedInstance()
    for number in range(60):
        instance.insert(sample_object(number), MEMORY)
    follows, _, metrics = follower()
    follows.resume(-1, {}, 1.0)
    follows.remember()
    for batch in batches_of(instance):
        follows.offer(batch, 10, 1.0)

    assert not follows.is_remembering
    assert metrics.overflows == 1


def test_waiting_batches_are_bounded_by_number_and_bytes() -> None:
    by_number: PendingBatches[str] = PendingBatches(max_batches=2, max_bytes=1_000)
    by_bytes: PendingBatches[str] = PendingBatches(max_batches=100, max_bytes=10)
    for pending in (by_number, by_bytes):
        pending.add(5, "a", 6)
        assert not pending.is_full
        pending.add(3, "b", 6)
        assert pending.is_full
        assert pending.lowest() == 3
        assert pending.pop(3) == "b"
        assert not pending.is_full


# ---- asking ----


def test_every_attempt_has_its_own_number_and_the_earlier_ones_answers_are_none() -> None:
    """A late part of the first answer mixed into the second would be a third."""
    talk = Conversation(LIMITS)
    first = talk.ask(AskDigests(FORMAT_VERSION, 0), 1.0)
    assert not talk.is_overdue(1.9)
    assert talk.is_overdue(2.0)
    second = talk.again(2.0)
    assert second is not None
    assert not talk.is_answer(first.request_id)
    assert talk.is_answer(second.request_id)
    assert not talk.is_overdue(3.9), "the second attempt has more time"
    assert talk.again(4.0) is None
    assert talk.open is None


def test_holds_grow_until_all_is_well() -> None:
    talk = Conversation(LIMITS)
    holds = []
    for _ in range(8):
        talk.hold(100.0)
        hold = next(wait / 2 for wait in range(100) if talk.may_ask(100.0 + wait / 2))
        holds.append(hold)
    assert holds == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    talk.succeed()
    talk.hold(100.0)
    assert talk.may_ask(100.5)


# ---- answers in parts ----


def part(number: int, *, is_last: bool = False, sequence: int = 5, blocks: int = 1) -> Contents:
    fact = ObjectFact(0, b"", bytes([number]) * 32 * blocks)
    return Contents(FORMAT_VERSION, 1, 1, sequence, (fact,), is_last, True, number)


def test_an_answer_is_whole_with_all_of_its_parts_in_any_order() -> None:
    parts = ContentsParts(10_000)
    assert not parts.add(part(2, is_last=True, sequence=9))
    assert not parts.add(part(0))
    assert not parts.add(part(2, is_last=True, sequence=9))
    assert parts.add(part(1))
    assert len(parts.facts) == 3
    assert parts.sequence == 5, "all of it is true at the smallest label"


def test_an_answer_without_part_numbers_ends_with_its_last_part() -> None:
    parts = ContentsParts(10_000)
    assert not parts.add(part(0))
    assert parts.add(part(0, is_last=True))
    assert len(parts.facts) == 2


def test_an_answer_is_bounded() -> None:
    parts = ContentsParts(500)
    parts.add(part(0, blocks=4))
    with pytest.raises(MemoryError):
        parts.add(part(1, blocks=4))
