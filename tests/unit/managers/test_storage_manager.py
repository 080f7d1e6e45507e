"""Several tiers as one: the fastest copy of each object, and nothing stored twice."""

import pytest
from fakes import ROW_BYTES, make_manager, plan_load, replay, stamp, start

from opal_connector.keys import CHAIN_ROOT
from opal_connector.managers import (
    LookupState,
    ObjectRecord,
    ObjectSpec,
    OpalStorageBackend,
    OpalStorageManager,
    Refusal,
    object_key,
)
from opal_connector.managers.audit import audit_tier

FAST, SLOW = "CPUMemory", "LocalNVMe"


def two_tiers(fast_rows: int = 32, slow_rows: int = 32) -> OpalStorageManager:
    return make_manager(rows=(fast_rows, slow_rows), tiers=(FAST, SLOW)).storage


def put(tier: OpalStorageBackend, name: int, blocks: int = 1, parent: int | None = None) -> bytes:
    """Store an object whose last block is `name` in that tier; returns its key."""
    record = tier.reserve(spec(name, blocks, parent))
    assert isinstance(record, ObjectRecord), record
    tier.commit(record, stored=True)
    return record.key


def spec(name: int, blocks: int = 1, parent: int | None = None) -> ObjectSpec:
    before = [stamp(1000 * name + place) for place in range(blocks - 1)]
    return ObjectSpec(
        group=0,
        parent_hash=CHAIN_ROOT if parent is None else stamp(parent),
        run=b"".join([*before, stamp(name)]),
        first_block=0,
    )


def key(name: int) -> bytes:
    return object_key(stamp(name), 0)


# get_block_mapping.


@pytest.mark.parametrize(
    ("fast", "slow", "expected"),
    [
        ([], [], []),
        ([0, 1, 2], [], [(FAST, 0, 3)]),
        ([], [0, 1, 2], [(SLOW, 0, 3)]),
        ([0, 1], [2, 3], [(FAST, 0, 2), (SLOW, 2, 4)]),
        ([2, 3], [0, 1], [(SLOW, 0, 2), (FAST, 2, 4)]),
        (
            [1, 2, 4],
            [0, 3],
            [(SLOW, 0, 1), (FAST, 1, 3), (SLOW, 3, 4), (FAST, 4, 5)],
        ),
        ([0, 1, 2], [0, 1, 2], [(FAST, 0, 3)]),
        ([0, 2], [0, 1, 3], [(FAST, 0, 1), (SLOW, 1, 2), (FAST, 2, 3), (SLOW, 3, 4)]),
        ([1, 2], [2], []),
        ([0, 3], [1, 4], [(FAST, 0, 1), (SLOW, 1, 2)]),
    ],
    ids=[
        "nothing",
        "fast",
        "slow",
        "fast-then-slow",
        "slow-then-fast",
        "interleaved",
        "both",
        "both-with-holes",
        "no-head",
        "gap",
    ],
)
def test_mapping_takes_each_chunk_from_the_fastest_tier_that_holds_it(
    fast: list[int], slow: list[int], expected: list[tuple[str, int, int]]
) -> None:
    """Up to the first chunk in no tier, whatever its neighbours do (Opal itself: 4 of 20)."""
    storage = two_tiers()
    for tier, names in zip(storage.tiers, (fast, slow), strict=True):
        for name in names:
            put(tier, name)

    assert storage.get_block_mapping([key(name) for name in range(6)]) == expected


def test_interleaved_prefix_is_found_as_a_whole() -> None:
    """A prompt of five chunks, CPU 1, 2, 4 and NVMe 0, 3: a lookup finds all 20 tokens."""
    manager = make_manager(rows=(32, 32), tiers=(FAST, SLOW))
    manager.database.chunk_blocks = 2
    request = start(manager, range(10))
    hashes = request.chain.hashes
    for chunk, place in enumerate((1, 0, 0, 1, 0)):
        record = manager.storage.tiers[place].reserve(
            ObjectSpec(0, CHAIN_ROOT, b"".join(hashes[2 * chunk : 2 * chunk + 2]), 2 * chunk)
        )
        assert isinstance(record, ObjectRecord)
        manager.storage.tiers[place].commit(record, stored=True)

    result = manager.lookup(request, computed_blocks=0, max_blocks=10, now=0)

    assert result.state is LookupState.HIT
    assert result.block_count == 10
    assert result.tier_tokens == {SLOW: 8, FAST: 12}
    job = plan_load(manager, request, range(10))
    assert [item.tier for item in job.objects] == [1, 0, 0, 1, 0]
    assert [item.block_ids for item in job.objects] == [(i, i + 1) for i in range(0, 10, 2)]


# reserve.


def test_object_goes_to_the_first_tier_that_takes_it() -> None:
    """The fast tier, unless it has no room at all."""
    storage = two_tiers(fast_rows=2)
    place, record = expect_place(storage.reserve(spec(1, 2)))
    assert place == 0
    storage.tiers[0].commit(record, stored=True)
    storage.tiers[0].pin(record)

    assert expect_place(storage.reserve(spec(2, 2)))[0] == 1
    assert expect_place(storage.reserve(spec(3, 4)))[0] == 1


