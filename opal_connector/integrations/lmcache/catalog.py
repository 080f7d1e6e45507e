"""What LMCache's keys are to be found in Opal's tiers, and what LMCache has to be told of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from lmcache.v1.distributed.api import ObjectKey

from opal_connector.events import Copy, Delete, Insert, KVCEvent, ObjectFact
from opal_connector.integrations.lmcache.identity import (
    Context,
    ContextNumber,
    Layout,
    StoredObject,
    context_number,
    object_of,
)
from opal_connector.managers import object_key
from opal_connector.managers.records import ObjectKey as BookKey
from opal_connector.transfers import ObjectName


class KeyNews(msgspec.Struct, frozen=True):
    """A key has come, or it has gone from all tiers: with as many bytes as when it came."""

    key: ObjectKey
    size_bytes: int
    is_there: bool


Follower = Callable[[KVCEvent, StoredObject], None]


class Catalog:
    """The objects of all tiers by LMCache's key; one key may name several, of different layouts.

    It follows the books' events, so it cannot say anything else than they do. A key is news when
    its first copy comes and when its last one goes; what happens between tiers is not. Followers
    hear of all of it, from the thread that changes the books, and must not wait.

    Mutable state: the contexts, the objects with the number of their copies, the bytes per salt,
    the bytes that were told of each key, the news not yet taken and the followers; guarded by the
    lock of `ObjectBooks`.
    """

    def __init__(self) -> None:
        self._numbers: dict[Context, ContextNumber] = {}
        self._by_number: dict[bytes, ContextNumber] = {}
        self._objects: dict[BookKey, StoredObject] = {}
        self._copies: dict[BookKey, int] = {}
        self._by_key: dict[ObjectKey, list[StoredObject]] = {}
        self._salt_bytes: dict[str, int] = {}
        self._told_bytes: dict[ObjectKey, int] = {}
        self._news: list[KeyNews] = []
        self.total_bytes = 0
        self.followers: list[Follower] = []

    def __len__(self) -> int:
        return len(self._by_key)

    # ---- contexts ----

    def number(self, context: Context) -> ContextNumber:
        """The number of a context, which is known from now on."""
        number = self._numbers.get(context)
        if number is None:
            number = self._numbers[context] = ContextNumber(context)
            self._by_number[number.short] = number
        return number

    def knows(self, context: Context) -> bool:
        """Whether names can refer to this context."""
        return context in self._numbers

    def knows_context_of(self, name: ObjectName) -> bool:
        """Whether the context that a name refers to is known."""
        return context_number(name) in self._by_number

    def read(self, name: ObjectName) -> StoredObject | None:
        """The object that a name names, if it is one of a known context."""
        number = self._by_number.get(context_number(name))
        return None if number is None else object_of(name, number)

    # ---- objects ----

    def find(self, key: ObjectKey, wanted: Layout) -> StoredObject | None:
        """What is stored under a key with this layout; with an unknown one the latest."""
        for stored in reversed(self._by_key.get(key, ())):
            if stored.layout.may_be(wanted):
                return stored
        return None

    def find_all(self, key: ObjectKey) -> list[StoredObject]:
        """Everything that is stored under a key."""
        return list(self._by_key.get(key, ()))

    def hear(self, event: KVCEvent) -> None:
        """Follow the books. A move changes nothing here."""
        if isinstance(event, Insert | Copy):
            self._enter(event.fact)
        stored = self._objects[object_key(event.fact.chunk_hash, event.fact.group)]
        if isinstance(event, Delete):
            self._leave(event.fact)
        for follower in self.followers:
            follower(event, stored)

    def stored(self, book_key: BookKey) -> StoredObject:
        """The object of a key of the books, of which some tier has a copy."""
        return self._objects[book_key]

    def take_news(self) -> list[KeyNews]:
        """Keys that came and went since the last call, in order."""
        taken, self._news = self._news, []
        return taken

    @property
    def has_news(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._news)

    # ---- reports ----

    @property
    def salt_bytes(self) -> Mapping[str, int]:
        """Bytes by cache_salt, of objects and not of their copies."""
        return {salt: size for salt, size in self._salt_bytes.items() if size}

    def keys(self) -> list[tuple[ObjectKey, int]]:
        """All keys, with the bytes that are told of each when it comes and when it goes."""
        return list(self._told_bytes.items())

    def places(self, model_name: str | None, after: bytes) -> list[tuple[bytes, ObjectKey]]:
        """All keys behind the place `after`, each with its own place, in no order."""
        return [
            (place, key)
            for key, stored in self._by_key.items()
            if (place := stored[0].book_key) > after and model_name in (None, key.model_name)
        ]

    def sizes(self, keys: Sequence[ObjectKey]) -> list[tuple[ObjectKey, int]]:
        """Those keys that are there, with the bytes of all that is stored under each."""
        return [
            (key, sum(one.size_bytes for one in self._by_key[key]))
            for key in keys
            if key in self._by_key
        ]

    def check(self, placements: Iterable[BookKey]) -> None:
        """Raise AssertionError if it is not what the tiers hold."""
        copies: dict[BookKey, int] = {}
        for book_key in placements:
            copies[book_key] = copies.get(book_key, 0) + 1
        assert copies == self._copies, "the catalog differs from the tiers"
        assert copies.keys() == self._objects.keys()
        sizes = [stored.size_bytes for stored in self._objects.values()]
        assert self.total_bytes == sum(sizes) == sum(self.salt_bytes.values())
        assert sum(map(len, self._by_key.values())) == len(sizes)
        assert self._told_bytes.keys() == self._by_key.keys()

    # ---- inside ----

    def _enter(self, fact: ObjectFact) -> None:
        book_key = object_key(fact.chunk_hash, fact.group)
        copies = self._copies.get(book_key, 0)
        self._copies[book_key] = copies + 1
        if copies:
            return
        stored = self.read(ObjectName(fact.group, fact.parent_hash, fact.block_hashes, fact.group))
        assert stored is not None, "an object without a context is in the books"
        self._objects[book_key] = stored
        layouts = self._by_key.setdefault(stored.key, [])
        layouts.append(stored)
        self._count(stored, stored.size_bytes)
        if len(layouts) == 1:
            self._told_bytes[stored.key] = stored.size_bytes
            self._news.append(KeyNews(stored.key, stored.size_bytes, is_there=True))

    def _leave(self, fact: ObjectFact) -> None:
        book_key = object_key(fact.chunk_hash, fact.group)
        self._copies[book_key] -= 1
        if self._copies[book_key]:
            return
        del self._copies[book_key]
        stored = self._objects.pop(book_key)
        layouts = self._by_key[stored.key]
        layouts.remove(stored)
        self._count(stored, -stored.size_bytes)
        if not layouts:
            del self._by_key[stored.key]
            told_bytes = self._told_bytes.pop(stored.key)
            self._news.append(KeyNews(stored.key, told_bytes, is_there=False))

    def _count(self, stored: StoredObject, size_bytes: int) -> None:
        salt = stored.key.cache_salt
        self.total_bytes += size_bytes
        left = self._salt_bytes.get(salt, 0) + size_bytes
        if left:
            self._salt_bytes[salt] = left
        else:
            del self._salt_bytes[salt]
