"""Builds the books of one engine from what its workers really have."""

from collections.abc import Callable

import msgspec
from vllm.config import VllmConfig

from opal_connector.config import OpalConfig, chunk_blocks_for
from opal_connector.events import EventLog
from opal_connector.eviction import make_policy
from opal_connector.integrations.vllm.facts import GroupFacts, engine_metadata
from opal_connector.integrations.vllm.messages import WorkerFacts
from opal_connector.keys import OpalEngineMetadata, OpalTokenDatabase
from opal_connector.managers import (
    SINGLE_TYPE_MANAGERS,
    OpalKVCacheManager,
    OpalStorageBackend,
    OpalStorageManager,
    TierPool,
    Unitary,
)


class Books(msgspec.Struct, frozen=True, eq=False):
    """An engine's manager and the facts that it was built from."""

    manager: OpalKVCacheManager
    metadata: OpalEngineMetadata
    row_bytes: int


def build_books(
    *,
    vllm_config: VllmConfig,
    group: GroupFacts,
    workers: list[WorkerFacts],
    config: OpalConfig,
    log: EventLog,
    warn: Callable[[str], None],
) -> Books:
    """The manager for these workers.

    A tier is as large as its smallest rank, so that a row exists on all of them.
    """
    row_bytes = max(worker.row_bytes for worker in workers)
    chunk_blocks = chunk_blocks_for(
        config.chunk_size, block_tokens=group.block_tokens, block_bytes=row_bytes, warn=warn
    )
    tiers: list[OpalStorageBackend] = []
    for name in config.kvc_tiers:
        rows = min(worker.tier_rows[name] for worker in workers)
        if rows < chunk_blocks:
            warn(
                f"{name}: its capacity holds {rows} blocks of {row_bytes} bytes, "
                f"less than one chunk of {chunk_blocks}; whole chunks will not be stored"
            )
        settings = config.tier(name)
        tiers.append(
            OpalStorageBackend(
                tier=name,
                pool=TierPool(capacity_rows=rows, row_bytes=row_bytes),
                policy=make_policy(settings.eviction_policy),
                log=log,
                eviction_threshold=settings.eviction_threshold,
            )
        )
    storage = OpalStorageManager(tiers, log)
    single_type = SINGLE_TYPE_MANAGERS[group.kind](
        group=0, chunk_blocks=chunk_blocks, save_unfull_chunk=config.save_unfull_chunk
    )
    database = OpalTokenDatabase(
        block_tokens=group.block_tokens,
        chunk_blocks=chunk_blocks,
        save_unfull_chunk=config.save_unfull_chunk,
    )
    manager = OpalKVCacheManager(
        database=database,
        storage=storage,
        coordinator=Unitary(storage, [single_type]),
        ranks=len(workers),
    )
    metadata = engine_metadata(vllm_config, group, workers, config, chunk_blocks)
    return Books(manager=manager, metadata=metadata, row_bytes=row_bytes)
