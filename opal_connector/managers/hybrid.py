"""`Hybrid`: the coordinator of models in which groups look back on different parts of a prefix.

Which lengths a group can serve is a set, not everything up to a longest one: a sliding window can
be there at 4,000 tokens and not at 3,000. The longest length in all sets is found by asking one
group after the other for its longest up to the present candidate until none shortens it any more;
each of them answers with the maximum of its set up to there, so this ends at the maximum of the
intersection (the fixed point of vLLM's HybridKVCacheCoordinator, kv_cache_coordinator.py).
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from opal_connector.keys import AttentionLayout, TokenChain
from opal_connector.managers.coordinator import (
    NOTHING,
    HitPlan,
    OpalKVCacheCoordinator,
    UnknownNames,
)
from opal_connector.managers.presence import GroupPresence
from opal_connector.managers.records import ObjectKey, ObjectSpec, object_key
from opal_connector.managers.segments import Segment
from opal_connector.managers.single_type import ChainEnd, SingleTypeManager
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.transfers import ObjectName

_MOST_SINGLES = 128  # that one question names: each costs a look into a directory


class _Reach(NamedTuple):
    """The longest length that all groups serve, and the longest that the chains alone would."""

    tokens: int
    chain_tokens: int
    presences: list[GroupPresence]


class Hybrid(OpalKVCacheCoordinator):
    """Several groups, or one that does not need everything."""

    def __init__(
        self,
        storage: OpalStorageManager,
        managers: Sequence[SingleTypeManager],
        layout: AttentionLayout,
    ) -> None:
        super().__init__(managers, layout)
        self._storage = storage
        self._hash_block_tokens = layout.hash_block_tokens
        # Chains first: they bound the rest, and cost one look where nothing is there.
        self._order = sorted(range(len(managers)), key=lambda group: not managers[group].is_chain)

    def find_hit(self, chain: TokenChain, *, computed_blocks: int, max_blocks: int) -> HitPlan:
        """See `OpalKVCacheCoordinator.find_hit`. Hits begin and end where blocks of all groups end.

        vLLM's own hit may end inside a block of a group; it is then left as it is.
        """
        block_tokens, unit = self._hash_block_tokens, self.layout.alignment_tokens
        computed_tokens, most = computed_blocks * block_tokens, max_blocks * block_tokens
        most -= most % unit
        if computed_tokens % unit or computed_tokens >= most:
            return NOTHING
        views = [self.group_hashes(chain, group) for group in range(len(self.managers))]
        hopeful = self._reach(views, computed_tokens, most, is_hopeful=True)
        if hopeful.tokens <= computed_tokens:
            return HitPlan(0, (), False, self._junction(hopeful, computed_tokens))
        reach = self._reach(views, computed_tokens, hopeful.tokens, is_hopeful=False)
        return HitPlan(
            (reach.tokens - computed_tokens) // block_tokens,
            self._segments(reach, computed_tokens),
            hopeful.tokens > reach.tokens,
            self._junction(hopeful, computed_tokens),
        )

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
        full_tokens = full_blocks * self._hash_block_tokens
        end = ChainEnd(
            tokens=len(chain.hashes) * self._hash_block_tokens,
            junction_tokens=junction_blocks * self._hash_block_tokens,
            alignment_tokens=self.layout.alignment_tokens,
        )
        found: list[tuple[int, ObjectSpec]] = []
        for group in self._order:
            manager = self.managers[group]
            block_tokens = manager.attention.block_tokens
            specs = manager.storable(
                self.group_hashes(chain, group),
                first_chunk=next_chunks[group],
                full_blocks=full_tokens // block_tokens,
                include_tail=include_tail,
                end=end,
            )
            found += [
                ((spec.first_block + spec.block_count) * block_tokens, spec) for spec in specs
            ]
        found.sort(key=lambda entry: entry[0])  # stable: chains before the others at one end
        return [spec for _, spec in found]

    def unknown_names(self, chain: TokenChain, *, stop_block: int, max_blocks: int) -> UnknownNames:
        """See `OpalKVCacheCoordinator.unknown_names`.

        Of the first chain a beginning without a gap; of the others, what no tier has of what a
        longer hit would need.
        """
        first: tuple[tuple[ObjectName, ...], tuple[ObjectName, ...]] = ((), ())
        singles: list[ObjectName] = []
        for place, group in enumerate(self._order):
            manager = self.managers[group]
            block_tokens = manager.attention.block_tokens
            stop_tokens = stop_block * self._hash_block_tokens
            last = max_blocks * self._hash_block_tokens // block_tokens
            low = stop_tokens // block_tokens
            if manager.attention.retention == "input":
                low = 0
            elif not manager.is_chain:
                low = manager.attention.needed_blocks(stop_tokens + self.layout.alignment_tokens)[0]
            view = self.group_hashes(chain, group)
            if manager.attention.retention != "input":  # of which all is needed at any length
                view = view[:last]
            chunks, tails = manager.names(view, low)
            if place == 0 and manager.is_chain:
                first = self._unknown(chunks), self._unknown(tails)
            else:
                singles += (*self._unknown(chunks), *self._unknown(tails))
        return UnknownNames(*first, tuple(singles[-_MOST_SINGLES:]))

    def _unknown(self, names: Sequence[ObjectName]) -> tuple[ObjectName, ...]:
        find = self._storage.find
        return tuple(
            name for name in names if find(object_key(name.chunk_hash, name.group)) is None
        )

    def chain_keys(self, chain: TokenChain, joins: Collection[int] = ()) -> list[ObjectKey]:
        """See `OpalKVCacheCoordinator.chain_keys`.

        By where they end, chains before the others: in an order of use, what a window needs goes
        just before the end of the chain that is worth nothing without it.
        """
        ends = {len(chain.hashes), *joins}
        tokens = [end * self._hash_block_tokens for end in ends if end <= len(chain.hashes)]
        found: list[tuple[int, ObjectKey]] = []
        for group in self._order:
            view = self.group_hashes(chain, group)
            found += self.managers[group].chain_keys(view, ends=tokens)
        found.sort(key=lambda entry: entry[0])
        return [key for _, key in found]

    # ---- inside ----

    def _reach(
        self, views: list[list[bytes]], computed_tokens: int, most: int, *, is_hopeful: bool
    ) -> _Reach:
        presences = [
            manager.presence(self._storage, view, is_hopeful=is_hopeful)
            for manager, view in zip(self.managers, views, strict=True)
        ]
        tokens, chain_tokens, is_first = most, most, True
        while tokens > computed_tokens:
            before = tokens
            for group in self._order:
                manager = self.managers[group]
                tokens = manager.servable_tokens(
                    presences[group], computed_tokens=computed_tokens, most=tokens
                )
                if manager.is_chain and is_first:
                    chain_tokens = tokens
                if tokens <= computed_tokens:
                    break
            if tokens == before:
                break
            is_first = False
        return _Reach(tokens, chain_tokens, presences)

    def _segments(self, reach: _Reach, computed_tokens: int) -> tuple[Segment, ...]:
        """What brings a hit. Its tokens are counted by the first group that has any."""
        segments: list[Segment] = []
        left = reach.tokens - computed_tokens
        for group in self._order:
            manager = self.managers[group]
            brought = manager.segments(
                reach.presences[group], computed_tokens=computed_tokens, tokens=reach.tokens
            )
            for position, segment in enumerate(brought):
                counted = 0
                if left:
                    is_last = position == len(brought) - 1
                    counted = segment.block_count * manager.attention.block_tokens
                    counted = left if is_last else min(left, counted)
                    left -= counted
                segments.append(msgspec.structs.replace(segment, hit_tokens=counted))
        return tuple(segments)

    def _junction(self, hopeful: _Reach, computed_tokens: int) -> int:
        """Where the chains part from what is known, if that is further than the hit."""
        has_chain = any(manager.is_chain for manager in self.managers)
        tokens = hopeful.chain_tokens
        if not has_chain or tokens <= max(hopeful.tokens, computed_tokens):
            return 0
        return tokens // self._hash_block_tokens
