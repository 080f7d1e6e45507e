"""Builds the books of one engine from what its workers really have."""

from collections.abc import Callable

import msgspec
from vllm.config import VllmConfig

from opal_connector.config import OpalConfig, chunk_blocks_for
from opal_connector.events import EventLog
from opal_connector.integrations.vllm.facts import GroupFacts, engine_metadata
from opal_connector.integrations.vllm.messages import WorkerFacts
from opal_connector.keys import OpalEngineMetadata
from opal_connector.managers import OpalKVCacheManager, build_manager, tier_space
from opal_connector.tiers import file_bytes


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
    tier_bytes = {
        name: min(worker.tier_bytes[name] for worker in workers) for name in config.kvc_tiers
    }
    for name, capacity_bytes in tier_bytes.items():
        if capacity_bytes // row_bytes < chunk_blocks:
            warn(
                f"{name}: its capacity holds {capacity_bytes // row_bytes} blocks of "
                f"{row_bytes} bytes, "
                f"less than one chunk of {chunk_blocks}; whole chunks will not be stored"
            )
    manager = build_manager(
        config,
        kind=group.kind,
        block_tokens=group.block_tokens,
        chunk_blocks=chunk_blocks,
        spaces={
            name: tier_space(
                config,
                name,
                capacity_bytes=capacity_bytes,
                row_bytes=row_bytes,
                file_bytes=file_bytes,
            )
            for name, capacity_bytes in tier_bytes.items()
        },
        log=log,
        ranks=len(workers),
    )
    metadata = engine_metadata(vllm_config, group, workers, config, chunk_blocks)
    return Books(manager=manager, metadata=metadata, row_bytes=row_bytes)


def describe_books(books: Books, config: OpalConfig, workers: list[WorkerFacts]) -> str:
    """The effective configuration in one line."""
    database = books.manager.database
    tiers = ", ".join(
        f"{tier.tier} {tier.capacity_bytes / (1 << 30):.2f} GiB a worker, "
        f"{config.tier(tier.tier).eviction_policy}"
        for tier in books.manager.storage.tiers
    )
    return (
        f"{tiers}; chunks of {database.chunk_blocks * database.block_tokens} tokens "
        f"({database.chunk_blocks} blocks, "
        f"{database.chunk_blocks * books.row_bytes / (1 << 20):.2f} MiB); "
        f"unfull chunks {'kept' if config.save_unfull_chunk else 'dropped'}; "
        f"max_kvc_ready_requests {config.max_kvc_ready_requests}; {len(workers)} worker(s), "
        f"{workers[0].attention_backend}/{workers[0].cpu_isa}; "
        f"namespace {books.metadata.namespace.hex()[:16]}"
    )
