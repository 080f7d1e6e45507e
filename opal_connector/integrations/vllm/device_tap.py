"""The facts of vLLM's own device cache, taken where vLLM takes them, in Opal's terms."""

from collections.abc import Callable
from typing import Any

import msgspec
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.block_pool import BlockPool

from opal_connector.cluster.channel_facts import Block
from opal_connector.cluster.engine_chain import EngineChain
from opal_connector.cluster.engine_lineage import StoredBlocks
from opal_connector.events import DEVICE_TIER, KVCEvent
from opal_connector.integrations.vllm.guard import contained
from opal_connector.keys import LoraIdentity


class AdapterSeen(msgspec.Struct, frozen=True):
    """An adapter's identity is known now."""

    name: str


class DeviceTap:
    """Hands on what a block pool's events say, by reference, to whoever translates them.

    Where vLLM publishes its own stream it goes on to; otherwise the events stop here. Reports of
    blocks that were there already (`kv_cache_report_mode`) are nothing that happened, and are left
    out.
    Mutable state: whether it is wanted, and the reports in the pool's queue. Used by the engine
    core's thread; only `is_wanted` may be cleared by another one.
    """

    def __init__(self, pool: BlockPool, hear: Callable[[Any], None]) -> None:
        self.is_wanted = True
        self._pool = pool
        self._hear = hear
        self._passes_on = bool(pool.enable_kv_cache_events)
        self._take = pool.take_events
        self._emit = pool.emit_cached_block_events
        self._reports: set[int] = set()
        pool.take_events = self._take_events
        pool.emit_cached_block_events = self._emit_reports
        pool.enable_kv_cache_events = True

    @property
    def has_events(self) -> bool:
        """Whether the pool's queue waits for a step, as after a reset of an idle engine."""
        return self.is_wanted and bool(self._pool.kv_event_queue)

    def remove(self) -> None:
        """Leave the pool as it was."""
        if self._pool.__dict__.pop("take_events", None) is not None:
            del self._pool.emit_cached_block_events
            self._pool.enable_kv_cache_events = self._passes_on
            if not self._passes_on:
                self._pool.kv_event_queue = []

    def _take_events(self) -> list[KVCacheEvent]:
        events: list[KVCacheEvent] = self._take()
        with contained("take_events"):
            if not self.is_wanted:
                self.remove()
            elif events:
                # The host adds to its own list; reports live no longer than the list does.
                self._hear(self._without_reports(events) if self._passes_on else events)
        return events if self._passes_on else []

    def _without_reports(self, events: list[KVCacheEvent]) -> list[KVCacheEvent]:
        reports, self._reports = self._reports, set()
        return [event for event in events if id(event) not in reports] if reports else events[:]

    def _emit_reports(self, *args: Any, **kwargs: Any) -> None:
        if not self._passes_on:
            return
        known = len(self._pool.kv_event_queue)
        self._emit(*args, **kwargs)
        with contained("take_events"):
            self._reports.update(map(id, self._pool.kv_event_queue[known:]))


class DeviceFacts:
    """Translates what a tap has handed on; the contents of the device by Opal's digests.

    Mutable state: the chain, and whether events were lost; used by the publisher's thread.
    """

    def __init__(self, medium: str, identity: Callable[[str], LoraIdentity | None]) -> None:
        self._medium = medium
        self._identity = identity
        self.is_complete = True
        self._chain = EngineChain(identity)

    @property
    def groups(self) -> tuple[int, ...]:
        """Groups that were heard of."""
        return tuple(group for group, _ in self._chain.tiers())

    def translate(self, raw: Any) -> list[KVCEvent]:
        """Facts from a list of vLLM's events, or because an adapter is known now."""
        if isinstance(raw, AdapterSeen):
            return list(self._chain.adapter_known(raw.name))
        facts: list[KVCEvent] = []
        for event in raw:
            if isinstance(event, AllBlocksCleared):
                facts += self._chain.cleared(DEVICE_TIER)
            elif event.medium != self._medium:
                continue  # another pool that shares the queue
            elif isinstance(event, BlockStored):
                facts += self._chain.stored(_stored_blocks(event))
            elif isinstance(event, BlockRemoved):
                group = event.group_idx or 0
                facts += self._chain.removed(group, DEVICE_TIER, event.block_hashes)
        return facts

    def held(self, group: int) -> list[Block]:
        """The blocks on the device."""
        return self._chain.held(group, DEVICE_TIER)

    def forget(self) -> None:
        """Events were lost: which blocks are still there cannot be known."""
        self._chain = EngineChain(self._identity)
        self.is_complete = False


def _stored_blocks(event: BlockStored) -> StoredBlocks:
    return StoredBlocks(
        group=event.group_idx or 0,
        tier=DEVICE_TIER,
        block_hashes=event.block_hashes,
        parent=event.parent_block_hash,
        token_ids=event.token_ids,
        block_size=event.block_size,
        extra_keys=event.extra_keys,
        lora_name=event.lora_name,
        is_report=False,
    )
