"""The keeper of a shared directory that only one instance uses, in a replay."""

from collections import OrderedDict
from collections.abc import Sequence

from opal_connector.events import Copy, Delete, Insert, KVCEvent, Move
from opal_connector.keys import HASH_BYTES
from opal_connector.managers import OpalKVCacheManager, SharedSpace, object_key
from opal_connector.transfers import SharedNews

_TARGET = 0.95  # of the limit: where eviction stops, as in the real one


class SimulatedKeeper:
    """Grants room, and removes the files that were used longest ago when there is none.

    Mutable state: `_files` (key -> bytes, the oldest use first), how many it removed, and
    whether it had no room when it was asked last.
    """

    def __init__(self, manager: OpalKVCacheManager, place: int, space: SharedSpace) -> None:
        self.place = place
        self.tier = manager.tier_names[place]
        self.removed_count = 0
        self.was_full = False
        self._manager = manager
        self._space = space
        self._files: OrderedDict[bytes, int] = OrderedDict()

    @property
    def is_asked(self) -> bool:
        """Whether the books want room."""
        return self._space.wanted_bytes > 0

    def follow(self, events: Sequence[KVCEvent]) -> None:
        """Take note of what was written and removed."""
        for event in events:
            key = object_key(event.fact.chunk_hash, event.fact.group)
            match event:
                case Insert(tier=tier) | Copy(target_tier=tier) | Move(target_tier=tier):
                    if tier == self.tier:
                        blocks = len(event.fact.block_hashes) // HASH_BYTES
                        self._files[key] = self._space.size_bytes(blocks)
                case Delete(tier=tier):
                    if tier == self.tier:
                        self._files.pop(key, None)

    def used(self, keys: Sequence[bytes]) -> None:
        """These files were used, the last one most recently."""
        for key in keys:
            if key in self._files:
                self._files.move_to_end(key)

    def poll(self, now: float) -> None:
        """Answer a wish for room, if there is one."""
        wanted_bytes = self._space.wanted_bytes
        if not wanted_bytes:
            return
        free_bytes = self._space.capacity_bytes - self._space.used_bytes - self._space.unused_bytes
        is_crowded = free_bytes < wanted_bytes
        gone: list[bytes] = []
        spare_bytes = int((1 - _TARGET) * self._space.capacity_bytes)
        for key in self._files if is_crowded else ():
            if free_bytes >= wanted_bytes + spare_bytes:
                break
            if not self._manager.is_held(key):
                gone.append(key)
                free_bytes += self._files[key]
        self.removed_count += len(gone)
        granted_bytes = max(0, min(wanted_bytes, free_bytes))
        self._manager.hear(
            SharedNews(
                self.place,
                gone=tuple(gone),
                is_grant=True,
                granted_bytes=granted_bytes,
                was_crowded=is_crowded,
            ),
            now,
        )
        self.was_full = not granted_bytes
