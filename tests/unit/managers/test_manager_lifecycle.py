"""The end of things: resets, requests that leave at any point, and counters."""

import random

import pytest
from fakes import (
    BLOCK_TOKENS,
    ROW_BYTES,
    done,
    hit_blocks,
    make_manager,
    plan,
    plan_load,
    replay,
    start,
    store,
)

from opal_connector.managers import LookupState, OpalKVCacheManager, one_table
from opal_connector.managers.counters import BookCounters
from opal_connector.transfers import JobResult


def is_at_rest(manager: OpalKVCacheManager) -> None:
    """I8: nothing promised, nothing open, and every row belongs to something that can be had."""
    manager.check()
    assert manager.lease_count == 0
    assert manager.open_job_count == 0
    for tier in manager.storage.tiers:
        readable = sum(
            len(record.rows)
            for key in tier.index.readable_keys()
            if (record := tier.get(key)) is not None
        )
        assert tier.used_bytes == readable * ROW_BYTES


# Reset.


def test_store_in_flight_at_a_reset_does_not_come_back() -> None:
    """Neither as a hit nor as an event; its rows are free when it ends."""
    manager = make_manager(rows=16)
    request = start(manager, range(4))
    job = plan(manager, request)
    manager.reset()
    manager.check()
    assert manager.storage.tiers[0].used_bytes == 4 * ROW_BYTES, (
        "rows are kept while they are written"
    )

    manager.commit(done(job))

    assert hit_blocks(manager, range(4)) == 0
    assert manager.take_events() == []
    is_at_rest(manager)
    store(manager, range(4))
    assert hit_blocks(manager, range(4)) == 4


def test_new_store_of_the_same_chunk_during_an_old_one_is_its_own() -> None:
    """Reset between two stores of one chunk: the old answer does not end the new store."""
    manager = make_manager(rows=16)
    old = plan(manager, start(manager, range(4), "old"))
    manager.reset()
    new = plan(manager, start(manager, range(4), "new"))
    assert old is not None
    assert new is not None
    rows = [{row for item in job.objects for row in item.tier_rows} for job in (old, new)]
    assert rows[0].isdisjoint(rows[1])

    manager.commit(done(old))
    assert hit_blocks(manager, range(4)) == 0
    manager.check()
    manager.commit(done(new))

    assert hit_blocks(manager, range(4)) == 4
    is_at_rest(manager)


def test_load_in_flight_at_a_reset_keeps_its_rows_until_it_ends() -> None:
    """The load finishes with the bytes it was promised; then they are free."""
    manager = make_manager(rows=4)
    store(manager, range(4))
    request = start(manager, range(4))
    manager.lookup(request, computed_blocks=0, max_blocks=4, now=0)
    job = plan_load(manager, request, range(4))
    contents = replay({}, manager.take_events())
    manager.reset()

    assert replay(contents, manager.take_events()) == {}
    assert plan(manager, start(manager, range(10, 14), "other")) is None
    manager.check()
    manager.commit(done(job))
    assert plan(manager, start(manager, range(10, 14), "third")) is not None
    manager.check()


def test_lookup_before_a_reset_promises_nothing_after_it() -> None:
    """A lease ends with the reset; the next lookup is a miss, the load all missing."""
    manager = make_manager(rows=16)
    store(manager, range(4))
    request = start(manager, range(4))
    manager.lookup(request, computed_blocks=0, max_blocks=4, now=0)

    manager.reset()

    assert manager.lease_count == 0
    assert plan_load(manager, request, range(4)).missing_block_ids == (0, 1, 2, 3)
    again = manager.lookup(request, computed_blocks=0, max_blocks=4, now=0)
    assert again.state is LookupState.MISS


def test_nobody_waits_for_a_store_that_a_reset_made_void() -> None:
    """After a reset a lookup is a miss at once."""
    manager = make_manager(rows=16)
    plan(manager, start(manager, range(4), "w"))
    manager.reset()

    result = manager.lookup(start(manager, range(4), "r"), computed_blocks=0, max_blocks=4, now=0)
    assert result.state is LookupState.MISS


def test_reset_of_empty_tiers_is_nothing() -> None:
    """Twice, and before the first request."""
    manager = make_manager(rows=16)
    manager.reset()
    manager.reset()

    assert manager.take_events() == []
    is_at_rest(manager)


# Requests that leave.


def test_ht_45_a_thousand_requests_leave_nothing_behind() -> None:
    """Prompts from nothing to many chunks, ended at any point, answered late: all books at rest."""
    manager = make_manager(rows=40, chunk_blocks=4)
    draw = random.Random(45)
    answers: list[JobResult] = []
    for number in range(1000):
        blocks = [draw.randint(0, 1) for _ in range(draw.randint(0, 9))]
        request = start(manager, blocks, f"r{number}")
        for _ in range(draw.randint(0, 2)):
            manager.lookup(request, computed_blocks=0, max_blocks=len(blocks), now=float(number))
        if draw.random() < 0.5:
            job = plan_load(manager, request, range(draw.randint(0, 9)))
            answers.append(JobResult(job.job_id, 0))
        if draw.random() < 0.7:
            stored = plan(manager, request, include_tail=draw.random() < 0.5)
            if stored is not None:
                answers.append(JobResult(stored.job_id, 0))
        manager.end_request(request)
        draw.shuffle(answers)
        while len(answers) > 5:
            manager.commit(answers.pop())
    for result in answers:
        manager.commit(result)

    is_at_rest(manager)
    assert manager.open_job_count == 0
    assert len(manager._leases._leased) == 0
    manager.reset()
    is_at_rest(manager)
    assert manager.storage.tiers[0].used_bytes == 0


