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
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from opal_connector.cluster.channel_facts import Block
from opal_connector.cluster.engine_chain import EngineChain
from opal_connector.cluster.engine_lineage import StoredBlocks
from opal_connector.events import DEVICE_TIER, Delete, Insert, KVCEvent
from opal_connector.integrations.vllm.device_groups import DeviceGroups
from opal_connector.integrations.vllm.guard import contained
from opal_connector.integrations.vllm.sparse_events import SparseSpan, sparse_span
from opal_connector.keys import LoraIdentity
from opal_connector.keys.attention import AttentionLayout


class AdapterSeen(msgspec.Struct, frozen=True):
    """An adapter's identity is known now."""

    name: str


class DeviceTap:
    """Hands on what a block pool's events say, by reference, to whoever translates them.

    Where vLLM publishes its own stream it goes on to; otherwise the events stop here. Reports of
    blocks that were there already (`kv_cache_report_mode`) are nothing that happened, and are left
    out. What an event of a group that keeps few of its blocks does not say, which ones they are,
    is noted where vLLM knows it.
    Mutable state: whether it is wanted, the reports and the sparse events in the pool's queue.
    Used by the engine core's thread; only `is_wanted` may be cleared by another one.
    """

    def __init__(self, pool: BlockPool, hear: Callable[[Any], None]) -> None:
        self.is_wanted = True
        self._pool = pool
        self._hear = hear
        self._passes_on = bool(pool.enable_kv_cache_events)
        self._take = pool.take_events
        self._emit = pool.emit_cached_block_events
        self._cache = pool.cache_full_blocks
        self._reports: set[int] = set()
        self._spans: dict[int, SparseSpan] = {}
        pool.take_events = self._take_events
        pool.emit_cached_block_events = self._emit_reports
        pool.cache_full_blocks = self._cache_blocks
        pool.enable_kv_cache_events = True

    @property
    def has_events(self) -> bool:
        """Whether the pool's queue waits for a step, as after a reset of an idle engine."""
        return self.is_wanted and bool(self._pool.kv_event_queue)

    def remove(self) -> None:
        """Leave the pool as it was."""
        if self._pool.__dict__.pop("take_events", None) is not None:
            del self._pool.emit_cached_block_events
            del self._pool.cache_full_blocks
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
                self._hear(self._with_spans(self._without_reports(events)))
        return events if self._passes_on else []

    def _with_spans(self, events: list[KVCacheEvent]) -> list[Any]:
        spans, self._spans = self._spans, {}
        return [spans.get(id(event), event) for event in events] if spans else events

    def _cache_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        new = num_cached_blocks, num_full_blocks
        known = len(self._pool.kv_event_queue)
        self._cache(request, blocks, *new, block_size, kv_cache_group_id, block_mask)
        if len(self._pool.kv_event_queue) == known:
            return
        event = self._pool.kv_event_queue[-1]
        if not isinstance(event, BlockStored):
            return
        if len(event.block_hashes) * event.block_size < len(event.token_ids):
            with contained("take_events"):
                span = sparse_span(self._pool, event, request, blocks, range(*new), block_mask)
                self._spans[id(event)] = span

    def _without_reports(self, events: list[KVCacheEvent]) -> list[KVCacheEvent]:
        if not self._passes_on:
            return events
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

    Parts of blocks, which an engine may announce as blocks of a smaller size, are left out: no
    length that is served ends there. Mutable state: the chain of the kv groups, the attention
    groups that they add up to, and whether events were lost; used by the publisher's thread.
    """

    def __init__(
        self,
        medium: str,
        identity: Callable[[str], LoraIdentity | None],
        layout: AttentionLayout,
    ) -> None:
        self._medium = medium
        self._identity = identity
        self._unit_tokens = layout.hash_block_tokens
        self._folded = DeviceGroups(layout)
        self.groups = tuple(range(len(layout.groups)))
        self.is_complete = True
        self._chain = self._new_chain()

    def translate(self, raw: Any) -> list[KVCEvent]:
        """Facts from a list of vLLM's events, or because an adapter is known now."""
        if isinstance(raw, AdapterSeen):
            return self._folded.fold(self._chain.adapter_known(raw.name))
        facts: list[Insert | Delete] = []
        for found in raw:
            span = found if isinstance(found, SparseSpan) else None
            event = found.event if span is not None else found
            if isinstance(event, AllBlocksCleared):
                facts += self._chain.cleared(DEVICE_TIER)
            elif event.medium != self._medium:
                continue  # another pool that shares the queue
            elif isinstance(event, BlockStored):
                if self._is_whole(event):
                    facts += self._chain.stored(_stored_blocks(event, span))
            elif isinstance(event, BlockRemoved):
                group = event.group_idx or 0
                if group in self._folded.block_tokens:
                    facts += self._chain.removed(group, DEVICE_TIER, event.block_hashes)
        return self._folded.fold(facts)

    def held(self, group: int) -> list[Block]:
        """The blocks of a group on the device."""
        return self._folded.held(group, lambda kv_group: self._chain.held(kv_group, DEVICE_TIER))

    def forget(self) -> None:
        """Events were lost: which blocks are still there cannot be known."""
        self._folded.forget()
        self._chain = self._new_chain()
        self.is_complete = False

    def _is_whole(self, event: BlockStored) -> bool:
        size = self._folded.block_tokens.get(event.group_idx or 0)
        return size is not None and (event.block_size == size or not event.token_ids)

    def _new_chain(self) -> EngineChain:
        return EngineChain(
            self._identity, unit_tokens=self._unit_tokens, sizes=self._folded.block_tokens
        )


def _stored_blocks(event: BlockStored, span: SparseSpan | None) -> StoredBlocks:
    return StoredBlocks(
        group=event.group_idx or 0,
        tier=DEVICE_TIER,
        block_hashes=event.block_hashes if span is None else span.block_hashes,
        parent=event.parent_block_hash,
        token_ids=event.token_ids,
        block_size=event.block_size,
        extra_keys=event.extra_keys if span is None else span.extra_keys,
        lora_name=event.lora_name,
        is_report=False,
        present=None if span is None else span.present,
    )
