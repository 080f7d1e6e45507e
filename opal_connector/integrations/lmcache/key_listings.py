"""Listings of all keys in pages, each sorted once however many pages it has."""

import threading
from typing import Final

from lmcache.v1.distributed.api import ObjectKey

from opal_connector.integrations.lmcache.books import ObjectBooks

CURSOR_BYTES: Final = 34  # of a key of the books
_MOST_LISTINGS: Final = 4  # that are kept while somebody asks for their pages
_Places = list[tuple[bytes, ObjectKey]]


class KeyListings:
    """The pages of listings, in the order of the books' keys.

    A listing is sorted when its first page is asked for, and what is left of it is kept under the
    cursor of its next page. Only so many are kept, and the one that was asked for longest ago goes
    first; a cursor of one that is not kept begins a new listing behind its place. So nobody has to
    end a listing, and every page is right.

    Mutable state: the listings, by the model and the cursor; guarded by `_lock`. Each is used by
    the call that has taken it out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[str | None, bytes], tuple[_Places, int]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def page(
        self, books: ObjectBooks, model_name: str | None, after: bytes, count: int
    ) -> tuple[list[tuple[ObjectKey, int]], bytes | None]:
        """Keys behind `after` with their bytes, and the cursor of the next page if there is one.

        Keys that have gone since the listing began are left out.
        """
        with self._lock:
            places, begin = self._kept.pop((model_name, after), ([], 0))
        if not places:
            places = books.read(lambda held: held.catalog.places(model_name, after))
            places.sort(key=lambda item: item[0])  # without the lock of the books
        end = begin + count
        keys = [key for _, key in places[begin:end]]
        found = books.read(lambda held: held.catalog.sizes(keys))
        if end >= len(places):
            return found, None
        cursor = places[end - 1][0]
        with self._lock:
            self._kept[model_name, cursor] = places, end
            while len(self._kept) > _MOST_LISTINGS:
                del self._kept[next(iter(self._kept))]
        return found, cursor
