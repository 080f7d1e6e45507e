"""Folds the answers of all attention groups into one: what a request can have, what it leaves."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar

import msgspec

from opal_connector.keys import AttentionLayout, TokenChain
from opal_connector.managers.records import ObjectKey, ObjectSpec
from opal_connector.managers.segments import Segment
from opal_connector.managers.single_type import FullAttentionManager, SingleTypeManager
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.transfers import ObjectName


class HitPlan(msgspec.Struct, frozen=True, gc=False):
    """Hash blocks beyond the computed ones that every group can have, and what brings them.

    `is_waiting` says that more can be had soon. `junction_blocks` is where the sequence parts from
    others that are known, if a group was missing what it takes to go on from there; else 0.
    """

    block_count: int
    segments: tuple[Segment, ...]
    is_waiting: bool
    junction_blocks: int = 0


class UnknownNames(msgspec.Struct, frozen=True, gc=False):
    """Objects that would help, of which nothing is known. See `Question`."""

    chain: tuple[ObjectName, ...] = ()
    tails: tuple[ObjectName, ...] = ()
    singles: tuple[ObjectName, ...] = ()


NOTHING = HitPlan(0, (), is_waiting=False)


class OpalKVCacheCoordinator(ABC):
    """Decides for all attention groups together. Holds no state but its managers.

    Attributes:
        managers: One per group, in the order of the layout.
        extends_hits: Whether a hit that is known can be continued from its end.
    """

    extends_hits: ClassVar[bool] = False

    def __init__(self, managers: Sequence[SingleTypeManager], layout: AttentionLayout) -> None:
        self.managers = tuple(managers)
        self.layout = layout

    @abstractmethod
    def find_hit(self, chain: TokenChain, *, computed_blocks: int, max_blocks: int) -> HitPlan:
        """The longest hit that continues `computed_blocks`, at most to `max_blocks`."""

    @abstractmethod
    def storable(
        self,
        chain: TokenChain,
        *,
        next_chunks: Sequence[int],
        full_blocks: int,
        include_tail: bool,
        junction_blocks: int = 0,
    ) -> list[ObjectSpec]:
        """The objects of every group over `full_blocks`, by where they end.

        `next_chunks` is the first chunk of each group that is not stored.
        """

    @abstractmethod
    def chain_keys(self, chain: TokenChain, joins: Collection[int] = ()) -> list[ObjectKey]:
        """The keys of the objects that the use of a sequence keeps fresh, head first.

        `joins` are hash blocks at which the sequence was gone on from, or may be again.
        """

    @abstractmethod
    def unknown_names(self, chain: TokenChain, *, stop_block: int, max_blocks: int) -> UnknownNames:
        """What could lengthen a hit that ends at `stop_block`, up to `max_blocks`."""

    def group_hashes(self, chain: TokenChain, group: int) -> list[bytes]:
        """The hashes of a group's own blocks."""
        attention = self.layout.groups[group]
        if attention.retention == "input":
            return chain.input_hashes
        step = attention.block_tokens // self.layout.hash_block_tokens
        return chain.hashes if step == 1 else chain.hashes[step - 1 :: step]


class NoPrefixCache(OpalKVCacheCoordinator):
    """Never hits, never stores: for models whose attention Opal cannot serve."""

    def find_hit(self, chain: TokenChain, *, computed_blocks: int, max_blocks: int) -> HitPlan:
        """Nothing."""
        del chain, computed_blocks, max_blocks
        return NOTHING

    def storable(
        self,
        chain: TokenChain,
        *,
        next_chunks: Sequence[int],
        full_blocks: int,
        include_tail: bool,
        junction_blocks: int = 0,
    ) -> list[ObjectSpec]:
        """Nothing."""
        del chain, next_chunks, full_blocks, include_tail, junction_blocks
        return []

    def unknown_names(self, chain: TokenChain, *, stop_block: int, max_blocks: int) -> UnknownNames:
        """Nothing."""
        del chain, stop_block, max_blocks
        return UnknownNames()

    def chain_keys(self, chain: TokenChain, joins: Collection[int] = ()) -> list[ObjectKey]:
        """Nothing."""
        del chain, joins
        return []


class Unitary(OpalKVCacheCoordinator):
    """One group that needs everything from the first block on: its manager's answer is the answer.

    A hit ends at any block, not only where a block of every other group ends, and is continued
    from its end when more comes.
    """

    extends_hits = True

    def __init__(
        self,
        storage: OpalStorageManager,
        managers: Sequence[SingleTypeManager],
        layout: AttentionLayout,
    ) -> None:
        super().__init__(managers, layout)
        if len(managers) != 1:
            raise ValueError(f"one group expected, found {len(managers)}")
        manager = managers[0]
        if not isinstance(manager, FullAttentionManager):
            raise TypeError(f"{type(manager).__name__} does not need all blocks")
        self._storage = storage
        self._manager = manager

    def find_hit(self, chain: TokenChain, *, computed_blocks: int, max_blocks: int) -> HitPlan:
        """See `OpalKVCacheCoordinator.find_hit`."""
        if computed_blocks >= max_blocks:
            return NOTHING
        hit = self._manager.find_hit(
            self._storage, chain.hashes, computed_blocks=computed_blocks, max_blocks=max_blocks
        )
        segments = before_any_load(hit.segments)
        is_waiting = hit.is_waiting or len(segments) < len(hit.segments)
        count = sum(segment.block_count for segment in segments)
        return HitPlan(count, segments, is_waiting=is_waiting)

    def storable(
        self,
        chain: TokenChain,
        *,
        next_chunks: Sequence[int],
        full_blocks: int,
        include_tail: bool,
        junction_blocks: int = 0,
    ) -> list[ObjectSpec]:
        """See `OpalKVCacheCoordinator.storable`."""
        del junction_blocks
        return self._manager.storable(
            chain.hashes,
            first_chunk=next_chunks[0],
            full_blocks=full_blocks,
            include_tail=include_tail,
        )

    def unknown_names(self, chain: TokenChain, *, stop_block: int, max_blocks: int) -> UnknownNames:
        """See `OpalKVCacheCoordinator.unknown_names`: chunks, then every possible tail."""
        names, tails = self._manager.names(chain.hashes[:max_blocks], stop_block)
        return UnknownNames(names, tails)

    def chain_keys(self, chain: TokenChain, joins: Collection[int] = ()) -> list[ObjectKey]:
        """See `OpalKVCacheCoordinator.chain_keys`."""
        del joins
        return [key for _, key in self._manager.chain_keys(chain.hashes)]


def before_any_load(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """The segments before the first one that somebody loads now: no object is loaded twice."""
    for position, segment in enumerate(segments):
        if segment.record.loads:
            return segments[:position]
    return segments
