"""The ends of prompts inside a chunk, on a tier that instances share."""

from fakes import stamp

from opal_connector.events import EventLog, Insert
from opal_connector.eviction import LRUPolicy
from opal_connector.keys import CHAIN_ROOT
from opal_connector.managers import (
    ObjectGroup,
    ObjectRecord,
    ObjectSpec,
    OpalStorageBackend,
    SharedSpace,
)
from opal_connector.managers.audit import audit_tier
from opal_connector.transfers import ObjectName


def put(books: OpalStorageBackend, *names: int) -> ObjectRecord:
    """Store an object of these blocks at once."""
    run = b"".join(map(stamp, names))
    record = books.reserve(ObjectSpec(0, CHAIN_ROOT, run, first_block=0))
    assert isinstance(record, ObjectRecord), record
    assert books.commit(record, stored=True)
    audit_tier(books)
    return record


def test_a_longer_object_does_not_stand_for_its_beginnings() -> None:
    """Another instance knows the hash of a prompt's end, and not that of the answer's."""
    space = SharedSpace(capacity_bytes=1 << 30, file_bytes=lambda blocks, members: blocks * 100)
    space.grant(1 << 20, was_crowded=False)
    log = EventLog(enabled=True)
    books = OpalStorageBackend(
        tier="Valkey", space=space, policy=LRUPolicy(), log=log, groups=[ObjectGroup()]
    )
    shorter, longer = put(books, 5, 6), put(books, 5, 6, 7)

    assert {shorter.key, longer.key} <= set(books.index.readable_keys())
    first, second = log.take()
    assert isinstance(first, Insert)
    assert isinstance(second, Insert)
    assert second.fact.shared_blocks == 2
    assert not books.leaving.is_due


def test_what_others_wrote_is_never_deleted_for_what_this_instance_hears() -> None:
    """A tail of another instance, and a longer object of a third: both are somebody's."""
    space = SharedSpace(capacity_bytes=1 << 30, file_bytes=lambda blocks, members: blocks * 100)
    books = OpalStorageBackend(
        tier="Valkey",
        space=space,
        policy=LRUPolicy(),
        log=EventLog(enabled=True),
        groups=[ObjectGroup()],
    )
    for blocks in (2, 3, 4):
        run = b"".join(map(stamp, range(5, 5 + blocks)))
        assert books.adopt(ObjectName(0, CHAIN_ROOT, run))

    assert len(books.index.readable_keys()) == 3
    assert not books.leaving.is_due
