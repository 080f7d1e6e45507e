"""`OpalL2Adapter`: Opal's tiers as an L2 adapter of LMCache's multi-process server.

--l2-adapter '{"type": "plugin",
               "module_path": "opal_connector.integrations.lmcache.l2_adapter",
               "class_name": "OpalL2Adapter",
               "adapter_params": {"kvc_tiers": ["CPUMemory", "LocalNVMe"], ...}}'
"""

import threading
from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final

import torch  # noqa: F401 - LMCache's native module needs it to be there first
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from typing_extensions import override

from opal_connector.integrations.lmcache.books import ObjectBooks
from opal_connector.integrations.lmcache.catalog import Follower, KeyNews
from opal_connector.integrations.lmcache.identity import StoredObject, group_layouts
from opal_connector.integrations.lmcache.key_listings import CURSOR_BYTES, KeyListings
from opal_connector.integrations.lmcache.runtime import AdapterRuntime, Listener
from opal_connector.integrations.lmcache.settings import load_settings
from opal_connector.integrations.lmcache.tasks import Outbox
from opal_connector.transfers import TierHealth

BACKEND_NAME: Final = "opal"


class OpalL2Adapter(L2AdapterInterface):
    """A facade: every method of LMCache's interface, in terms of `AdapterRuntime`.

    It has a capacity and says so, but takes no part in LMCache's own eviction: room is made when
    a store needs it. Mutable state: the three outboxes, each with its own lock; `_telling`, held
    while LMCache is told of keys, so that all its listeners hear everything in one order.
    """

    def __init__(self, params: Mapping[str, Any], **_: object) -> None:
        config, namespace = load_settings(params)
        super().__init__(max_capacity_bytes=0)
        self.set_backend_identity(BACKEND_NAME)
        self._telling = threading.RLock()
        self._stored: Outbox[L2StoreResult] = Outbox()
        self._looked_up: Outbox[Bitmap] = Outbox()
        self._loaded: Outbox[Bitmap] = Outbox()
        self._listings = KeyListings()
        self._runtime = AdapterRuntime(config, namespace, _Results(self))
        self._runtime.start()

    @property
    def books(self) -> ObjectBooks:
        """What is where, for others in this process."""
        return self._runtime.books

    # ---- descriptors ----

    @override
    def get_store_event_fd(self) -> int:
        return self._stored.descriptor

    @override
    def get_lookup_and_lock_event_fd(self) -> int:
        return self._looked_up.descriptor

    @override
    def get_load_event_fd(self) -> int:
        return self._loaded.descriptor

    # ---- tasks ----

    @override
    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        return self._runtime.store(keys, objects)

    @override
    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stored.take_all()

    @override
    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        return self._runtime.look_up(keys, group_layouts(group_layout_descs))

    @override
    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._looked_up.take(task_id)

    @override
    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        self._runtime.books.unlock(keys)

    @override
    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        return self._runtime.load(keys, objects)

    @override
    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loaded.take(task_id)

    # ---- what is there ----

    @override
    def set_backend_identity(self, name: str, shared: bool = False) -> None:
        """Be known as Opal: LMCache gives every plugin the same name, and pools are told by it."""
        super().set_backend_identity(BACKEND_NAME if name else name, shared)

    @override
    def register_listener(self, listener: L2AdapterListener) -> None:
        """Whoever begins to listen is told at once what is there: after a restart, all of it."""
        with self._telling:
            news, present = self._runtime.books.read(
                lambda books: (books.catalog.take_news(), books.catalog.keys())
            )
            self._tell(news)
            super().register_listener(listener)
            if present:
                listener.on_l2_keys_stored(*map(list, zip(*present, strict=True)))

    @property
    @override
    def supports_global_eviction(self) -> bool:
        return False

    @override
    def delete(self, keys: list[ObjectKey]) -> None:
        self._runtime.books.delete(keys)
        self.tell()

    @override
    def get_usage(self) -> AdapterUsage:
        """Bytes of objects, each counted once; the capacity is that of all tiers together."""

        def usage(books: ObjectBooks) -> AdapterUsage:
            capacity_bytes = sum(tier.capacity_bytes for tier in books.storage.tiers)
            by_salt = MappingProxyType(dict(books.catalog.salt_bytes))
            return AdapterUsage(books.catalog.total_bytes, capacity_bytes, by_salt)

        return self._runtime.books.read(usage)

    @override
    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        if page_size < 1:
            raise ValueError(f"page_size: found {page_size}, allowed: at least 1")
        try:
            after = bytes.fromhex(cursor or "")
        except ValueError:
            after = b"?"
        if cursor is not None and len(after) != CURSOR_BYTES:
            raise ValueError(f"cursor: found {cursor!r}, allowed: the token of a page")
        found, following = self._listings.page(self.books, model_name, after, page_size)
        entries = tuple(KeyEntry(key.to_encoded_object_key(), size) for key, size in found)
        return KeyListPage(entries, following.hex() if following is not None else None)

    def follow(self, follower: Follower) -> list[tuple[str, StoredObject]]:
        """What every tier holds now; the follower hears of every change from then on.

        It is called by the thread that changes the books, under their lock, with the event and the
        object that it is about. It must not wait, and not call the adapter.
        """

        def begin(books: ObjectBooks) -> list[tuple[str, StoredObject]]:
            books.catalog.followers.append(follower)
            return [(tier, books.catalog.stored(key)) for tier, key in books.storage.placements()]

        return self._runtime.books.read(begin)

    @override
    def report_status(self) -> dict[str, Any]:
        runtime, books = self._runtime, self._runtime.books
        health = runtime.health
        tiers = [
            {
                "tier": tier.tier,
                "health": health[place].value,
                "object_count": len(tier),
                "used_bytes": tier.used_bytes,
                "capacity_bytes": tier.capacity_bytes,
                "eviction_count": tier.eviction_count,
            }
            for place, tier in enumerate(books.storage.tiers)
        ]
        is_usable = any(state is not TierHealth.SUSPENDED for state in health)
        return {
            "is_healthy": runtime.is_alive and is_usable,
            "type": type(self).__name__,
            "backend": BACKEND_NAME,
            "stored_object_count": len(books.catalog),
            "locked_key_count": len(books.locks),
            "open_task_count": runtime.open_task_count,
            "open_job_count": len(books.jobs),
            "failures": dict(books.counters.failures),
            "dropped_stores": dict(books.counters.dropped_stores),
            "tiers": tiers,
        }

    @override
    def close(self) -> None:
        self._runtime.close()
        self.tell()
        for outbox in (self._stored, self._looked_up, self._loaded):
            outbox.close()

    # ---- results ----

    def tell(self) -> None:
        """Tell LMCache which keys came and went, in the order in which they did."""
        with self._telling:
            self._tell(self._runtime.books.take_news())

    def _tell(self, news: Sequence[KeyNews]) -> None:
        for is_there, group in groupby(news, key=lambda item: item.is_there):
            items = list(group)
            notify = self._notify_keys_stored if is_there else self._notify_keys_deleted
            notify([item.key for item in items], [item.size_bytes for item in items])

    def put_stored(self, task_id: int, result: L2StoreResult) -> None:
        """A store has ended."""
        self._stored.put(task_id, result)

    def put_looked_up(self, task_id: int, hits: Sequence[bool]) -> None:
        """A lookup has ended."""
        self._looked_up.put(task_id, _bitmap(hits))

    def put_loaded(self, task_id: int, keys: Sequence[ObjectKey], hits: Sequence[bool]) -> None:
        """A load has ended."""
        accessed = [key for key, is_loaded in zip(keys, hits, strict=True) if is_loaded]
        if accessed:
            with self._telling:
                self._notify_keys_accessed(accessed)
        self._loaded.put(task_id, _bitmap(hits))


class _Results(Listener):
    """Hands results to the adapter."""

    def __init__(self, adapter: OpalL2Adapter) -> None:
        self._adapter = adapter

    @override
    def news(self) -> None:
        self._adapter.tell()

    @override
    def stored(self, task_id: int, *, succeeded: bool, written_bytes: int) -> None:
        self._adapter.put_stored(task_id, L2StoreResult(succeeded, written_bytes))

    @override
    def looked_up(self, task_id: int, hits: Sequence[bool]) -> None:
        self._adapter.put_looked_up(task_id, hits)

    @override
    def loaded(self, task_id: int, keys: Sequence[ObjectKey], hits: Sequence[bool]) -> None:
        self._adapter.put_loaded(task_id, keys, hits)


def _bitmap(hits: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(hits))
    for position, is_hit in enumerate(hits):
        if is_hit:
            bitmap.set(position)
    return bitmap
