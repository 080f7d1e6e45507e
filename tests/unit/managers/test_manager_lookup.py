"""Lookups: whole blocks, parts of siblings, waiting, and promises that end."""

import pytest
from fakes import BLOCK_TOKENS, done, hit_blocks, make_manager, plan, plan_load, start, store

from opal_connector.keys import OpalTokenDatabase, RequestIdentity, plain_layout
from opal_connector.managers import (
    LookupResult,
    LookupState,
    NoPrefixCache,
    OpalKVCacheManager,
    OpalRequest,
    Unitary,
)
from opal_connector.managers.leases import LEASE_SECONDS, WAIT_SECONDS
from opal_connector.transfers import FailureKind


def look(
    manager: OpalKVCacheManager,
    request: OpalRequest,
    *,
    computed: int = 0,
    most: int | None = None,
    now: float = 0.0,
) -> LookupResult:
    """A lookup; `most` is the whole sequence unless given."""
    blocks = len(request.chain.hashes) if most is None else most
    result = manager.lookup(request, computed_blocks=computed, max_blocks=blocks, now=now)
    manager.check()
    return result


# How much.


@pytest.mark.parametrize(
    ("stored", "asked", "hit"),
    [
        (range(8), range(8), 8),
        (range(8), range(12), 8),
        (range(8), range(6), 6),
        (range(8), range(5), 5),
        (range(7), range(7), 7),
        (range(7), range(9), 7),
        (range(8), [0, 1, 2, 3, 4, 9, 9], 5),
        (range(8), [0, 9, 2, 3], 1),
        (range(8), [9, 1, 2, 3], 0),
        ([], range(4), 0),
    ],
    ids=[
        "all",
        "longer-prompt",
        "shorter-prompt",
        "shorter-inside-a-chunk",
        "tail",
        "tail-of-a-longer-prompt",
        "parts-inside-a-chunk",
        "parts-in-the-first-chunk",
        "other",
        "empty",
    ],
)
def test_hit_is_the_longest_common_beginning_in_whole_blocks(
    stored: list[int], asked: list[int], hit: int
) -> None:
    """Chunks of four blocks do not round a hit: any stored block of the beginning counts."""
    manager = make_manager(rows=64, chunk_blocks=4)
    store(manager, stored)

    assert hit_blocks(manager, list(asked)) == hit


@pytest.mark.parametrize(
    ("computed", "most", "hit"),
    [
        (0, 8, 8),
        (4, 8, 4),
        (3, 8, 5),
        (5, 8, 3),
        (3, 4, 1),
        (2, 3, 1),
        (0, 7, 7),
        (8, 8, 0),
        (9, 8, 0),
    ],
)
def test_ht_42_hit_counts_what_is_new(computed: int, most: int, hit: int) -> None:
    """Blocks behind the computed ones, up to the most that may be had; never the total."""
    manager = make_manager(rows=64, chunk_blocks=4)
    store(manager, range(8))

    result = look(manager, start(manager, range(8)), computed=computed, most=most)

    assert result.block_count == hit
    assert result.tier_tokens == ({"CPUMemory": hit * BLOCK_TOKENS} if hit else {})
    assert result.state is (LookupState.HIT if hit else LookupState.MISS)


def test_most_blocks_beyond_the_chain_are_cut() -> None:
    """HT-32: computed tokens may run ahead of the hashed ones; what is not hashed is not had."""
    manager = make_manager(rows=64, chunk_blocks=4)
    store(manager, range(8))

    assert look(manager, start(manager, range(6), "a"), most=8).block_count == 6
    assert look(manager, start(manager, range(6), "b"), computed=7, most=8).block_count == 0


def test_several_siblings_and_the_longest_is_taken() -> None:
    """Chunks that part at different places: the request gets the one it shares most with."""
    manager = make_manager(rows=64, chunk_blocks=4)
    for tail in ([8, 8, 8], [2, 8, 8], [2, 3, 8]):
        store(manager, [0, 1, 2, 3, 1, *tail])

    assert hit_blocks(manager, [0, 1, 2, 3, 1, 2, 3, 9]) == 7
    assert hit_blocks(manager, [0, 1, 2, 3, 1, 2, 9, 9]) == 6
    assert hit_blocks(manager, [0, 1, 2, 3, 1, 9, 9, 9]) == 5
    assert hit_blocks(manager, [0, 1, 2, 3, 9, 9, 9, 9]) == 4


def test_other_identity_hits_nothing() -> None:
    """HT-20, HT-23: the books only ever see the chain, so adapters and salts are apart."""
    manager = make_manager(rows=64)
    store(manager, range(8))
    salted = manager.new_request("salted", RequestIdentity(cache_salt="x"))
    salted.extend(range(8 * BLOCK_TOKENS))

    assert look(manager, salted).state is LookupState.MISS


