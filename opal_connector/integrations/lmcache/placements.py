"""What LMCache holds where, chunk by chunk, and the events that say so."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import msgspec
from lmcache.v1.distributed.api import ObjectKey

from opal_connector.events import Copy, Delete, Insert, KVCEvent, Move, ObjectFact
from opal_connector.integrations.lmcache.bindings import Link, TokenBindings

HOST_TIER: Final = "CPUMemory"  # LMCache's L1, as far as it is memory
_MOST_SOURCES: Final = 64


class Chunk(NamedTuple):
    """A chunk of one object group, of all ranks together."""

    model: str
    chunk_hash: bytes
    cache_salt: str
    group: int


_Place = tuple[int, str]
_Ranks = dict[int, int]  # by rank, as bits, who of the sources has it


class Counts(msgspec.Struct, frozen=True):
    """What is announced and what is not, in chunks of one object group."""

    announced: dict[str, int]
    without_tokens: int
    of_other_models: int


class PlacementBooks:
    """The chunks of all tiers, by who says that he has them.

    LMCache keeps an object for every rank and object group. A chunk of a group is in a tier when
    all ranks are. Two sources may have one tier, L1 and an adapter with host memory: it is there
    while either has it. It is announced as soon as it is known what tokens it is.

    Mutable state: who has what, what is announced, which chunks wait for tokens, the tokens, the
    sources and the model that is announced; guarded by `lock`, in which nothing blocks and no other
    lock is taken. The events leave in the order in which they became true.
    """

    def __init__(
        self, bindings: TokenBindings, announce: Callable[[KVCEvent], object], model: str | None
    ) -> None:
        self.lock = threading.RLock()
        self.announce = announce
        self._bindings = bindings
        self._model = model
        self._held: dict[str, dict[Chunk, _Ranks]] = {HOST_TIER: {}}
        self._announced: dict[_Place, dict[Chunk, ObjectFact]] = {(0, HOST_TIER): {}}
        self._awaited: dict[bytes, set[Chunk]] = {}
        self._awaiting: dict[Chunk, bytes] = {}
        self._bits: dict[str, int] = {}

    # ---- questions ----

    @property
    def model(self) -> str | None:
        """The model whose chunks are announced; None until one is chosen."""
        return self._model

    @property
    def places(self) -> tuple[_Place, ...]:
        """The (group, tier) pairs that were ever announced, host memory first."""
        return tuple(self._announced)

    @property
    def tiers(self) -> tuple[str, ...]:
        """All tiers that were heard of, host memory first."""
        return tuple(self._held)

    def facts(self, group: int, tier: str) -> list[ObjectFact]:
        """What is announced of a group in a tier."""
        with self.lock:
            return list(self._announced.get((group, tier), {}).values())

    def keys(self, source: str) -> Iterator[tuple[str, ObjectKey]]:
        """What a source is believed to have, with the tiers; others may change meanwhile."""
        bit = self._bits.get(source, 0)
        for tier, chunks in list(self._held.items()):
            for chunk, ranks in list(chunks.items()):
                for rank, bits in list(ranks.items()):
                    if bits & bit:
                        yield tier, _key(chunk, rank)

    def counts(self) -> Counts:
        """How many chunks are announced, by tier, and how many are not, and why."""
        with self.lock:
            announced: dict[str, int] = {}
            for (_, tier), facts in self._announced.items():
                announced[tier] = announced.get(tier, 0) + len(facts)
            others = {
                chunk
                for held in self._held.values()
                for chunk in held
                if chunk.model != self._model
            }
            return Counts(announced, len(self._awaiting), len(others))

    # ---- changes ----

    def announce_model(self, model: str) -> None:
        """Announce this model's chunks, if none was chosen before."""
        with self.lock:
            if self._model is not None:
                return
            self._model = model
            for tier, chunks in self._held.items():
                for chunk in chunks:
                    self._judge(chunk, tier)

    def add(self, source: str, tier: str, keys: Iterable[ObjectKey], came_from: str = "") -> None:
        """A source has objects in a tier; `came_from` is the tier that they were read from."""
        with self.lock:
            bit = self._bit(source)
            held = self._held.setdefault(tier, {})
            for key in keys:
                chunk = _chunk(key)
                ranks = held.setdefault(chunk, {})
                ranks[key.kv_rank] = ranks.get(key.kv_rank, 0) | bit
                self._judge(chunk, tier, came_from)

    def remove(self, source: str, tier: str, keys: Iterable[ObjectKey]) -> None:
        """A source has objects no longer."""
        with self.lock:
            bit = self._bit(source)
            held = self._held.get(tier, {})
            for key in keys:
                chunk = _chunk(key)
                ranks = held.get(chunk)
                if ranks is None or key.kv_rank not in ranks:
                    continue
                ranks[key.kv_rank] &= ~bit
                if not ranks[key.kv_rank]:
                    del ranks[key.kv_rank]
                if not ranks:
                    del held[chunk]
                self._judge(chunk, tier)

    def move(self, source: str, from_tier: str, tier: str, key: ObjectKey) -> None:
        """A source has moved an object to another tier.

        A chunk of several ranks moves one part after the other: it leaves with the first of them,
        and is back with the last. A chunk of one is announced as what it is, a move.
        """
        with self.lock:
            chunk = _chunk(key)
            fact = self._announced.get((chunk.group, from_tier), {}).get(chunk)
            is_only = self._held[from_tier].get(chunk) == {key.kv_rank: self._bit(source)}
            is_new = chunk not in self._announced.get((chunk.group, tier), {})
            if fact is None or not (is_only and is_new):
                self.add(source, tier, (key,), from_tier)
                self.remove(source, from_tier, (key,))
                return
            del self._held[from_tier][chunk]
            del self._announced[chunk.group, from_tier][chunk]
            ranks = self._held.setdefault(tier, {}).setdefault(chunk, {})
            ranks[key.kv_rank] = ranks.get(key.kv_rank, 0) | self._bit(source)
            self._announced.setdefault((chunk.group, tier), {})[chunk] = fact
            self.announce(Move(fact, from_tier, tier))

    def replace(self, source: str, present: Iterable[tuple[str, ObjectKey]]) -> int:
        """A source has exactly this, by tier; returns how many objects that changes.

        To be called by who tells of the source otherwise. The comparison is made without the lock,
        because others wait for that who must not wait long.
        """
        now, before = set(present), set(self.keys(source))
        for tier, key in before - now:
            self.remove(source, tier, (key,))
        for tier, key in now - before:
            self.add(source, tier, (key,))
        return len(before ^ now)

    def bind(self, bound: Iterable[tuple[bytes, bytes | None, list[int]]]) -> int:
        """Learn tokens of chunks (name, name of the one before, tokens); returns how many."""
        with self.lock:
            learned = [
                name for name, parent, ids in bound if self._bindings.bind(name, parent, ids)
            ]
            for chunk_hash in learned:
                for chunk in self._awaited.pop(chunk_hash, ()):
                    del self._awaiting[chunk]
                    for tier, held in self._held.items():
                        if chunk in held:
                            self._judge(chunk, tier)
            return len(learned)

    def is_bound(self, chunk_hash: bytes) -> bool:
        """Whether the tokens of a chunk are known."""
        with self.lock:
            return chunk_hash in self._bindings

    # ---- inside ----

    def _bit(self, source: str) -> int:
        bit = self._bits.get(source)
        if bit is None:
            bit = self._bits[source] = 1 << min(len(self._bits), _MOST_SOURCES)
        return bit

    def _judge(self, chunk: Chunk, tier: str, came_from: str = "") -> None:
        """Announce what a change of one chunk in one tier means, if anything."""
        if chunk.model != self._model:
            return
        place = chunk.group, tier
        fact = self._announced.get(place, {}).get(chunk)
        is_whole = _is_whole(self._held[tier].get(chunk, {}))
        if is_whole and fact is None:
            self._appear(chunk, tier, came_from)
        elif not is_whole and fact is not None:
            del self._announced[place][chunk]
            self.announce(Delete(fact, tier))
        if not is_whole and chunk in self._awaiting:
            self._stop_waiting(chunk)

    def _appear(self, chunk: Chunk, tier: str, came_from: str) -> None:
        link = self._bindings.link(chunk.chunk_hash, chunk.cache_salt)
        if not isinstance(link, Link):
            awaited = self._awaiting.get(chunk)
            if awaited is None:
                self._awaiting[chunk] = link
                self._awaited.setdefault(link, set()).add(chunk)
            return
        fact = ObjectFact(chunk.group, link.parent, link.digest)
        elsewhere = [
            other
            for other in (came_from, *self._held)
            if other != tier and chunk in self._announced.get((chunk.group, other), {})
        ]
        self._announced.setdefault((chunk.group, tier), {})[chunk] = fact
        self.announce(Copy(fact, elsewhere[0], tier) if elsewhere else Insert(fact, tier))

    def _stop_waiting(self, chunk: Chunk) -> None:
        if any(_is_whole(held.get(chunk, {})) for held in self._held.values()):
            return
        awaited = self._awaiting.pop(chunk)
        chunks = self._awaited[awaited]
        chunks.discard(chunk)
        if not chunks:
            del self._awaited[awaited]


def world_size_of(kv_rank: int) -> int:
    """How many ranks share a chunk of which this is one rank's part."""
    return max(1, int(ObjectKey.WorldSizeFromKVRank(kv_rank)))


def _is_whole(ranks: _Ranks) -> bool:
    """Whether all ranks of some world are there."""
    sizes: dict[int, int] = {}
    for rank in ranks:
        size = world_size_of(rank)
        sizes[size] = sizes.get(size, 0) + 1
    return any(count >= size for size, count in sizes.items())


def _chunk(key: ObjectKey) -> Chunk:
    return Chunk(key.model_name, key.chunk_hash, key.cache_salt, key.object_group_id)


def _key(chunk: Chunk, rank: int) -> ObjectKey:
    return ObjectKey(chunk.chunk_hash, chunk.model, rank, chunk.group, chunk.cache_salt)