def expect_place(outcome: tuple[int, ObjectRecord] | Refusal) -> tuple[int, ObjectRecord]:
    assert not isinstance(outcome, Refusal), outcome
    return outcome


@pytest.mark.parametrize("place", [0, 1])
def test_what_any_tier_holds_is_not_stored_again(place: int) -> None:
    """Presence comes before fit: a slow copy is a copy."""
    storage = two_tiers()
    put(storage.tiers[place], 1, 2)

    assert storage.reserve(spec(1, 2)) is Refusal.PRESENT
    assert sum(len(tier) for tier in storage.tiers) == 1


def test_what_any_tier_is_writing_is_not_stored_again() -> None:
    """One write per key at a time, over all tiers."""
    storage = two_tiers()
    storage.tiers[1].reserve(spec(1, 2))

    assert storage.reserve(spec(1, 2)) is Refusal.PRESENT
    for tier in storage.tiers:
        audit_tier(tier)


def test_beginning_of_what_a_slow_tier_holds_is_not_stored() -> None:
    """A tail that a longer object in any tier covers is there already."""
    storage = two_tiers()
    longer = spec(1, 3)
    record = storage.tiers[1].reserve(longer)
    assert isinstance(record, ObjectRecord)
    storage.tiers[1].commit(record, stored=True)

    shorter = ObjectSpec(0, CHAIN_ROOT, longer.run[:64], 0)
    assert storage.reserve(shorter) is Refusal.PRESENT


def test_refusal_is_that_of_the_last_tier() -> None:
    """Nothing takes it: the reason is the one nearest to being taken."""
    storage = two_tiers(fast_rows=1, slow_rows=2)

    assert storage.reserve(spec(1, 3)) is Refusal.TOO_LARGE
    assert storage.reserve(spec(2, 2, parent=9)) is Refusal.NO_PARENT


# The rest of the hierarchy.


def test_find_prefers_the_faster_copy() -> None:
    """And names the tier that it found."""
    storage = two_tiers()
    put(storage.tiers[1], 1)
    put(storage.tiers[1], 2)
    put(storage.tiers[0], 2)

    assert storage.find(key(1)) == (1, storage.tiers[1].get(key(1)))
    assert storage.find(key(2)) == (0, storage.tiers[0].get(key(2)))
    assert storage.find(key(3)) is None


def test_longest_run_wins_over_the_faster_tier() -> None:
    """More blocks come before a faster tier; at a tie the faster one is taken."""
    storage = two_tiers()
    wanted = spec(1, 3)
    for place, blocks in ((0, 1), (1, 2)):
        record = storage.tiers[place].reserve(
            ObjectSpec(0, CHAIN_ROOT, wanted.run[: 32 * blocks] + stamp(77 + place), 0)
        )
        assert isinstance(record, ObjectRecord)
        storage.tiers[place].commit(record, stored=True)

    place, record, blocks = storage.find_run(wanted.run, 0)
    assert (place, blocks) == (1, 2)
    place, record, blocks = storage.find_run(wanted.run[:32], 0)
    assert (place, blocks) == (0, 1)


def test_remove_takes_every_copy_with_one_event_each() -> None:
    """Two tiers, two DELETE events; a replay of the log ends empty."""
    storage = two_tiers()
    put(storage.tiers[0], 1)
    put(storage.tiers[1], 1)

    assert storage.remove(key(1)) == 2
    assert storage.remove(key(1)) == 0
    assert replay({}, storage.log.take()) == {}


def test_placements_are_what_the_events_say() -> None:
    """I2 over two tiers."""
    storage = two_tiers()
    for place, name in ((0, 1), (1, 1), (1, 2)):
        put(storage.tiers[place], name)
    storage.tiers[0].reserve(spec(5))

    contents = replay({}, storage.log.take())
    assert set(contents) == set(storage.placements())
    storage.clear()
    assert replay(contents, storage.log.take()) == {}
    assert list(storage.placements()) == []


def test_touch_reaches_every_tier() -> None:
    """A use of a chain counts wherever parts of it are."""
    storage = two_tiers(fast_rows=2, slow_rows=2)
    for tier in storage.tiers:
        put(tier, 1)
        put(tier, 2)
    storage.touch([key(1)])
    for tier in storage.tiers:
        put(tier, 3)
        assert tier.contains(key(1))
        assert not tier.contains(key(2))


def test_repr_shows_the_counts() -> None:
    """A person at a debugger sees how full the tiers are."""
    storage = two_tiers(fast_rows=4)
    put(storage.tiers[0], 1, 2)

    assert f"CPUMemory: 1 objects, {2 * ROW_BYTES}/{4 * ROW_BYTES} bytes" in repr(storage)
