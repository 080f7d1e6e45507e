"""Folds the answers of all kv groups into one: what a request can have, what it leaves behind."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from opal_connector.managers.records import ObjectKey, ObjectSpec
from opal_connector.managers.single_type import Segment, SingleTypeManager
from opal_connector.managers.storage_manager import OpalStorageManager


class HitPlan(msgspec.Struct, frozen=True, gc=False):
    """Blocks beyond the computed ones that every group can have, and where they come from."""

    block_count: int
    segments: tuple[Segment, ...]
    is_waiting: bool


NOTHING = HitPlan(0, (), is_waiting=False)


class OpalKVCacheCoordinator(ABC):
    """Decides for all kv groups together. Holds no state but its managers."""

    @abstractmethod
    def find_hit(self, hashes: list[bytes], *, computed_blocks: int, max_blocks: int) -> HitPlan:
        """The longest hit that continues `computed_blocks`, at most to `max_blocks`."""

    @abstractmethod
    def storable(
        self, hashes: list[bytes], *, first_chunk: int, full_blocks: int, include_tail: bool
    ) -> list[ObjectSpec]:
        """The objects of every group over the blocks that are computed."""

    @abstractmethod
    def chain_keys(self, hashes: list[bytes]) -> list[ObjectKey]:
        """The keys of all objects of a sequence, head first."""


class NoPrefixCache(OpalKVCacheCoordinator):
    """Never hits, never stores: for models whose attention Opal cannot serve."""

    def find_hit(self, hashes: list[bytes], *, computed_blocks: int, max_blocks: int) -> HitPlan:
        """Nothing."""
        del hashes, computed_blocks, max_blocks
        return NOTHING

    def storable(
        self, hashes: list[bytes], *, first_chunk: int, full_blocks: int, include_tail: bool
    ) -> list[ObjectSpec]:
        """Nothing."""
        del hashes, first_chunk, full_blocks, include_tail
        return []

    def chain_keys(self, hashes: list[bytes]) -> list[ObjectKey]:
        """Nothing."""
        del hashes
        return []


class Unitary(OpalKVCacheCoordinator):
    """One kv group: its manager's answer is the answer."""

    def __init__(self, storage: OpalStorageManager, managers: Sequence[SingleTypeManager]) -> None:
        if len(managers) != 1:
            raise ValueError(f"one kv group expected, found {len(managers)}")
        self._storage = storage
        self._manager = managers[0]

    def find_hit(self, hashes: list[bytes], *, computed_blocks: int, max_blocks: int) -> HitPlan:
        """See `OpalKVCacheCoordinator.find_hit`."""
        if computed_blocks >= max_blocks:
            return NOTHING
        hit = self._manager.find_hit(
            self._storage, hashes, computed_blocks=computed_blocks, max_blocks=max_blocks
        )
        return HitPlan(hit.stop_block - computed_blocks, hit.segments, is_waiting=hit.is_waiting)

    def storable(
        self, hashes: list[bytes], *, first_chunk: int, full_blocks: int, include_tail: bool
    ) -> list[ObjectSpec]:
        """See `OpalKVCacheCoordinator.storable`."""
        return self._manager.storable(
            hashes, first_chunk=first_chunk, full_blocks=full_blocks, include_tail=include_tail
        )

    def chain_keys(self, hashes: list[bytes]) -> list[ObjectKey]:
        """See `OpalKVCacheCoordinator.chain_keys`."""
        return self._manager.chain_keys(hashes)
