"""Stores: what is planned, what is refused and why, and what the events say of it."""

from collections.abc import Sequence

import pytest
from fakes import (
    BLOCK_TOKENS,
    ROW_BYTES,
    done,
    hit_blocks,
    make_manager,
    replay,
    start,
    store,
    tokens_of,
)

from opal_connector.events import Delete, Insert, KVCEvent
from opal_connector.keys import CHAIN_ROOT
from opal_connector.managers import OpalKVCacheManager, OpalRequest, one_table
from opal_connector.transfers import FailureKind, JobResult, StoreJob


def plan_to(
    manager: OpalKVCacheManager,
    request: OpalRequest,
    full_blocks: int,
    *,
    include_tail: bool = False,
    max_blocks: int | None = None,
) -> StoreJob | None:
    """Plan up to `full_blocks`; paged blocks are numbered from 100."""
    return manager.plan_store(
        request,
        full_blocks=full_blocks,
        tables=one_table(range(100, 100 + full_blocks)),
        include_tail=include_tail,
        max_blocks=max_blocks,
    )


def sources(job: StoreJob | None) -> list[tuple[int, ...]]:
    return [item.block_ids for item in job.objects] if job is not None else []


def summary(events: Sequence[KVCEvent]) -> list[tuple[str, int, int]]:
    """Kind, blocks and shared blocks of each event."""
    return [
        (type(event).__name__, len(event.fact.block_hashes) // 32, event.fact.shared_blocks)
        for event in events
    ]


# What is planned.


def test_whole_chunks_are_planned_once_as_they_complete() -> None:
    """Chunk by chunk while the request grows, each from its own blocks; nothing twice."""
    manager = make_manager(rows=64, chunk_blocks=2)
    request = start(manager, range(7))

    assert plan_to(manager, request, 1) is None
    assert sources(plan_to(manager, request, 2)) == [(100, 101)]
    assert plan_to(manager, request, 3) is None
    assert sources(plan_to(manager, request, 7)) == [(102, 103), (104, 105)]
    assert plan_to(manager, request, 7) is None
    manager.check()


def test_job_names_rows_blocks_and_stamps_alike() -> None:
    """The worker needs nothing else: row i holds block i, whose hash is stamp i."""
    manager = make_manager(rows=64, chunk_blocks=2)
    request = start(manager, range(4))

    job = plan_to(manager, request, 4)

    assert job is not None
    assert b"".join(item.stamps for item in job.objects) == b"".join(request.chain.hashes)
    assert [row for item in job.objects for row in item.tier_rows] == [0, 1, 2, 3]
    assert {(item.tier, item.group) for item in job.objects} == {(0, 0)}


def test_ht_30_fewer_blocks_than_tokens_store_only_what_has_a_block() -> None:
    """After a preemption the block table is short: no key without a block, no assertion."""
    manager = make_manager(rows=64, chunk_blocks=1)
    request = start(manager, range(8))
    job = manager.plan_store(
        request, full_blocks=8, tables=one_table([100, 101]), include_tail=True
    )

    assert sources(job) == [(100,), (101,)]
    assert sources(plan_to(manager, request, 8)) == [(block,) for block in range(102, 108)]


def test_ht_32_more_computed_than_hashed_stores_only_what_is_hashed() -> None:
    """Tokens that the request does not have yet have no hash, so they are not stored."""
    manager = make_manager(rows=64, chunk_blocks=1)
    request = start(manager, range(3))

    assert sources(plan_to(manager, request, 4)) == [(100,), (101,), (102,)]


def test_tail_is_stored_only_when_asked_for() -> None:
    """Whole blocks after the last whole chunk, at the end of a prompt or request."""
    manager = make_manager(rows=64, chunk_blocks=4)
    request = start(manager, range(6))

    assert sources(plan_to(manager, request, 6)) == [(100, 101, 102, 103)]
    assert sources(plan_to(manager, request, 6, include_tail=True)) == [(104, 105)]


def test_tail_is_never_stored_where_it_is_not_wanted() -> None:
    """save_unfull_chunk off."""
    manager = make_manager(rows=64, chunk_blocks=4, save_unfull_chunk=False)

    assert sources(plan_to(manager, start(manager, range(6)), 6, include_tail=True)) == [
        (100, 101, 102, 103)
    ]
    assert plan_to(manager, start(manager, [9, 9]), 2, include_tail=True) is None


def test_bounded_plan_takes_the_head_and_leaves_the_rest_for_later() -> None:
    """Backpressure: so many blocks now, counted as dropped, and the rest with the next plan."""
    manager = make_manager(rows=64, chunk_blocks=2)
    request = start(manager, range(8))

    assert sources(plan_to(manager, request, 8, max_blocks=5)) == [(100, 101), (102, 103)]
    assert manager.take_counters()["dropped_stores"] == {"in_flight": 1}
    assert plan_to(manager, request, 8, max_blocks=1) is None
    assert sources(plan_to(manager, request, 8, max_blocks=4)) == [(104, 105), (106, 107)]


def test_present_chunks_are_passed_over() -> None:
    """A prompt whose beginning is stored stores its end."""
    manager = make_manager(rows=64, chunk_blocks=2)
    store(manager, range(4))
    request = start(manager, range(8))

    assert sources(plan_to(manager, request, 8)) == [(104, 105), (106, 107)]
    assert request.stored_tokens == 8 * BLOCK_TOKENS


def test_chunk_that_another_request_writes_is_not_written_twice() -> None:
    """One write per key at a time."""
    manager = make_manager(rows=64, chunk_blocks=2)
    plan_to(manager, start(manager, range(4), "first"), 4)

    assert plan_to(manager, start(manager, range(4), "second"), 4) is None
    assert sources(plan_to(manager, start(manager, range(6), "third"), 6)) == [(104, 105)]
    manager.check()


# Refusals.


@pytest.mark.parametrize(
    ("rows", "held", "reason"),
    [(1, [], "too_large"), (4, [0, 1, 2, 3], "full")],
    ids=["too_large", "full"],
)
def test_refusal_is_counted_by_its_reason(rows: int, held: list[int], reason: str) -> None:
    """A store that is not made is a number that a person can look at."""
    manager = make_manager(rows=rows, chunk_blocks=2)
    store(manager, held)
    holder = start(manager, held, "holder")
    manager.lookup(holder, computed_blocks=0, max_blocks=4, now=0)

    assert plan_to(manager, start(manager, range(10, 14)), 4) is None
    assert manager.take_counters()["dropped_stores"] == {reason: 1}
    manager.check()


def test_chunk_behind_a_lost_parent_is_stored_again_from_the_parent_on() -> None:
    """The head left the tier while its request ran: what follows is not lost for ever."""
    manager = make_manager(rows=64, chunk_blocks=2)
    request = start(manager, range(8))
    manager.commit(done(plan_to(manager, request, 4)))
    manager.reset()

    manager.commit(done(plan_to(manager, request, 6) or plan_to(manager, request, 6)))

    assert hit_blocks(manager, range(8)) == 6


def test_chunk_behind_another_requests_failed_write_is_stored_again() -> None:
    """B passed over what A was writing; A's write failed: B stores it with its next chunk."""
    manager = make_manager(rows=64, chunk_blocks=2)
    first, second = start(manager, range(2), "a"), start(manager, range(6), "b")
    failing = plan_to(manager, first, 2)
    assert plan_to(manager, second, 2) is None
    manager.commit(done(failing, failed={0: FailureKind.IO}))

    manager.commit(done(plan_to(manager, second, 4) or plan_to(manager, second, 4)))

    assert hit_blocks(manager, range(6)) == 4


def test_prompt_longer_than_the_pool_keeps_its_head() -> None:
    """What cannot be kept is the end; a tail never pushes out its own head."""
    manager = make_manager(rows=6, chunk_blocks=2)
    request = start(manager, range(12))

    job = plan_to(manager, request, 12, include_tail=True)

    assert sources(job) == [(100, 101), (102, 103), (104, 105)]
    manager.commit(done(job))
    manager.check()
    assert plan_to(manager, request, 12, include_tail=True) is None
    assert hit_blocks(manager, range(12)) == 6
    assert request.stored_tokens == 6 * BLOCK_TOKENS


def test_ht_57_store_evicts_the_shortfall_and_the_oldest() -> None:
    """Pool of ten, eight free, ten needed: two leave."""
    manager = make_manager(rows=10, chunk_blocks=1)
    store(manager, [1])
    store(manager, [2])
    plan_to(manager, start(manager, range(10, 20)), 9)
    assert manager.take_counters()["evictions"] == {"CPUMemory": 1}
    assert (hit_blocks(manager, [1]), hit_blocks(manager, [2])) == (0, 1)
    manager.check()


# Events.


def test_tail_that_grew_to_a_chunk_is_replaced_by_it() -> None:
    """INSERT of the chunk, of which the tail's blocks were there, then DELETE of the tail."""
    manager = make_manager(rows=64, chunk_blocks=4)
    request = start(manager, range(4))
    manager.commit(done(plan_to(manager, request, 3, include_tail=True)))
    assert summary(manager.take_events()) == [("Insert", 3, 0)]

    manager.commit(done(plan_to(manager, request, 4)))

    events = manager.take_events()
    assert summary(events) == [("Insert", 4, 3), ("Delete", 3, 3)]
    assert events[1].fact.chunk_hash == request.chain.hashes[2]
    assert manager.storage.tiers[0].used_bytes == 4 * ROW_BYTES
    assert hit_blocks(manager, range(4)) == 4
    manager.check()


def test_tail_that_grew_to_a_longer_tail_is_replaced_by_it() -> None:
    """Turn by turn a chat's last chunk fills; only its longest tail stays."""
    manager = make_manager(rows=64, chunk_blocks=4)
    for length in (5, 6, 7):
        store(manager, range(length))

    assert summary(manager.take_events()) == [
        ("Insert", 4, 0),
        ("Insert", 1, 0),
        ("Insert", 2, 1),
        ("Delete", 1, 1),
        ("Insert", 3, 2),
        ("Delete", 2, 2),
    ]
    assert manager.storage.tiers[0].used_bytes == 7 * ROW_BYTES


def test_event_carries_the_tokens_of_its_blocks() -> None:
    """Consumers that hash themselves need exactly the object's own tokens."""
    manager = make_manager(rows=64, chunk_blocks=2)
    request = manager.new_request("r", lora_name="sql")
    tokens = [*tokens_of(range(5)), 777]
    request.extend(tokens)
    job = manager.plan_store(
        request, full_blocks=5, tables=one_table(range(5)), include_tail=True, tokens=tokens
    )
    manager.commit(done(job))

    events = manager.take_events()
    assert [event.token_ids for event in events if isinstance(event, Insert)] == [
        tuple(tokens[0:4]),
        tuple(tokens[4:8]),
        tuple(tokens[8:10]),
    ]
    assert {event.lora_name for event in events if isinstance(event, Insert)} == {"sql"}
    assert [event.fact.parent_hash for event in events][1:] == [
        request.chain.hashes[1],
        request.chain.hashes[3],
    ]


def test_nothing_is_announced_before_it_is_there() -> None:
    """A plan is no fact; neither is the answer of one rank of two (HT-15)."""
    manager = make_manager(rows=64, chunk_blocks=2, ranks=2)
    job = plan_to(manager, start(manager, range(2)), 2)
    assert job is not None
    assert manager.take_events() == []

    assert manager.commit(JobResult(job.job_id, 1)) is None
    assert manager.take_events() == []
    assert hit_blocks(manager, range(2)) == 0
    assert manager.commit(JobResult(job.job_id, 0)) is not None
    assert summary(manager.take_events()) == [("Insert", 2, 0)]


# Failures.


def test_ht_03_failed_store_is_retried_and_never_present() -> None:
    """A failed key is a miss, is not deduplicated against, and the next store succeeds."""
    manager = make_manager(rows=64, chunk_blocks=2)
    request = start(manager, range(6))
    job = plan_to(manager, request, 6)
    manager.commit(done(job, failed={1: FailureKind.IO}))
    manager.check()
    assert hit_blocks(manager, range(6)) == 2
    assert request.stored_tokens == 2 * BLOCK_TOKENS
    assert manager.take_counters()["failures"] == {"io": 1}

    again = plan_to(manager, request, 6)

    assert sources(again) == [(102, 103), (104, 105)], "what follows a failed chunk goes with it"
    manager.commit(done(again))
    assert hit_blocks(manager, range(6)) == 6
    assert request.stored_tokens == 6 * BLOCK_TOKENS
    assert set(replay({}, manager.take_events())) == set(manager.storage.placements())


def test_parent_is_announced_before_a_child_that_was_written_first() -> None:
    """Two requests, two jobs: the second one's is done first, and waits for the first one's."""
    manager = make_manager(rows=64, chunk_blocks=2)
    head = plan_to(manager, start(manager, range(2), "head"), 2)
    child = plan_to(manager, start(manager, range(4), "child"), 4)
    assert sources(child) == [(102, 103)]

    manager.commit(done(child))
    manager.check()
    assert manager.take_events() == []
    manager.commit(done(head))

    assert [event.fact.parent_hash == CHAIN_ROOT for event in manager.take_events()] == [
        True,
        False,
    ]
    assert hit_blocks(manager, range(4)) == 4
    manager.check()


@pytest.mark.parametrize("end", ["failure", "reset"])
def test_child_that_waits_for_its_parent_goes_with_it(end: str) -> None:
    """Its write fails, or the tier is emptied: the child frees its rows, too."""
    manager = make_manager(rows=64, chunk_blocks=2)
    head = plan_to(manager, start(manager, range(2), "head"), 2)
    child = plan_to(manager, start(manager, range(4), "child"), 4)
    manager.commit(done(child))
    if end == "reset":
        manager.reset()

    manager.commit(done(head, failed={0: FailureKind.IO} if end == "failure" else {}))

    manager.check()
    assert manager.take_events() == []
    assert manager.storage.tiers[0].used_bytes == 0


def test_ht_03_other_request_stores_what_failed() -> None:
    """The poison of one request is not the truth of the next."""
    manager = make_manager(rows=64, chunk_blocks=2)
    job = plan_to(manager, start(manager, range(2), "a"), 2)
    manager.commit(done(job, failed={0: FailureKind.IO}))

    store(manager, range(2))

    assert hit_blocks(manager, range(2)) == 2


def test_ht_15_store_that_failed_on_one_rank_failed_on_all() -> None:
    """Half a tensor-parallel chunk is no chunk."""
    manager = make_manager(rows=64, chunk_blocks=2, ranks=2)
    job = plan_to(manager, start(manager, range(4)), 4)
    assert job is not None
    manager.commit(JobResult(job.job_id, 0, {1: FailureKind.IO}))
    manager.commit(JobResult(job.job_id, 1))

    assert hit_blocks(manager, range(4)) == 2
    assert summary(manager.take_events()) == [("Insert", 2, 0)]
    manager.check()


def test_store_outlives_its_request() -> None:
    """The request ended first; what its store brought is there all the same."""
    manager = make_manager(rows=64, chunk_blocks=2)
    request = start(manager, range(4))
    job = plan_to(manager, request, 4)
    manager.end_request(request)

    manager.commit(done(job))

    assert hit_blocks(manager, range(4)) == 4
    assert manager.open_job_count == 0
    manager.check()


def test_deleted_tail_is_no_delete_of_its_blocks() -> None:
    """A DELETE names what the tier still holds through another object."""
    manager = make_manager(rows=64, chunk_blocks=4)
    store(manager, range(2))
    store(manager, range(3))
    deletes = [event for event in manager.take_events() if isinstance(event, Delete)]

    assert summary(deletes) == [("Delete", 2, 2)]
