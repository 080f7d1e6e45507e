"""Objects that serve only who leaves a sequence half-way: they cost nobody else's room."""

import pytest
from fakes import ROW_BYTES, stamp
from hybrid_world import (
    begin,
    full,
    hybrid_manager,
    layout_of,
    look,
    plan,
    store,
    tables_of,
    window,
)

from opal_connector.events import Delete, EventLog
from opal_connector.eviction import POLICIES, make_policy
from opal_connector.keys import CHAIN_ROOT
from opal_connector.managers import (
    ObjectGroup,
    ObjectRecord,
    ObjectSpec,
    OpalKVCacheManager,
    OpalStorageBackend,
    Refusal,
    TierPool,
    TierRules,
)
from opal_connector.managers.audit import audit_tier
from opal_connector.managers.watermarks import TierLimits
from opal_connector.transfers import JobResult

# Blocks of two tokens. A sequence of 16 tokens has two objects of four blocks of full attention,
# and four of two blocks of the window, of which the last two are needed at its end.
LAYOUT = layout_of(full(2), window(4, 2))
CHUNK_TOKENS = 8
FULL, WINDOW = 0, 1
SEQUENCE_ROWS = 16


def sequence(number: int, tokens: int = 16) -> list[int]:
    return [1000 * number + token for token in range(tokens)]


def make(*rows: int, **kwargs: object) -> OpalKVCacheManager:
    return hybrid_manager(LAYOUT, rows=rows, chunk_tokens=CHUNK_TOKENS, **kwargs)  # type: ignore[arg-type]


def units(manager: OpalKVCacheManager, tokens: list[int], place: int = 0) -> dict[int, bool]:
    """The units of the window that are there, by position: whether they are passing."""
    hashes = begin(manager, tokens).chain.hashes
    tier = manager.storage.tiers[place]
    found = {}
    for position, start in enumerate(range(0, len(hashes), 2)):
        spec = ObjectSpec(WINDOW, CHAIN_ROOT, b"".join(hashes[start : start + 2]), start)
        record = tier.index.get(spec.key)
        if record is not None:
            found[position] = record.is_passing
    return found


def unit_spec(number: int, blocks: int = 2, *, is_passing: bool = False) -> ObjectSpec:
    """Some object of the window."""
    run = b"".join(stamp(10 * number + block) for block in range(blocks))
    return ObjectSpec(WINDOW, stamp(9_999), run, 0, is_passing=is_passing)


def put(tier: OpalStorageBackend, spec: ObjectSpec) -> ObjectRecord:
    record = tier.reserve(spec)
    assert isinstance(record, ObjectRecord), record
    assert tier.commit(record, stored=True)
    return record


def test_what_the_end_does_not_need_is_passing() -> None:
    """Where there is room all of a sequence is kept, and known for what it is worth."""
    manager = make(SEQUENCE_ROWS)

    store(manager, sequence(1))

    assert units(manager, sequence(1)) == {0: True, 1: True, 2: False, 3: False}
    assert manager.storage.tiers[0].used_bytes == SEQUENCE_ROWS * ROW_BYTES


def test_passing_objects_take_no_room_and_what_follows_them_is_stored() -> None:
    """A full tier: the end of the next sequence is kept whole, its middle is not."""
    manager = make(12)
    tier = manager.storage.tiers[0]
    others = [put(tier, unit_spec(number)) for number in range(6)]
    assert tier.used_bytes == tier.capacity_bytes
    request = begin(manager, sequence(1))

    job = plan(manager, request)

    assert job is not None
    assert request.drop_reason is None
    manager.commit(JobResult(job.job_id, 0))
    assert units(manager, sequence(1)) == {2: False, 3: False}
    assert look(manager, begin(manager, sequence(1))) == 16
    assert not any(tier.index.is_current(other) for other in others)


def test_passing_objects_leave_first() -> None:
    """Before what was used longer ago, the oldest of them first."""
    manager = make(SEQUENCE_ROWS + 2)
    tier = manager.storage.tiers[0]
    old = put(tier, unit_spec(0))
    store(manager, sequence(1))
    manager.take_events()

    for number in (1, 2):
        put(tier, unit_spec(number))

    hashes = begin(manager, sequence(1)).chain.hashes
    gone = [event.fact.block_hashes for event in manager.take_events() if isinstance(event, Delete)]
    assert gone == [b"".join(hashes[0:2]), b"".join(hashes[2:4])]
    assert tier.index.is_current(old)


def test_passing_object_takes_the_place_of_another() -> None:
    """Nobody wants either; the newer is the better guess."""
    manager = make(4)
    tier = manager.storage.tiers[0]
    kept = put(tier, unit_spec(0))
    first = put(tier, unit_spec(1, is_passing=True))

    second = put(tier, unit_spec(2, is_passing=True))

    assert tier.index.is_current(kept)
    assert not tier.index.is_current(first)
    third = unit_spec(3, 4, is_passing=True)  # more than what is passing gives
    assert tier.reserve(third) is Refusal.FULL
    assert tier.index.is_current(second)
    audit_tier(tier)


def test_passing_object_that_takes_in_a_needed_one_is_needed() -> None:
    """A longer sequence passes where a shorter one ended: who goes on from there still may."""
    manager = make(64)
    store(manager, sequence(1, 10))
    assert units(manager, sequence(1, 10))[2] is False

    store(manager, sequence(1, 24))

    assert units(manager, sequence(1, 24))[2] is False
    assert units(manager, sequence(1, 10)).keys() == {0, 1}, "two objects for the same blocks"


