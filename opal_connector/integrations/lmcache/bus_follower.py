"""LMCache's events, as they come over its bus, for the books of placements."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.event_bus import EventSubscriber
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from typing_extensions import override

from opal_connector.integrations.lmcache.l2_adapter import BACKEND_NAME
from opal_connector.integrations.lmcache.placements import HOST_TIER, PlacementBooks, world_size_of
from opal_connector.integrations.lmcache.tier_follower import opal_adapters
from opal_connector.reports import RateLimitedWarnings

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)

_RESYNC_SECONDS: Final = 1.0  # at least between two of them
_RESYNC_SHARE: Final = 10  # and so many times what one takes
_LISTING_SECONDS_MOST: Final = 60.0  # between two tries to list what cannot be listed
_MEDIA: Final = {"dram": HOST_TIER, "devdax": "DevDax", "gds": "GDS"}


class BusFollower(EventSubscriber):
    """Enters LMCache's events into the books, in their order.

    The raw events are taken, not LMCache's batches of them: those come up to a second later, and
    name no parents. Events that name no key are common and mean nothing. When the bus has dropped
    events, or one could not be read, what is there is listed anew: LMCache publishes an event in
    the step in which it becomes true, so whatever is still in the queue ends where the list is.
    What cannot be listed then is listed later, and until then believed to be what it was.

    Mutable state: the counters, the bytes of an object by group, the ranks, the adapters heard of,
    whether a listing is due, the adapters that could not be listed and when they are tried again,
    and whether it is closed; used by the thread of the bus, others read.
    """

    def __init__(
        self, context: Any, placements: PlacementBooks, changed: Callable[[], None]
    ) -> None:
        self._context = context
        self._placements = placements
        self._changed = changed  # the adapters or the models may be others now
        self._is_closed = False
        self.object_bytes: dict[int, int] = {}
        self.world_size = 1
        self.dropped_events = 0
        self.resyncs = 0
        self.failures = 0
        self._is_stale = False
        self._next_resync = 0.0
        self._unlisted: set[str] = set()
        self._next_listing = 0.0
        self._listing_seconds = _RESYNC_SECONDS
        self._backends: set[str] = set()

    @override
    def get_subscriptions(self) -> dict[EventType, Callable[[Event], None]]:
        handlers: dict[EventType, Callable[[Event], None]] = {
            EventType.MP_TOKENS: self._on_tokens,
            EventType.MP_LOOKUP_PREFETCH_END: self._on_lookup,
            EventType.L1_WRITE_FINISHED: self._on_l1_store,
            EventType.L1_WRITE_FINISHED_AND_READ_RESERVED: self._on_l1_store,
            EventType.L1_KEYS_EVICTED: self._on_l1_delete,
            EventType.L2_KEYS_STORED: self._on_l2_store,
            EventType.L2_KEYS_DELETED: self._on_l2_delete,
            EventType.SM_CAPACITY_CHANGED: self._on_capacity,
            EventType.L1_EVICTION_LOOP_TICK: lambda _: self._resync_if_due(),  # once a second
        }
        return {kind: self._contained(handler) for kind, handler in handlers.items()}

    def follow(self, bus: Any) -> None:
        """Begin."""
        bus.register_subscriber(self)
        bus.subscribe_drops(self.on_drops)

    def close(self) -> None:
        """Hear no more. The bus has no way to be left."""
        self._is_closed = True

    def on_drops(self) -> None:
        """The bus has dropped events."""
        if self._is_closed:
            return
        self._is_stale = True
        try:
            self.dropped_events = self._context.event_bus.dropped_events_count()
        except Exception as error:  # noqa: BLE001 - it is only a count
            self._note_failure(
                "drops", "LMCache does not say how many events it dropped: %r", error
            )
        warnings.warn("drops", "LMCache's event bus has dropped events, listing what is there")
        self._resync_if_due()

    def resync(self) -> None:
        """Announce what differs between what was heard and what is there."""
        for source, present in list_l1(self._context.storage_manager):
            self._placements.replace(source, present)
        self._list_adapters()
        self._changed()

    def _list_adapters(self, only: frozenset[str] | None = None) -> None:
        """The same for adapters; those that fail are tried again alone, and ever more seldom."""
        unlisted = set()
        for backend, keys in list_l2(self._context.storage_manager, only):
            if keys is None:
                unlisted.add(backend)
            else:
                self._placements.replace(_l2_source(backend), [(backend, key) for key in keys])
        self._next_listing = time.monotonic() + self._listing_seconds
        self._listing_seconds = (
            min(2 * self._listing_seconds, _LISTING_SECONDS_MOST) if unlisted else _RESYNC_SECONDS
        )
        self.failures += len(unlisted)
        self._unlisted = unlisted

    # ---- tokens ----

    def _on_tokens(self, event: Event) -> None:
        facts = event.metadata
        parents: list[bytes | None] = facts["parent_hashes"]
        first = parents[0] if parents else None
        if first is not None and not self._placements.is_bound(first):
            self._learn(event.session_id)  # the chunks before were bound in another life
        self._placements.bind(
            zip(facts["chunk_hashes"], parents, facts["token_chunks"], strict=True)
        )

    def _on_lookup(self, event: Event) -> None:
        """Not every way to store tells the tokens, and what is hit may be from another life."""
        if event.metadata.get("found_count"):
            self._see_model(event.metadata.get("model_name"))
        self._learn(event.session_id)

    def _learn(self, session_id: str) -> None:
        """Learn the tokens of a request that is not over yet."""
        session = self._context.session_manager.get(session_id)
        if session is None:
            return
        chunk_tokens = self._context.chunk_size
        hashes = [TokenHasher.hash_to_bytes(one) for one in session.get_hashes(0)]
        if not hashes or self._placements.is_bound(hashes[-1]):
            return
        tokens = list(session.token_ids)
        self._placements.bind(
            (name, hashes[place - 1] if place else None, tokens[start : start + chunk_tokens])
            for place, name in enumerate(hashes)
            for start in (place * chunk_tokens,)
        )

    # ---- L1 ----

    def _on_l1_store(self, event: Event) -> None:
        facts = event.metadata
        for key, meta in zip(facts["keys"], facts["meta"], strict=True):
            self.object_bytes[key.object_group_id] = meta.size_bytes
            self.world_size = world_size_of(key.kv_rank)
            self._see_model(key.model_name)
            self._placements.add(_l1_source(facts), _medium(meta.backend), (key,))

    def _on_l1_delete(self, event: Event) -> None:
        facts = event.metadata
        sources = [_l1_source(facts)]
        if "l1_tag" not in facts:  # everything was cleared by force
            sources = [f"l1/{tag}" for tag in l1_tags(self._context.storage_manager)]
        for key, meta in zip(facts["keys"], facts["meta"], strict=True):
            for source in sources:
                self._placements.remove(source, _medium(meta.backend), (key,))

    # ---- L2 ----

    def _on_l2_store(self, event: Event) -> None:
        backend = event.metadata["backend"]
        if backend != BACKEND_NAME:  # whose tiers are followed, each of them
            self._backends.add(backend)
            keys = event.metadata["keys"]
            self._placements.add(_l2_source(backend), backend, keys)

    def _on_l2_delete(self, event: Event) -> None:
        backend = event.metadata["backend"]
        if backend != BACKEND_NAME:
            self._placements.remove(_l2_source(backend), backend, event.metadata["keys"])

    # ---- inside ----

    def _on_capacity(self, event: Event) -> None:
        """Adapters may have come or gone; LMCache does not say what went with them."""
        present = {module.backend for module in event.metadata["snapshot"].modules}
        for backend in self._backends - present:
            self._backends.discard(backend)
            self._placements.replace(_l2_source(backend), ())
        self._changed()

    def _resync_if_due(self) -> None:
        """Listing takes the bus's time: where it is short that must not make it shorter."""
        began = time.monotonic()
        is_whole = self._is_stale
        is_due = is_whole or (self._unlisted and began >= self._next_listing)
        if not is_due or began < self._next_resync:
            return
        self._is_stale = False
        try:
            if is_whole:
                self.resync()
                self.resyncs += 1
            else:
                self._list_adapters(frozenset(self._unlisted))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
            self._is_stale = True
            self._note_failure("resync", "what LMCache holds could not be listed: %r", error)
        finally:
            now = time.monotonic()
            self._next_resync = now + max(_RESYNC_SECONDS, _RESYNC_SHARE * (now - began))

    def _note_failure(self, kind: str, sentence: str, error: Exception) -> None:
        self.failures += 1
        warnings.warn(kind, sentence, error)

    def _see_model(self, model: str | None) -> None:
        if model and self._placements.model is None:
            self._placements.announce_model(model)
            self._changed()

    def _contained(self, handler: Callable[[Event], None]) -> Callable[[Event], None]:
        """Nothing that an event may hold ends the bus, or leaves the books wrong."""

        def handle(event: Event) -> None:
            if self._is_closed:
                return
            try:
                handler(event)
            except Exception as error:  # noqa: BLE001 - whatever it is, the contents are listed anew
                self._note_failure("event", "an event of LMCache could not be read: %r", error)
                self._is_stale = True
                self._resync_if_due()

        return handle


