"""Builds the books of one engine from what its workers really have."""

from collections.abc import Callable, Sequence

import msgspec
from vllm.config import VllmConfig

from opal_connector.config import EngineTierConfig, OpalConfig, chunk_blocks_for
from opal_connector.events import EventLog
from opal_connector.integrations.vllm.facts import engine_metadata
from opal_connector.integrations.vllm.messages import WorkerFacts
from opal_connector.keys import AttentionLayout, OpalEngineMetadata
from opal_connector.managers import BlockTables, OpalKVCacheManager, build_manager, tier_space
from opal_connector.tiers import file_bytes


class Books(msgspec.Struct, frozen=True, eq=False):
    """An engine's manager and the facts that it was built from."""

    manager: OpalKVCacheManager
    metadata: OpalEngineMetadata
    row_bytes: int
    block_count: int
    storing_ranks: int = 1  # workers with objects of their own; others load those of one of them

    @property
    def chunk_bytes(self) -> int:
        """Bytes that a chunk of a long prompt takes to load on one rank.

        Of windows and states little is loaded, however long the prompt.
        """
        managers = self.manager.coordinator.managers
        chains = [manager for manager in managers if manager.is_chain] or managers
        return self.row_bytes * sum(manager.chunk_blocks * manager.members for manager in chains)

    @property
    def layout(self) -> AttentionLayout:
        """The attention groups of the model."""
        return self.manager.layout


def build_books(
    *,
    vllm_config: VllmConfig,
    layout: AttentionLayout,
    workers: list[WorkerFacts],
    config: OpalConfig,
    log: EventLog,
    warn: Callable[[str], None],
) -> Books:
    """The manager for these workers.

    A tier is as large as its smallest rank, so that a row exists on all of them. A chunk is a whole
    number of blocks of every group.
    """
    row_bytes = max(worker.row_bytes for worker in workers)
    unit_rows = sum(
        len(group.kv_groups) * layout.alignment_tokens // group.block_tokens
        for group in layout.groups
        if group.retention != "last"  # of which few blocks are kept
    )
    chunk_units = chunk_blocks_for(
        config.chunk_size,
        block_tokens=layout.alignment_tokens,
        block_bytes=max(1, unit_rows) * row_bytes,
        warn=warn,
    )
    chunk_tokens = chunk_units * layout.alignment_tokens
    chunk_rows = chunk_tokens // layout.groups[0].block_tokens * len(layout.groups[0].kv_groups)
    tier_bytes = {
        name: min(worker.tier_bytes[name] for worker in workers) for name in config.kvc_tiers
    }
    for name, capacity_bytes in tier_bytes.items():
        _check_holds_a_chunk(name, capacity_bytes // row_bytes, chunk_rows, row_bytes, warn)
    manager = build_manager(
        config,
        layout=layout,
        chunk_blocks=chunk_tokens // layout.hash_block_tokens,
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
    return Books(
        manager=manager,
        metadata=engine_metadata(vllm_config, layout, workers, config, chunk_tokens),
        row_bytes=row_bytes,
        block_count=workers[0].block_count,
        storing_ranks=sum(worker.is_holder for worker in workers),
    )


def _check_holds_a_chunk(
    name: str, rows: int, chunk_rows: int, row_bytes: int, warn: Callable[[str], None]
) -> None:
    if rows < chunk_rows:
        warn(
            f"{name}: its capacity holds {rows} blocks of {row_bytes} bytes, less than one chunk "
            f"of {chunk_rows}; whole chunks will not be stored"
        )


def block_tables(block_ids: tuple[Sequence[int], ...], books: Books) -> BlockTables:
    """VLLM's block ids of a request, by kv group; 0 is its null block."""
    return BlockTables(block_ids, group_stride=books.block_count, null_block=0)


def describe_books(books: Books, config: OpalConfig, workers: list[WorkerFacts]) -> str:
    """The effective configuration in one line."""
    tiers = ", ".join(
        f"{tier.tier}, which limits itself"
        if isinstance(config.tier(tier.tier), EngineTierConfig)
        else f"{tier.tier} {tier.capacity_bytes / (1 << 30):.2f} GiB a worker, "
        f"{config.tier(tier.tier).eviction_policy}"
        for tier in books.manager.storage.tiers
    )
    return (
        f"{tiers}; {_describe_groups(books)}; "
        f"unfull chunks {'kept' if config.save_unfull_chunk else 'dropped'}; "
        f"max_kvc_ready_requests {config.max_kvc_ready_requests}; "
        f"{_describe_ranks(books, workers)}, {workers[0].attention_backend}/{workers[0].cpu_isa}; "
        f"namespace {books.metadata.namespace.hex()[:16]}"
    )


def _describe_ranks(books: Books, workers: Sequence[WorkerFacts]) -> str:
    stored = books.storing_ranks
    same = f" with the same KV, which {stored} of them store(s)" if stored < len(workers) else ""
    return f"{len(workers)} worker(s){same}"


def _describe_groups(books: Books) -> str:
    """The objects of every group: of what attention, how long, how large."""
    described = []
    for manager in books.manager.coordinator.managers:
        rows, group = manager.chunk_blocks * manager.members, manager.attention
        span = f" of {group.span_tokens} tokens" if group.span_tokens else ""
        described.append(
            f"{group.kind}{span} in {manager.members} kv group(s), chunks of "
            f"{manager.chunk_blocks * group.block_tokens} tokens "
            f"({manager.chunk_blocks} blocks, {rows * books.row_bytes / (1 << 20):.2f} MiB)"
        )
    return "; ".join(described)
