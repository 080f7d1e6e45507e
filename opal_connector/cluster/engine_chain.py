"""An engine's own block hashes, translated into Opal's digests.

An engine names blocks by hashes that nobody else can compute; what it stores it also describes by
tokens, parent and extras, and from these the digest follows that every process computes alike.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from opal_connector.cluster.channel_facts import RUN_BLOCKS, Block, facts_of_blocks
from opal_connector.cluster.engine_lineage import EngineHash, Lineage, StoredBlocks
from opal_connector.events import Delete, Insert, ObjectFact
from opal_connector.keys import LoraIdentity

_MOST_PLACES: Final = 256  # groups times tiers


class ChainCounters(msgspec.Struct):
    """What could not be translated as it came."""

    repeats: int = 0  # announced again, and counted once
    unknown_removals: int = 0
    untranslatable: int = 0  # without blocks, of another size, of too many tiers
    refused_blocks: int = 0  # beyond the bound


class _Presence:
    """What one tier holds of one group.

    Mutable state: copies per engine hash, and the digests among them with their parents. Where
    several engine hashes mean one digest, `also` counts those beyond the first.
    """

    __slots__ = ("also", "copies", "digests", "group", "lineage", "tier")

    def __init__(self, group: int, tier: str, lineage: Lineage) -> None:
        self.group = group
        self.tier = tier
        self.lineage = lineage
        self.copies: dict[EngineHash, int] = {}
        self.digests: dict[bytes, bytes] = {}
        self.also: dict[bytes, int] = {}

    def show(self, parent: bytes, digest: bytes) -> bool:
        """One more engine hash means this digest; returns whether it is new here."""
        if digest in self.digests:
            self.also[digest] = self.also.get(digest, 0) + 1
            return False
        self.digests[digest] = parent
        return True

    def hide(self, digest: bytes) -> bool:
        """One engine hash less means this digest; returns whether it is gone."""
        more = self.also.pop(digest, 0)
        if more > 1:
            self.also[digest] = more - 1
        elif not more:
            del self.digests[digest]
        return not more


def plain_identity(lora_name: str) -> LoraIdentity:
    """An adapter of which nothing but the name is known."""
    return LoraIdentity(lora_name, "", "")


class EngineChain:
    """Translates the events of one engine; what it returns are facts by Opal's digests.

    Every block of a (group, tier) is inserted with its first copy and deleted with its last. What
    cannot be named yet is kept, and inserted as soon as its ancestors are known. The groups have
    the block sizes of `sizes`, or those of their first events; digests are over `unit_tokens`, of
    which these are multiples, or over a block where none is given.
    Mutable state: presences and lineages; used by one thread.
    """

    def __init__(
        self,
        lora_identity: Callable[[str], LoraIdentity | None] = plain_identity,
        *,
        unit_tokens: int | None = None,
        sizes: Mapping[int, int] = MappingProxyType({}),
        max_blocks: int = 1 << 22,
        max_parked: int = 4_096,
        max_parked_bytes: int = 64 << 20,
        max_absent: int = 1 << 16,
    ) -> None:
        self.counters = ChainCounters()
        self._lora_identity = lora_identity
        self._max_blocks = max_blocks
        self._bounds = (max_parked, max_parked_bytes, max_absent)
        self._presences: dict[tuple[int, str], _Presence] = {}
        self._lineages: dict[int, Lineage] = {}  # per block size
        self._unit_tokens = unit_tokens
        self._sizes = dict(sizes)  # of the groups
        self._block_count = 0

    # ---- what it knows ----

    @property
    def parked_count(self) -> int:
        """Events that wait for an ancestor."""
        return sum(lineage.parked_count for lineage in self._lineages.values())

    @property
    def unnamed_blocks(self) -> int:
        """Blocks that are present and have no digest yet."""
        named = sum(
            len(presence.digests) + sum(presence.also.values())
            for presence in self._presences.values()
        )
        return self._block_count - named

    @property
    def dropped_events(self) -> int:
        """Events that have waited for too long among too many."""
        return sum(lineage.dropped_events for lineage in self._lineages.values())

    @property
    def undigestible_blocks(self) -> int:
        """Blocks that the engine hashes with something that Opal has no digest for."""
        return sum(lineage.undigestible_blocks for lineage in self._lineages.values())

    def tiers(self) -> list[tuple[int, str]]:
        """The (group, tier) pairs that were ever heard of."""
        return list(self._presences)

    def held(self, group: int, tier: str) -> list[Block]:
        """Parent digest and digest of every block there."""
        presence = self._presences.get((group, tier))
        if presence is None:
            return []
        return [(parent, digest) for digest, parent in presence.digests.items()]

    # ---- events ----

    def stored(self, event: StoredBlocks) -> list[Insert]:
        """Blocks were stored. Returns what became present, as far as it can be named."""
        presence = self._presence(event)
        if presence is None or not (event.block_hashes or event.token_ids):
            self.counters.untranslatable += 1
            return []
        lineage = presence.lineage
        fresh = self._count_copies(presence, event)
        found = [(presence, lineage.links[block]) for block in fresh if block in lineage.links]
        linked = lineage.learn(event, self._lora_identity)
        if len(self._lineages) > 1:
            linked += self._borrowed(presence, fresh)
        return self._inserts(found + self._everywhere(lineage, linked))

    def forget_group(self, group: int) -> list[Delete]:
        """What was said of a group is not what it seemed; its blocks may be of any size now."""
        self._sizes.pop(group, None)
        events: list[Delete] = []
        for key in [key for key in self._presences if key[0] == group]:
            events += self._emptied(self._presences.pop(key))
        return events

    def adapter_known(self, lora_name: str) -> list[Insert]:
        """`lora_identity` can tell this adapter now: name what waited for it."""
        found: list[tuple[_Presence, Block]] = []
        for lineage in self._lineages.values():
            linked = lineage.retry_adapter(lora_name, self._lora_identity)
            found += self._everywhere(lineage, linked)
        return self._inserts(found)

    def removed(self, group: int, tier: str, block_hashes: Iterable[EngineHash]) -> list[Delete]:
        """One copy of each of these blocks has left."""
        presence = self._presences.get((group, tier))
        gone: list[bytes] = []
        for block in block_hashes:
            copies = presence.copies.get(block, 0) if presence is not None else 0
            if presence is None or not copies:
                self.counters.unknown_removals += 1
            elif copies > 1:
                presence.copies[block] = copies - 1
            else:
                gone += self._withdraw(presence, block)
        return list(_deletes(group, tier, gone))

    def cleared(self, tier: str) -> list[Delete]:
        """All copies of all groups have left a tier."""
        events: list[Delete] = []
        for presence in self._presences.values():
            if presence.tier == tier:
                events += self._emptied(presence)
        return events

    # ---- inside ----

    def _emptied(self, presence: _Presence) -> list[Delete]:
        events = list(_deletes(presence.group, presence.tier, list(presence.digests)))
        blocks, presence.copies = presence.copies, {}
        presence.digests, presence.also = {}, {}
        self._block_count -= len(blocks)
        for block in blocks:
            self._maybe_absent(presence.lineage, block)
        return events

    def _presence(self, event: StoredBlocks) -> _Presence | None:
        """Where the event belongs; None if its blocks are not of the group's size, or too much."""
        size = event.block_size if event.token_ids else self._sizes.get(event.group, 0)
        if not size and len(self._lineages) == 1:
            size = next(iter(self._lineages))  # a placeholder without tokens names known blocks
        if size <= 0 or self._sizes.get(event.group, size) != size:
            return None
        unit = self._unit_tokens or size
        if size % unit:
            return None
        self._sizes[event.group] = size
        lineage = self._lineages.get(size)
        if lineage is None:
            lineage = self._lineages[size] = Lineage(size, unit, *self._bounds)
        key = (event.group, event.tier)
        presence = self._presences.get(key)
        if presence is None:
            if len(self._presences) >= _MOST_PLACES:
                return None
            presence = self._presences[key] = _Presence(*key, lineage)
        return presence

    def _count_copies(self, presence: _Presence, event: StoredBlocks) -> list[EngineHash]:
        """Add a copy of every block; returns those that were absent.

        An engine may report blocks again that it has already, always from the first block of a
        sequence on, and removes them once. Who can't tell such a report from a second copy counts
        no second one: a block forgotten too early costs a hit, one kept for ever costs trust.
        """
        is_report = event.parent is None if event.is_report is None else event.is_report
        copies = presence.copies
        fresh: list[EngineHash] = []
        for block in event.stored_hashes:
            if block not in copies:
                if self._block_count >= self._max_blocks:
                    self.counters.refused_blocks += 1
                    continue
                copies[block] = 1
                self._block_count += 1
                presence.lineage.present(block)
                fresh.append(block)
            elif is_report:
                self.counters.repeats += 1
            else:
                copies[block] += 1
        return fresh

    def _everywhere(
        self, lineage: Lineage, linked: Sequence[EngineHash]
    ) -> list[tuple[_Presence, Block]]:
        """Blocks that have got a digest, with all the presences that hold them."""
        found: list[tuple[_Presence, Block]] = []
        others = [other for other in self._lineages.values() if other is not lineage]
        for block in linked:
            holders = [
                presence
                for presence in self._presences.values()
                if presence.lineage is lineage and block in presence.copies
            ]
            link = lineage.links[block]
            found += ((presence, link) for presence in holders)
            for other in others:
                if self._is_held(other, block):
                    adopted = other.adopt(block, link[1], self._lora_identity)
                    found += self._everywhere(other, adopted)
            if not holders:
                lineage.absent(block)
        return found

    def _is_held(self, lineage: Lineage, block: EngineHash) -> bool:
        return any(
            presence.lineage is lineage and block in presence.copies
            for presence in self._presences.values()
        )

    def _borrowed(self, presence: _Presence, fresh: Sequence[EngineHash]) -> list[EngineHash]:
        """Blocks that only the lineages of other block sizes know, known here from now on."""
        adopted: list[EngineHash] = []
        for block in fresh:
            for other in self._lineages.values():
                link = other.links.get(block)
                if link is not None and block not in presence.lineage.links:
                    adopted += presence.lineage.adopt(block, link[1], self._lora_identity)
        return adopted

    def _withdraw(self, presence: _Presence, block: EngineHash) -> list[bytes]:
        """The last copy of a block is gone; returns its digest if nothing else means it."""
        del presence.copies[block]
        self._block_count -= 1
        link = presence.lineage.links.get(block)
        self._maybe_absent(presence.lineage, block)
        return [link[1]] if link is not None and presence.hide(link[1]) else []

    def _maybe_absent(self, lineage: Lineage, block: EngineHash) -> None:
        if not self._is_held(lineage, block):
            lineage.absent(block)

    def _inserts(self, found: Iterable[tuple[_Presence, Block]]) -> list[Insert]:
        by_presence: dict[int, tuple[_Presence, list[Block]]] = {}
        for presence, (parent, digest) in found:
            if presence.show(parent, digest):
                blocks = by_presence.setdefault(id(presence), (presence, []))[1]
                blocks.append((parent, digest))
        return [
            Insert(fact, presence.tier)
            for presence, blocks in by_presence.values()
            for fact in facts_of_blocks(presence.group, blocks)
        ]


def _deletes(group: int, tier: str, digests: list[bytes]) -> Iterator[Delete]:
    for start in range(0, len(digests), RUN_BLOCKS):
        run = b"".join(digests[start : start + RUN_BLOCKS])
        yield Delete(ObjectFact(group, b"", run), tier)