def l1_tags(manager: Any) -> list[str]:
    """The names of the L1s of a storage manager."""
    return list(manager.report_status()["l1_managers"])


def list_l1(manager: Any) -> Iterator[tuple[str, list[tuple[str, ObjectKey]]]]:
    """What every L1 of a storage manager holds now; nothing of one that cannot be listed.

    LMCache has no public way to ask. One with several media does not say which has what.
    """
    for one in getattr(manager, "_l1_managers_by_id", {}).values():
        media = list(one.get_capacity_bytes_by_backend())
        objects = getattr(one, "_objects", None)
        if objects is None or len(media) != 1:
            warnings.warn("list", "LMCache's L1 cannot be listed: what it holds is forgotten")
            keys: Sequence[ObjectKey] = ()
        else:
            keys = list(objects)  # in one step of the interpreter
        tier = _medium(media[0]) if media else HOST_TIER
        yield f"l1/{one.config.tag}", [(tier, key) for key in keys]


def list_l2(
    manager: Any, only: frozenset[str] | None = None
) -> Iterator[tuple[str, list[ObjectKey] | None]]:
    """What every adapter but Opal's holds now, or every one of some backends, by backend.

    Nothing of one that has no way to list; None of a backend that cannot be listed at this time.
    """
    found: dict[str, list[ObjectKey]] = {}
    failed: set[str] = set()
    for descriptor, adapter in manager.l2_adapters():
        backend = descriptor.type_name
        if any(opal_adapters([adapter])) or (only is not None and backend not in only):
            continue
        keys = found.setdefault(backend, [])
        try:
            for page in _pages(adapter):
                keys += [entry.key.to_object_key() for entry in page.entries]
        except NotImplementedError:
            warnings.warn(
                f"list {backend}", "the adapter %s cannot be listed: it is forgotten", backend
            )
        except Exception as error:  # noqa: BLE001 - a lost connection, a deadline, an open circuit
            failed.add(backend)
            kind = f"list {backend} now"
            warnings.warn(kind, "the adapter %s cannot be listed now: %r", backend, error)
    for backend, keys in found.items():
        yield backend, None if backend in failed else keys


def _pages(adapter: Any) -> Iterator[Any]:
    cursor: str | None = None
    while True:
        page = adapter.list_l2_keys(cursor=cursor)
        yield page
        cursor = page.next_page_token
        if not cursor:
            return


def _l1_source(facts: dict[str, Any]) -> str:
    return f"l1/{facts.get('l1_tag', '')}"


def _l2_source(backend: str) -> str:
    return f"l2/{backend}"


def _medium(backend: Any) -> str:
    name = str(getattr(backend, "value", backend))
    return _MEDIA.get(name, name)
