"""What the use of LMCache's keys means for who leaves a tier next."""

from collections.abc import Iterable, Sequence

from lmcache.v1.distributed.api import ObjectKey

from opal_connector.integrations.lmcache.catalog import Catalog
from opal_connector.integrations.lmcache.chains import ChainMemory
from opal_connector.managers import ObjectRecord, OpalStorageManager
from opal_connector.managers.records import ObjectKey as BookKey
from opal_connector.managers.upkeep import Upkeep


class Uses:
    """Counts uses, the tail of a sequence before its head, so that the head leaves last.

    To the books every object stands alone: LMCache's keys name no parents. A lookup names all
    chunks of a sequence in order, before the missing ones are stored; that order is enough to keep
    the head as fresh as the tail under a policy that looks at recency. Mutable state: that of
    `ChainMemory`, and of the tiers; guarded by the lock of `ObjectBooks`.
    """

    def __init__(self, storage: OpalStorageManager, catalog: Catalog, upkeep: Upkeep) -> None:
        self._storage = storage
        self._catalog = catalog
        self._upkeep = upkeep
        self._chains = ChainMemory()

    def looked_up(self, keys: Sequence[ObjectKey], found: Iterable[ObjectKey]) -> None:
        """A lookup of these keys is a use of those that were found."""
        chain, known = self._chains.remember(keys), set(found)
        self.used([key for key in chain if key in known])

    def used(self, keys: Sequence[ObjectKey]) -> None:
        """What is stored of a sequence is used, head first."""
        book_keys = self._book_keys(keys)
        if book_keys:
            self._storage.touch(book_keys)
            self._upkeep.used(book_keys)

    def stored(self, records: Iterable[ObjectRecord]) -> None:
        """What was stored makes the head of its sequence as fresh as itself."""
        objects = (self._catalog.read(self._storage.name_of(record)) for record in records)
        keys = [stored.key for stored in objects if stored is not None]
        for chain in self._chains.around(keys):
            book_keys = self._book_keys(chain)
            self._storage.touch(book_keys, frozenset(book_keys))
        self._upkeep.used(self._book_keys(keys))

    def _book_keys(self, keys: Sequence[ObjectKey]) -> list[BookKey]:
        return [stored.book_key for key in keys for stored in self._catalog.find_all(key)]
