"""What a tier holds by key, and by the longest common run of blocks."""

from collections.abc import Sequence
from typing import Protocol

from opal_connector.keys import HASH_BYTES
from opal_connector.managers.records import (
    ObjectKey,
    ObjectRecord,
    ObjectSpec,
    ObjectState,
    object_key,
)
from opal_connector.managers.siblings import SiblingIndex


class IndexWatcher(Protocol):
    """Who is told of every record that enters or leaves an index, after it has."""

    def came(self, record: ObjectRecord) -> None:
        """It is there, or its bytes are to come."""

    def left(self, record: ObjectRecord) -> None:
        """It is there no more, or will not come."""


class ObjectIndex:
    """Records by key: those that can be read and those that are being written.

    Mutable state: `records`, the two sibling indexes and `watcher`, guarded by the owner of the
    books.
    """

    def __init__(self) -> None:
        self.watcher: IndexWatcher | None = None
        self.records: dict[ObjectKey, ObjectRecord] = {}
        self._ready = SiblingIndex()
        self._writing = SiblingIndex()

    def is_current(self, record: ObjectRecord) -> bool:
        """Whether this very record is in the index, not another of its key."""
        return self.records.get(record.key) is record

    def get(self, key: ObjectKey) -> ObjectRecord | None:
        """The readable record of that key."""
        record = self.records.get(key)
        return record if record is not None and record.is_readable else None

    def knows(self, key: ObjectKey) -> bool:
        """Whether there is a record of that key. May be called by any thread, without the lock."""
        return key in self.records

    def readable_keys(self) -> list[ObjectKey]:
        """The keys of all readable records. May be called by any thread, without the lock."""
        records = list(self.records.values())  # at once: no other thread comes between
        return [record.key for record in records if record.is_readable]

    def longest_run(self, wanted: bytes, group: int) -> tuple[ObjectRecord | None, int]:
        """The readable record that shares most blocks with `wanted`, and how many."""
        run, blocks = self._ready.longest(wanted, group)
        if not blocks:
            return None, 0
        return self.records[object_key(run[-HASH_BYTES:], group)], blocks

    def shared_blocks(self, run: bytes, group: int) -> int:
        """Blocks at the start of `run` that some readable record holds."""
        return self._ready.longest(run, group)[1]

    def shared_without(self, record: ObjectRecord) -> int:
        """Blocks of a readable record that others hold too."""
        self._ready.discard(record.run, record.group)
        blocks = self.shared_blocks(record.run, record.group)
        self._ready.add(record.run, record.group)
        return blocks

    def longest_write(self, wanted: bytes, group: int) -> int:
        """Blocks of `wanted` that a write in motion will bring."""
        return self._writing.longest(wanted, group)[1]

    def holds(self, spec: ObjectSpec) -> bool:
        """Whether `spec` is here or coming, or a longer object that begins with it is here."""
        if spec.key in self.records:
            return True
        return self.shared_blocks(spec.run, spec.group) == spec.block_count

    def begin_write(self, record: ObjectRecord) -> None:
        """Enter a record whose bytes are to come."""
        self.records[record.key] = record
        self._writing.add(record.run, record.group)
        if self.watcher is not None:
            self.watcher.came(record)

    def end_write(self, record: ObjectRecord) -> int:
        """Its bytes have come, or will not; returns how many of its blocks others hold."""
        self._writing.discard(record.run, record.group)
        return self.shared_blocks(record.run, record.group)

    def publish(self, record: ObjectRecord, *, keeps_tails: bool = False) -> list[ObjectRecord]:
        """Make it readable; returns the readable records for which it stands from now on.

        They are proper beginnings of it. With `keeps_tails` it stands for none: another instance
        that has a prompt and not its answer asks by the hash of the prompt's end.
        """
        record.state = ObjectState.READY
        self.records[record.key] = record
        self._ready.add(record.run, record.group)
        if self.watcher is not None:
            self.watcher.came(record)
        if keeps_tails:
            return []
        return [
            self.records[object_key(shorter[-HASH_BYTES:], record.group)]
            for shorter in self._ready.prefixes(record.run, record.group)
        ]

    def withdraw(self, record: ObjectRecord) -> int:
        """Take out a readable record; returns how many of its blocks others still hold."""
        del self.records[record.key]
        self._ready.discard(record.run, record.group)
        if self.watcher is not None:
            self.watcher.left(record)
        return self.shared_blocks(record.run, record.group)

    def drop_write(self, record: ObjectRecord) -> None:
        """Take out a record that was being written."""
        del self.records[record.key]
        self._writing.discard(record.run, record.group)
        if self.watcher is not None:
            self.watcher.left(record)

    def check(self, others: Sequence[ObjectRecord]) -> None:
        """Raise AssertionError if the indexes disagree; `others` are records outside of them."""
        for key, record in self.records.items():
            assert key == record.key == object_key(record.run[-HASH_BYTES:], record.group)
            assert record.loads <= record.leases
            assert (record.state is ObjectState.LOADING) == (record.loads > 0)
        readable = sum(record.is_readable for record in self.records.values())
        assert len(self._ready) == readable, "the sibling index differs from the records"
        rows = [id(record) for record in (*self.records.values(), *others)]
        assert len(rows) == len(set(rows)), "a record is kept twice"
