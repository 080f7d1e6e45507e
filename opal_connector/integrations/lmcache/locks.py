"""What lookups have locked, until it is unlocked."""

from typing import Final

import msgspec
from lmcache.v1.distributed.api import ObjectKey

from opal_connector.managers import ObjectRecord, OpalStorageManager

LOCK_SECONDS: Final = 600.0  # the safety net for locks that nobody ends


class KeyLock(msgspec.Struct, frozen=True, eq=False):
    """One lookup's promise of one copy of an object."""

    place: int
    record: ObjectRecord
    deadline: float


class KeyLocks:
    """The books' leases by LMCache's key, one for every lookup that found it.

    Mutable state: the locks, the oldest of each key first; guarded by the lock of `ObjectBooks`.
    """

    def __init__(self, storage: OpalStorageManager) -> None:
        self._storage = storage
        self._locks: dict[ObjectKey, list[KeyLock]] = {}

    def __len__(self) -> int:
        return len(self._locks)

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._locks

    def add(self, key: ObjectKey, place: int, record: ObjectRecord, now: float) -> None:
        """Keep a copy from leaving."""
        self._storage.tiers[place].pin(record)
        self._locks.setdefault(key, []).append(KeyLock(place, record, now + LOCK_SECONDS))

    def end(self, key: ObjectKey) -> None:
        """End the oldest lock of a key; one that is not locked is left alone."""
        locks = self._locks.get(key)
        if not locks:
            return
        lock = locks.pop(0)
        self._storage.tiers[lock.place].unpin(lock.record)
        if not locks:
            del self._locks[key]

    def expire(self, now: float) -> None:
        """End locks past their deadline."""
        for key, locks in list(self._locks.items()):
            for _ in [lock for lock in locks if lock.deadline < now]:
                self.end(key)

    def records(self) -> list[ObjectRecord]:
        """Everything that is promised, as often as it is."""
        return [lock.record for locks in self._locks.values() for lock in locks]
