"""Opal's adapter in the same process: its real tiers, with every move between them."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

from opal_connector.events import Copy, Delete, Insert, KVCEvent, Move, ObjectFact
from opal_connector.events.channel import TierLoad
from opal_connector.integrations.lmcache.books import ObjectBooks
from opal_connector.integrations.lmcache.identity import StoredObject
from opal_connector.integrations.lmcache.l2_adapter import OpalL2Adapter
from opal_connector.integrations.lmcache.placements import PlacementBooks

_MOST_WRAPPERS: Final = 8


class TierFollower:
    """Tells the placements what the books of one adapter say, from the thread that changes them.

    What is there already is told first; nothing comes between. It is one of the followers of the
    books' catalog, which may have several: every server module has its own.
    """

    def __init__(self, books: ObjectBooks, placements: PlacementBooks, source: str) -> None:
        self._books = books
        self._placements = placements
        self._source = source
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
        books.catalog.followers.append(self._hear)
        for tier, book_key in books.storage.placements():
            self._placements.add(self._source, tier, [books.catalog.stored(book_key).key])

    def _leave(self, books: ObjectBooks) -> None:
        with contextlib.suppress(ValueError):  # it has left already
            books.catalog.followers.remove(self._hear)

    def _hear(self, event: KVCEvent, stored: StoredObject) -> None:
        key, source, placements = stored.key, self._source, self._placements
        match event:
            case Insert(ObjectFact(), tier):
                placements.add(source, tier, (key,), "")
            case Delete(ObjectFact(), tier):
                placements.remove(source, tier, (key,))
            case Copy(ObjectFact(), from_tier, tier):
                placements.add(source, tier, (key,), from_tier)
            case Move(ObjectFact(), from_tier, tier):
                placements.move(source, from_tier, tier, key)


def opal_adapters(adapters: Iterable[Any]) -> Iterator[OpalL2Adapter]:
    """Opal's adapters among LMCache's, also inside its wrappers."""
    for outer in adapters:
        adapter = outer
        for _ in range(_MOST_WRAPPERS):
            if isinstance(adapter, OpalL2Adapter):
                yield adapter
                break
            adapter = getattr(adapter, "_inner", None)