def test_ht_45_prompt_below_one_block_is_nothing_to_the_books() -> None:
    """No block, no lease, no job, no row."""
    manager = make_manager(rows=16)
    request = manager.new_request("r")
    request.extend([1] * (BLOCK_TOKENS - 1))

    result = manager.lookup(request, computed_blocks=0, max_blocks=0, now=0)
    assert result.state is LookupState.MISS
    assert plan(manager, request) is None
    manager.end_request(request)
    is_at_rest(manager)


def test_end_of_a_request_counts_as_a_use_of_its_chain() -> None:
    """A chat that goes on keeps its chunks; within it the head is used last."""
    manager = make_manager(rows=4, chunk_blocks=1)
    chat = store(manager, [0, 1])
    store(manager, [7])
    store(manager, [8])
    manager.end_request(chat)
    store(manager, [20])
    store(manager, [21])

    assert hit_blocks(manager, [0, 1]) == 2


# Counters.


def test_counters_are_taken_once() -> None:
    """Increments since the last call; nothing is nothing."""
    manager = make_manager(rows=16)
    job = plan(manager, start(manager, range(4)))
    assert job is not None
    manager.commit(JobResult(job.job_id, 0, {}, {0: (96, 0.5)}))

    assert manager.take_counters() == {
        "store_bytes": {"CPUMemory": 96},
        "store_seconds": {"CPUMemory": 0.5},
    }
    assert manager.take_counters() == {}


def test_bytes_of_every_rank_are_counted() -> None:
    """Also of the ranks that answer before the last, and of loads apart from stores."""
    manager = make_manager(rows=16, ranks=2)
    job = plan(manager, start(manager, range(2)))
    assert job is not None
    for rank in range(2):
        manager.commit(JobResult(job.job_id, rank, {}, {0: (48, 0.25)}))
    request = start(manager, range(2), "l")
    manager.lookup(request, computed_blocks=0, max_blocks=2, now=0)
    load_job = plan_load(manager, request, range(2))
    for rank in range(2):
        manager.commit(JobResult(load_job.job_id, rank, {}, {0: (48, 0.25)}))

    counters = manager.take_counters()
    assert counters["store_bytes"] == counters["load_bytes"] == {"CPUMemory": 96}
    assert counters["store_seconds"] == counters["load_seconds"] == {"CPUMemory": 0.5}


@pytest.mark.parametrize(
    ("hits", "queried", "hit_tokens", "miss_tokens"),
    [
        ({}, 100, {}, {"A": 100, "B": 100}),
        ({"A": 100}, 100, {"A": 100}, {}),
        ({"A": 40}, 100, {"A": 40}, {"A": 60, "B": 60}),
        ({"B": 40}, 100, {"B": 40}, {"A": 100, "B": 60}),
        ({"A": 40, "B": 60}, 100, {"A": 40, "B": 60}, {"A": 60}),
        ({}, 0, {}, {}),
    ],
)
def test_tier_is_asked_for_what_the_faster_ones_did_not_have(
    hits: dict[str, int], queried: int, hit_tokens: dict[str, int], miss_tokens: dict[str, int]
) -> None:
    """Hits and misses in tokens, per tier, in the order of the tiers."""
    counters = BookCounters()

    counters.add_admission(("A", "B"), hits, queried)

    taken = counters.take()
    assert taken.get("hit_tokens", {}) == hit_tokens
    assert taken.get("miss_tokens", {}) == miss_tokens


def test_counters_of_two_managers_are_apart() -> None:
    """No mutable default is shared."""
    one, other = make_manager(rows=16), make_manager(rows=16)
    one.count_admission({"CPUMemory": 5}, 10)

    assert other.take_counters() == {}
    assert one.take_counters() == {
        "hit_tokens": {"CPUMemory": 5},
        "miss_tokens": {"CPUMemory": 5},
    }


def test_disabled_event_log_keeps_nothing() -> None:
    """Where nobody listens, nothing grows, and tokens are not copied."""
    manager = make_manager(rows=16)
    manager.storage.log.enabled = False
    request = start(manager, range(4))
    job = manager.plan_store(
        request, full_blocks=4, tables=one_table(range(4)), include_tail=True, tokens=range(8)
    )
    assert job is not None
    (open_job,) = manager._jobs
    assert all(item.token_ids == () for item in open_job.objects)
    manager.commit(done(job))

    assert len(manager.storage.log) == 0
    assert manager.take_events() == []


def test_auditor_of_the_manager_finds_a_lease_that_nobody_holds() -> None:
    """check() counts leases from the requests and jobs, not from the records."""
    manager = make_manager(rows=16)
    store(manager, range(2))
    record = manager.storage.tiers[0].get(manager.storage.tiers[0].index.readable_keys()[0])
    assert record is not None
    manager.storage.tiers[0].pin(record)

    with pytest.raises(AssertionError, match="leases"):
        manager.check()


def test_repr_shows_the_counts() -> None:
    """Jobs, leases and tiers at a glance."""
    manager = make_manager(rows=16)
    store(manager, range(4))
    manager.lookup(start(manager, range(4)), computed_blocks=0, max_blocks=4, now=0)

    assert repr(manager).startswith("<OpalKVCacheManager 0 jobs, 1 leases, <OpalStorageManager")