def test_passing_object_that_was_loaded_is_like_any_other() -> None:
    """Somebody did leave the sequence there, and others may."""
    manager = make(SEQUENCE_ROWS)
    store(manager, sequence(1))
    reader = begin(manager, [*sequence(1, 8), *sequence(2, 8)])
    assert look(manager, reader) == 8

    job = manager.plan_load(reader, tables_of(manager, 8), first_block=0, block_count=4)
    manager.commit(JobResult(job.job_id, 0))
    manager.end_request(reader)

    assert units(manager, sequence(1)) == {0: True, 1: False, 2: False, 3: False}
    put(manager.storage.tiers[0], unit_spec(0))
    put(manager.storage.tiers[0], unit_spec(1))
    left = units(manager, sequence(1))
    assert 0 not in left
    assert left[1] is False


def test_where_sequences_part_nothing_is_passing() -> None:
    """The second that comes there stores what the third needs to go on from there."""
    manager = make(64)
    store(manager, sequence(1))
    for spec in plan_specs(manager, sequence(1, 8)):
        manager.storage.remove(spec.key)
    parts = [*sequence(1, 8), *sequence(2, 8)]
    second = begin(manager, parts, "second")

    assert look(manager, second) == 0
    assert second.junction_blocks == 4
    store_again = plan(manager, second)
    assert store_again is not None
    manager.commit(JobResult(store_again.job_id, 0))

    assert units(manager, parts) == dict.fromkeys(range(4), False)
    assert look(manager, begin(manager, [*sequence(1, 8), *sequence(3, 8)])) == 8


def plan_specs(manager: OpalKVCacheManager, tokens: list[int]) -> list[ObjectSpec]:
    """The objects of the window over these tokens."""
    hashes = begin(manager, tokens).chain.hashes
    return [
        ObjectSpec(WINDOW, CHAIN_ROOT, b"".join(hashes[start : start + 2]), start)
        for start in range(0, len(hashes), 2)
    ]


def test_copy_that_a_load_leaves_in_memory_is_not_passing() -> None:
    """It is read because somebody wants it: it must not be the first to go again."""
    manager = make(16, 16)
    near, far = manager.storage.tiers
    hashes = begin(manager, sequence(1)).chain.hashes
    for group, first, stop, is_passing in ((FULL, 0, 4, False), (WINDOW, 2, 4, True)):
        parent = hashes[first - 1] if first else CHAIN_ROOT
        run = b"".join(hashes[first:stop])
        put(far, ObjectSpec(group, parent, run, first, is_passing=is_passing))
    reader = begin(manager, sequence(1, 8))
    assert look(manager, reader) == 8

    job = manager.plan_load(reader, tables_of(manager, 8), first_block=0, block_count=4)
    manager.commit(JobResult(job.job_id, 0))
    manager.commit(JobResult(job.kept_job_id, 0))
    manager.check()

    assert units(manager, sequence(1, 8)) == {1: False}
    assert units(manager, sequence(1, 8), place=1) == {1: False}
    assert len(near) == 2
    for number in range(6):
        put(near, unit_spec(number))
    assert units(manager, sequence(1, 8)) == {1: False}, "it was the first to go"


def test_passing_object_that_no_tier_takes_makes_way() -> None:
    """A tier below that is almost full refuses it for ever; what is above must go on."""
    manager = make(
        4, 3, rules=[TierRules(write="off"), TierRules(write="demote")], evicts_ahead=True
    )
    near, far = manager.storage.tiers
    put(far, unit_spec(0))
    for number in (1, 2):
        put(near, unit_spec(number, is_passing=True))
    assert near.reserve(unit_spec(3)) is Refusal.FULL

    batch = manager.plan_upkeep()

    assert not batch.copies
    assert isinstance(near.reserve(unit_spec(3)), ObjectRecord)
    audit_tier(near)


def test_no_object_waits_behind_a_passing_one() -> None:
    """Of what is written through, each goes as far as there is room for it."""
    manager = make(
        8,
        3,
        rules=[TierRules(write="off"), TierRules(write="through", admission="always")],
        evicts_ahead=True,
    )
    near, far = manager.storage.tiers
    put(far, unit_spec(0))
    passing, wanted = put(near, unit_spec(1, is_passing=True)), put(near, unit_spec(2, 1))
    for record in (passing, wanted):
        manager._placement.offer(record.key, 0)

    batch = manager.plan_upkeep()

    names = [item.name.run for job in batch.copies for item in job.objects]
    assert names == [wanted.run]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_failed_eviction_over_a_quota_takes_back_what_was_passing(policy: str) -> None:
    """Room of the owner's own is not enough and no other can go: all is as it was."""
    tier = OpalStorageBackend(
        tier="CPUMemory",
        space=TierPool(capacity_rows=8, row_bytes=ROW_BYTES),
        policy=make_policy(policy),  # type: ignore[arg-type]
        log=EventLog(enabled=False),
        limits=TierLimits(quotas={"one": 0.25}),
        groups=[ObjectGroup(), ObjectGroup(is_chain=False)],
    )
    mine = put(tier, ObjectSpec(WINDOW, CHAIN_ROOT, stamp(1), 0, owner="one", is_passing=True))
    held = put(tier, unit_spec(2, 7))
    tier.pin(held)
    two = ObjectSpec(WINDOW, CHAIN_ROOT, stamp(3) + stamp(4), 0, owner="one")

    assert tier.reserve(two) is Refusal.FULL

    audit_tier(tier)
    assert tier.index.is_current(mine)
    assert mine in tier.order._unwanted, "it does not leave first any more"
    tier.unpin(held)
    assert isinstance(tier.reserve(two), ObjectRecord)
    assert not tier.index.is_current(mine)
    audit_tier(tier)