def test_manager_without_a_group_to_serve_never_hits_and_never_stores() -> None:
    """NoPrefixCache is an answer, not a special case in seven places."""
    manager = OpalKVCacheManager(
        database=OpalTokenDatabase(block_tokens=BLOCK_TOKENS, chunk_blocks=2),
        storage=make_manager(rows=64).storage,
        coordinator=NoPrefixCache((), plain_layout(BLOCK_TOKENS)),
    )
    request = start(manager, range(4))

    assert look(manager, request).state is LookupState.MISS
    assert plan(manager, request) is None
    manager.end_request(request)
    manager.check()


def test_unitary_coordinator_serves_exactly_one_group() -> None:
    """Several groups need another coordinator, and this one says so."""
    storage = make_manager(rows=4).storage
    with pytest.raises(ValueError, match="one group expected, found 0"):
        Unitary(storage, [], plain_layout(BLOCK_TOKENS))


# Waiting.


def test_ht_10_block_that_is_being_written_is_waited_for_and_then_hit() -> None:
    """WRITING is neither a hit nor, for a while, a miss."""
    manager = make_manager(rows=64)
    job = plan(manager, start(manager, range(4), "writer"))
    reader = start(manager, range(4), "reader")

    assert look(manager, reader).state is LookupState.WAIT
    assert manager.lease_count == 0
    manager.commit(done(job))
    assert look(manager, reader).block_count == 4


def test_ht_10_waiting_is_bounded() -> None:
    """A write that does not end costs a request a moment, not its life."""
    manager = make_manager(rows=64)
    plan(manager, start(manager, range(4), "writer"))
    reader = start(manager, range(4), "reader")

    assert look(manager, reader, now=10.0).state is LookupState.WAIT
    assert look(manager, reader, now=10.0 + WAIT_SECONDS / 2).state is LookupState.WAIT
    assert look(manager, reader, now=10.0 + WAIT_SECONDS).state is LookupState.MISS
    assert look(manager, reader, now=10.1 + WAIT_SECONDS).state is LookupState.MISS


def test_what_is_ready_is_had_when_waiting_is_over() -> None:
    """Half of the prompt is there, half is coming: at the bound the first half is a hit."""
    manager = make_manager(rows=64)
    store(manager, range(4))
    plan(manager, start(manager, range(8), "writer"))
    reader = start(manager, range(8), "reader")

    assert look(manager, reader, now=0.0).state is LookupState.WAIT
    assert look(manager, reader, now=WAIT_SECONDS).block_count == 4


def test_nobody_waits_for_a_write_that_brings_nothing() -> None:
    """What is being written behind another beginning, or is shorter than what is there."""
    manager = make_manager(rows=64, chunk_blocks=4)
    store(manager, range(8))
    plan(manager, start(manager, [9, 9, 9, 9], "other"))
    plan(manager, start(manager, [0, 1, 2, 9], "sibling"))

    assert look(manager, start(manager, range(8), "a")).block_count == 8
    assert look(manager, start(manager, range(3), "b")).block_count == 3


def test_nobody_waits_for_a_write_that_failed() -> None:
    """A failed write is a miss at once."""
    manager = make_manager(rows=64)
    job = plan(manager, start(manager, range(4), "writer"))
    reader = start(manager, range(4), "reader")
    assert look(manager, reader).state is LookupState.WAIT
    failures = dict.fromkeys(range(2), FailureKind.IO)

    manager.commit(done(job, failed=failures))

    assert look(manager, reader).state is LookupState.MISS


def test_object_that_is_being_loaded_is_waited_for() -> None:
    """No object is loaded twice at once: the second request asks again and then hits."""
    manager = make_manager(rows=64)
    store(manager, range(4))
    first, second = start(manager, range(4), "first"), start(manager, range(4), "second")
    look(manager, first)
    job = plan_load(manager, first, range(4))

    assert look(manager, second).state is LookupState.WAIT
    manager.commit(done(job))
    assert look(manager, second).block_count == 4


def test_what_lies_before_a_load_is_had_when_waiting_is_over() -> None:
    """The second request gets the chunks that the first does not load, then no more."""
    manager = make_manager(rows=64)
    store(manager, range(4))
    first, second = start(manager, range(4), "first"), start(manager, range(4), "second")
    look(manager, first, computed=2)
    plan_load(manager, first, range(2), computed=2)

    assert look(manager, second, now=0.0).state is LookupState.WAIT
    assert look(manager, second, now=WAIT_SECONDS).block_count == 2


