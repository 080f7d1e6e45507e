"""The books of a directory that instances share: who is asked for room, and when."""

from fakes import stamp

from opal_connector.events import EventLog
from opal_connector.eviction import LRUPolicy
from opal_connector.keys import CHAIN_ROOT
from opal_connector.managers import (
    ObjectRecord,
    ObjectSpec,
    OpalStorageBackend,
    Refusal,
    SharedSpace,
)
from opal_connector.managers.audit import audit_tier

OBJECT_BYTES = 1000
OBJECTS = 4


def file_bytes(blocks: int, members: int) -> int:
    return blocks * members * OBJECT_BYTES


def spec(number: int) -> ObjectSpec:
    return ObjectSpec(group=0, parent_hash=CHAIN_ROOT, run=stamp(number), first_block=0)


def test_full_directory_is_asked_for_room() -> None:
    """Only the keeper can evict: a tier that never asks it would stay as it is for ever."""
    space = SharedSpace(capacity_bytes=OBJECTS * OBJECT_BYTES, file_bytes=file_bytes)
    tier = OpalStorageBackend(
        tier="DistributedFS", space=space, policy=LRUPolicy(), log=EventLog(enabled=False)
    )
    space.grant(OBJECTS * OBJECT_BYTES, was_crowded=False)
    for number in range(OBJECTS):
        record = tier.reserve(spec(number))
        assert isinstance(record, ObjectRecord)
        assert tier.commit(record, stored=True)
    assert space.used_bytes == space.capacity_bytes
    assert space.wanted_bytes == 0

    assert tier.reserve(spec(OBJECTS)) is Refusal.FULL
    assert space.wanted_bytes >= OBJECT_BYTES

    tier.forget(spec(0).key)
    space.grant(OBJECT_BYTES, was_crowded=True)
    assert isinstance(tier.reserve(spec(OBJECTS)), ObjectRecord)
    audit_tier(tier)


def test_full_directory_is_full_for_a_few_grants() -> None:
    """What an eviction frees is granted in portions: the first does not mean there is room."""
    space = SharedSpace(capacity_bytes=1 << 30, file_bytes=file_bytes)
    assert not space.is_crowded

    space.grant(OBJECT_BYTES, was_crowded=True)
    crowded = []
    for _ in range(5):
        crowded.append(space.is_crowded)
        space.grant(OBJECT_BYTES, was_crowded=False)

    assert crowded == [True, True, True, True, False]


def test_what_is_being_written_is_promised_until_it_is_there() -> None:
    """A scan of the directory does not see it: counted nowhere, it would be granted once more."""
    space = SharedSpace(capacity_bytes=1 << 30, file_bytes=file_bytes)
    space.grant(3 * OBJECT_BYTES, was_crowded=False)

    assert space.allocate(2) == (0, 1)
    assert (space.unused_bytes, space.promised_bytes) == (OBJECT_BYTES, 3 * OBJECT_BYTES)

    space.end_write(2 * OBJECT_BYTES)
    assert (space.unused_bytes, space.promised_bytes) == (OBJECT_BYTES, OBJECT_BYTES)
    space.check()
