"""Opal's adapter in the same process: its real tiers, with every move between them."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from lmcache.v1.distributed.api import ObjectKey

from opal_connector.events import Copy, Delete, Insert, KVCEvent, Move, ObjectFact
from opal_connector.events.channel import TierLoad
from opal_connector.integrations.lmcache.books import ObjectBooks
from opal_connector.integrations.lmcache.l2_adapter import OpalL2Adapter
from opal_connector.integrations.lmcache.placements import PlacementBooks
from opal_connector.transfers import ObjectName

_MOST_WRAPPERS: Final = 8


class TierFollower:
    """Tells the placements what the books of one adapter say, from the thread that changes them.

    What is there already is told first; nothing comes between. Mutable state: the listener of the
    books' log, which it takes over and hands on to; guarded by their lock.
    """

    def __init__(self, books: ObjectBooks, placements: PlacementBooks, source: str) -> None:
        self._books = books
        self._placements = placements
        self._source = source
        self._before = books.log.listener
        books.read(self._attach)

    def loads(self) -> Iterator[TierLoad]:
        """How full the tiers are."""
        for tier in self._books.storage.tiers:
            yield TierLoad(tier.tier, tier.used_bytes, tier.capacity_bytes)

    def detach(self) -> None:
        """Follow no longer."""
        self._books.read(self._leave)

    # ---- under the lock of the adapter's books ----

    def _attach(self, books: ObjectBooks) -> None:
        self._before = books.log.listener
        books.log.listener = self._hear
        for tier in books.storage.tiers:
            names = (
                ObjectName(record.group, record.parent_hash, record.run, record.group)
                for record in tier.index.records.values()
                if record.is_readable
            )
            keys = (self._key(name) for name in names)
            self._placements.add(self._source, tier.tier, [key for key in keys if key is not None])

    def _leave(self, books: ObjectBooks) -> None:
        books.log.listener = self._before

    def _hear(self, event: KVCEvent) -> None:
        if self._before is not None:
            self._before(event)
        fact = event.fact
        key = self._key(ObjectName(fact.group, fact.parent_hash, fact.block_hashes, fact.group))
        if key is None:
            return
        source, placements = self._source, self._placements
        match event:
            case Insert(ObjectFact(), tier):
                placements.add(source, tier, (key,), "")
            case Delete(ObjectFact(), tier):
                placements.remove(source, tier, (key,))
            case Copy(ObjectFact(), from_tier, tier):
                placements.add(source, tier, (key,), from_tier)
            case Move(ObjectFact(), from_tier, tier):
                placements.move(source, from_tier, tier, key)

    def _key(self, name: ObjectName) -> ObjectKey | None:
        stored = self._books.catalog.read(name)
        return None if stored is None else stored.key


def opal_adapters(adapters: Iterable[Any]) -> Iterator[OpalL2Adapter]:
    """Opal's adapters among LMCache's, also inside its wrappers."""
    for outer in adapters:
        adapter = outer
        for _ in range(_MOST_WRAPPERS):
            if isinstance(adapter, OpalL2Adapter):
                yield adapter
                break
            adapter = getattr(adapter, "_inner", None)