def test_no_object_is_loaded_twice_also_by_requests_that_both_had_a_hit() -> None:
    """Both looked up before either loads: when one has begun, the other's answer is no hit."""
    manager = make_manager(rows=64)
    store(manager, range(4))
    first, second = start(manager, range(4), "first"), start(manager, range(4), "second")
    assert look(manager, first).state is LookupState.HIT
    assert look(manager, second).state is LookupState.HIT

    plan_load(manager, first, range(4))

    assert look(manager, second).state is LookupState.WAIT


# Promises.


def test_asking_again_is_idempotent_and_free() -> None:
    """HT-49: the same question has the same answer and takes no second lease."""
    manager = make_manager(rows=64)
    store(manager, range(4))
    request = start(manager, range(4))
    first = look(manager, request)
    records = [segment.record for segment in request.lease.segments] if request.lease else []
    walks: list[int] = []
    walk = manager.coordinator.find_hit
    manager.coordinator.find_hit = lambda *args, **kwargs: (  # type: ignore[method-assign]
        walks.append(1) or walk(*args, **kwargs)
    )

    assert [look(manager, request) for _ in range(5)] == [first] * 5
    assert walks == []
    assert [record.leases for record in records] == [1, 1]
    assert manager.lease_count == 1
    manager.end_request(request)
    assert [record.leases for record in records] == [0, 0]


def test_answer_is_new_when_the_books_are_new() -> None:
    """A store that ended since the first lookup is in the second."""
    manager = make_manager(rows=64)
    store(manager, range(2))
    request = start(manager, range(4))
    assert look(manager, request).block_count == 2
    store(manager, range(4))

    assert look(manager, request).block_count == 4
    assert look(manager, request, computed=2).block_count == 2
    assert look(manager, request, most=3).block_count == 3


def test_ht_49_two_requests_of_one_id_have_their_own_promises() -> None:
    """An id that comes again before the first is gone: each ends its own lease, none is lost."""
    manager = make_manager(rows=64)
    store(manager, range(4))
    first, second = start(manager, range(4), "same"), start(manager, range(4), "same")

    look(manager, first)
    look(manager, second)
    assert manager.lease_count == 2
    manager.end_request(first)
    manager.check()
    manager.end_request(second)

    assert manager.lease_count == 0
    manager.check()


def test_ht_47_hit_that_is_not_needed_is_released() -> None:
    """Computed already by the time of the load: nothing stays promised."""
    manager = make_manager(rows=4)
    store(manager, range(4))
    request = start(manager, range(4))
    assert look(manager, request).block_count == 4
    assert look(manager, request, computed=4).state is LookupState.MISS

    manager.release(request)

    assert manager.lease_count == 0
    manager.check()
    store(manager, range(10, 14))
    assert hit_blocks(manager, range(10, 14)) == 4


def test_ht_31_promised_chunks_survive_pressure_until_they_are_released() -> None:
    """Pool of four, all promised: another store gets nothing; released, it gets all."""
    manager = make_manager(rows=4)
    store(manager, range(4))
    request = start(manager, range(4))
    look(manager, request)

    assert plan(manager, start(manager, range(10, 14), "other")) is None
    assert look(manager, request).block_count == 4
    manager.end_request(request)
    assert plan(manager, start(manager, range(10, 14), "third")) is not None
    manager.check()


def test_lease_ends_at_its_deadline() -> None:
    """The safety net: a request that nobody ends does not pin its chunks for ever."""
    manager = make_manager(rows=4)
    store(manager, range(4))
    request = start(manager, range(4))
    look(manager, request, now=100.0)

    assert manager.expire(100.0 + LEASE_SECONDS) == 0
    assert manager.lease_count == 1
    assert manager.expire(100.1 + LEASE_SECONDS) == 1
    assert manager.lease_count == 0
    assert plan(manager, start(manager, range(10, 14), "other")) is not None
    manager.check()


def test_asking_again_renews_the_deadline() -> None:
    """A request that waits for room is alive as long as it asks."""
    manager = make_manager(rows=4)
    store(manager, range(4))
    request = start(manager, range(4))
    look(manager, request, now=0.0)
    look(manager, request, now=50.0)

    assert manager.expire(LEASE_SECONDS + 1) == 0
    assert manager.expire(50.0 + LEASE_SECONDS + 1) == 1


def test_expired_request_may_look_up_again() -> None:
    """What it was told is void, what it asks is answered."""
    manager = make_manager(rows=4)
    store(manager, range(4))
    request = start(manager, range(4))
    look(manager, request, now=0.0)
    manager.expire(1000.0)

    assert look(manager, request, now=1000.0).block_count == 4
    manager.end_request(request)
    manager.end_request(request)
    assert manager.lease_count == 0
