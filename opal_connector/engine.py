"""`OpalKVCacheEngine`: lookup, retrieve and store in token terms, in one process.

The same books and the same tiers as under vLLM, wired together for hosts that have both in one
process. Plan and commit take the manager's lock; bytes move in the calling thread, without it.
"""

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from opal_connector.config import OpalConfig, chunk_blocks_for, parse_size_bytes
from opal_connector.events import EventLog, KVCEvent
from opal_connector.keys import (
    OpalCacheEngineKey,
    OpalEngineMetadata,
    RequestIdentity,
    plain_layout,
)
from opal_connector.managers import (
    LookupResult,
    LookupState,
    OpalRequest,
    Space,
    build_manager,
    object_key,
    one_table,
    tier_space,
)
from opal_connector.sharing import link_shared_tier
from opal_connector.tiers import (
    CPUMemory,
    InlineMover,
    Job,
    OpalMemoryObj,
    PagedBlocks,
    Tier,
    allocate_host_rows,
    file_bytes,
    make_keyed_tier,
)
from opal_connector.tiers.engines import check_engine_libraries
from opal_connector.transfers import JobResult

logger = logging.getLogger(__name__)

_DEFAULT_CAPACITY_BYTES = 1 << 30
_POLL_SECONDS = 0.01


class OpalKVCacheEngine:
    """A cache of KV blocks by token prefix.

    Calls may come from any thread; they block for as long as their copy takes. Mutable state: the
    manager's (its lock) and the tiers' rows, which the manager hands to one writer at a time.
    """

    def __init__(
        self,
        config: OpalConfig,
        metadata: OpalEngineMetadata,
        paged: PagedBlocks,
        *,
        rank: int = 0,
        with_events: bool = False,
    ) -> None:
        check_engine_libraries(config)
        self.metadata = metadata
        self._rank = rank
        self._paged = paged
        self._block_tokens = metadata.block_tokens
        self._request_ids = itertools.count()
        self._committed = threading.Condition()
        chunk_blocks = chunk_blocks_for(
            config.chunk_size,
            block_tokens=metadata.block_tokens,
            block_bytes=paged.row_bytes,
            warn=logger.warning,
        )
        spaces: dict[str, Space] = {}
        self._tiers: list[Tier] = []
        for name in config.kvc_tiers:
            tier, capacity_bytes = _make_tier(config, name, row_bytes=paged.row_bytes, rank=rank)
            self._tiers.append(tier)
            spaces[name] = tier_space(
                config,
                name,
                capacity_bytes=capacity_bytes,
                row_bytes=paged.row_bytes,
                file_bytes=file_bytes,
            )
        self.manager = build_manager(
            config,
            layout=plain_layout(metadata.block_tokens),
            chunk_blocks=chunk_blocks,
            spaces=spaces,
            log=EventLog(enabled=with_events),
        )
        self._mover = InlineMover(self._tiers, paged, rank=rank)
        for page in self._mover.open(metadata.namespace):
            self.manager.adopt(page)
        self._shared = link_shared_tier(config, self.manager, namespace=metadata.namespace, ranks=1)
        self._shared_lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def lookup(
        self,
        tokens: Sequence[int],
        num_computed_tokens: int = 0,
        identity: RequestIdentity | None = None,
    ) -> tuple[int, dict[str, int]]:
        """Tokens beyond `num_computed_tokens` that a `retrieve` would bring, and from which tiers.

        Whole blocks only. The tiers' numbers sum to the first. Nothing is promised.
        """
        request = self._request(tokens, identity)
        result = self._look(request, num_computed_tokens)
        self.manager.release(request)
        return result.block_count * self._block_tokens, result.tier_tokens

    def retrieve(
        self,
        tokens: Sequence[int],
        block_ids: Sequence[int],
        num_computed_tokens: int = 0,
        identity: RequestIdentity | None = None,
    ) -> tuple[NDArray[np.bool_], dict[str, int]]:
        """Load what is stored of `tokens` into the paged blocks `block_ids`.

        Args:
            tokens: The sequence from its first token.
            block_ids: The paged block of every block of the sequence, from the first one on.
            num_computed_tokens: Tokens whose blocks are complete already; they are not touched.
            identity: What the KV depends on besides the tokens.

        Returns:
            A mask over `tokens`, true where KV was loaded by this call, and tokens per tier.
        """
        request = self._request(tokens, identity)
        result = self._look(request, num_computed_tokens)
        first = num_computed_tokens // self._block_tokens
        mask = np.zeros(len(tokens), dtype=np.bool_)
        if result.state is LookupState.HIT:
            job = self.manager.plan_load(
                request, one_table(block_ids), first_block=first, block_count=result.block_count
            )
            outcome = self._run(job)
            loaded = sum(
                len(item.block_ids)
                for position, item in enumerate(job.objects)
                if position not in outcome.failed
            )
            start = first * self._block_tokens
            mask[start : start + loaded * self._block_tokens] = True
        self._end(request)
        return mask, {tier: count for tier, count in request.hit_tokens.items() if count}

    def store(
        self,
        tokens: Sequence[int],
        block_ids: Sequence[int],
        identity: RequestIdentity | None = None,
    ) -> int:
        """Store the whole blocks of `tokens` from the paged blocks `block_ids`.

        Returns:
            How many tokens from the first on are stored now, by this call or before it.
        """
        request = self._request(tokens, identity)
        job = self.manager.plan_store(
            request,
            full_blocks=len(request.chain.hashes),
            tables=one_table(block_ids),
            include_tail=True,
            tokens=tokens,
        )
        if job is not None:
            self._run(job)
        self._end(request)
        return request.stored_tokens

    def key(self, chunk_hash: bytes) -> OpalCacheEngineKey:
        """The full name of a chunk in this engine's cache."""
        return OpalCacheEngineKey(self.metadata.namespace, 0, self._rank, chunk_hash)

    def memory_obj(self, chunk_hash: bytes) -> OpalMemoryObj | None:
        """A copy of one stored chunk's bytes and the tier that it lies in."""
        found = self.manager.storage.find(object_key(chunk_hash, 0))
        if found is None:
            return None
        place, record = found
        tier = self._tiers[place]
        return tier.memory_obj(record.rows) if isinstance(tier, CPUMemory) else None

    def take_events(self) -> list[KVCEvent]:
        """Events since the last call, if the engine was made with them."""
        return self.manager.take_events()

    def clear(self) -> None:
        """Empty every tier."""
        self.manager.reset()
        self._keep_up()

    def close(self) -> None:
        """Give up the tiers. No call follows."""
        if self._shared is not None:
            self._shared.close()
        for tier in self._tiers:
            tier.close()

    def _run(self, job: Job) -> JobResult:
        results = self._mover.run(job)
        for result in results:
            self.manager.commit(result)
        return results[0]

    def _keep_up(self) -> None:
        """Do what is due between the tiers, until nothing is."""
        while self._poll_shared() or self.manager.wants_upkeep:
            batch = self.manager.plan_upkeep()
            jobs: list[Job] = [*batch.drops, *batch.copies]
            for job in jobs:
                self._run(job)
            self._mover.touch(batch.touches)

    def _poll_shared(self) -> bool:
        """Hear what other instances did; whether an answer is still to come."""
        if self._shared is None:
            return False
        with self._shared_lock:
            self._shared.poll()
            is_waiting = self._shared.is_waiting
        if is_waiting:
            time.sleep(_POLL_SECONDS / 10)
        return is_waiting

    def _request(self, tokens: Sequence[int], identity: RequestIdentity | None) -> OpalRequest:
        request = self.manager.new_request(f"engine-{next(self._request_ids)}", identity)
        request.extend(tokens)
        return request

    def _look(self, request: OpalRequest, num_computed_tokens: int) -> LookupResult:
        """Look up, waiting for what another thread is moving, within the manager's bound."""
        while True:
            self._poll_shared()
            result = self.manager.lookup(
                request,
                computed_blocks=num_computed_tokens // self._block_tokens,
                max_blocks=len(request.chain.hashes),
                now=time.monotonic(),
            )
            if result.state is not LookupState.WAIT:
                return result
            with self._committed:
                self._committed.wait(_POLL_SECONDS)

    def _end(self, request: OpalRequest) -> None:
        self.manager.end_request(request)
        self._keep_up()
        with self._committed:
            self._committed.notify_all()


def _make_tier(config: OpalConfig, name: str, *, row_bytes: int, rank: int) -> tuple[Tier, int]:
    """A tier and its capacity in bytes."""
    settings = config.keyed_tier(name)
    if settings is not None:
        return make_keyed_tier(name, settings, row_bytes=row_bytes, rank=rank)
    capacity = config.tier(name).capacity_GB
    capacity_bytes = _DEFAULT_CAPACITY_BYTES if capacity is None else parse_size_bytes(capacity)
    rows = allocate_host_rows(row_count=capacity_bytes // row_bytes, row_bytes=row_bytes)
    return CPUMemory(rows), capacity_bytes
