"""Books of several attention groups for tests, and what a hit must be by looking at everything."""

from collections.abc import Callable, Iterable, Sequence

from fakes import ROW_BYTES, FakeClock

from opal_connector.events import EventLog
from opal_connector.eviction import EvictionPolicy, LRUPolicy
from opal_connector.keys import (
    HASH_BYTES,
    AttentionGroup,
    AttentionKind,
    AttentionLayout,
    OpalTokenDatabase,
    TokenChain,
)
from opal_connector.managers import (
    BlockTables,
    ObjectGroup,
    ObjectRecord,
    OpalKVCacheManager,
    OpalRequest,
    OpalStorageBackend,
    OpalStorageManager,
    TierPool,
    TierRules,
    make_coordinator,
    make_managers,
)
from opal_connector.managers.watermarks import TierLimits
from opal_connector.transfers import JobResult, StoreJob

GROUP_STRIDE = 1000  # between the addresses of two kv groups


def hybrid_manager(
    layout: AttentionLayout,
    *,
    rows: Sequence[int],
    chunk_tokens: int,
    ranks: int = 1,
    save_unfull_chunk: bool = True,
    rules: Sequence[TierRules] = (),
    evicts_ahead: bool = False,
    policy: Callable[[], EvictionPolicy] = LRUPolicy,
) -> OpalKVCacheManager:
    """Books of a model over tiers of so many rows of memory each; the event log is on."""
    log = EventLog(enabled=True)
    managers = make_managers(layout, chunk_tokens=chunk_tokens, save_unfull_chunk=save_unfull_chunk)
    groups = [ObjectGroup(manager.members, manager.is_chain) for manager in managers]
    storage = OpalStorageManager(
        [
            OpalStorageBackend(
                tier=name,
                space=TierPool(capacity_rows=count, row_bytes=ROW_BYTES),
                policy=policy(),
                log=log,
                limits=TierLimits(threshold=1.0, evicts_ahead=evicts_ahead),
                groups=groups,
            )
            for name, count in zip(("near", "far"), rows, strict=False)
        ],
        log,
        groups,
    )
    return OpalKVCacheManager(
        database=OpalTokenDatabase(
            block_tokens=layout.hash_block_tokens,
            chunk_blocks=chunk_tokens // layout.hash_block_tokens,
            save_unfull_chunk=save_unfull_chunk,
        ),
        storage=storage,
        coordinator=make_coordinator(storage, managers, layout),
        rules=rules,
        ranks=ranks,
        clock=FakeClock(),
    )


def tables_of(manager: OpalKVCacheManager, tokens: int, *, is_nulled: bool = False) -> BlockTables:
    """Paged blocks for so many tokens: block i of every kv group is its block i + 1.

    With `is_nulled`, of every group only those that vLLM would still have behind these tokens.
    """
    tables: list[list[int]] = []
    for group in manager.layout.groups:
        count = -(-tokens // group.block_tokens)
        first = group.skipped_tokens(tokens) // group.block_tokens if is_nulled else 0
        table = [0 if block < first else block + 1 for block in range(count)]
        tables += [table] * len(group.kv_groups)
    return BlockTables(tuple(tables), group_stride=GROUP_STRIDE, null_block=0)


def begin(manager: OpalKVCacheManager, tokens: Sequence[int], request_id: str = "r") -> OpalRequest:
    """A request over these tokens."""
    request = manager.new_request(request_id)
    request.extend(tokens)
    return request


def look(manager: OpalKVCacheManager, request: OpalRequest) -> int:
    """The tokens that a lookup finds; they are promised to the request."""
    result = manager.lookup(
        request, computed_blocks=0, max_blocks=len(request.chain.hashes), now=1e9
    )
    return result.block_count * manager.layout.hash_block_tokens


def plan(
    manager: OpalKVCacheManager, request: OpalRequest, *, is_nulled: bool = False
) -> StoreJob | None:
    """Plan to store all that the request has."""
    blocks = len(request.chain.hashes)
    tokens = blocks * manager.layout.hash_block_tokens
    return manager.plan_store(
        request,
        full_blocks=blocks,
        tables=tables_of(manager, tokens, is_nulled=is_nulled),
        include_tail=True,
    )


def store(manager: OpalKVCacheManager, tokens: Sequence[int]) -> OpalRequest:
    """Store a sequence at once and end its request."""
    request = begin(manager, tokens, "store")
    look(manager, request)
    job = plan(manager, request)
    if job is not None:
        manager.commit(JobResult(job.job_id, 0))
    manager.end_request(request)
    manager.check()
    return request


def layout_of(*groups: AttentionGroup) -> AttentionLayout:
    """These groups, with the kv groups numbered through."""
    numbered: list[AttentionGroup] = []
    first = 0
    for group in groups:
        count = len(group.kv_groups)
        fields = {name: getattr(group, name) for name in group.__struct_fields__}
        fields["kv_groups"] = tuple(range(first, first + count))
        numbered.append(AttentionGroup(**fields))
        first += count
    return AttentionLayout(tuple(numbered))


def full(block_tokens: int = 2, members: int = 1, *, is_draft: bool = False) -> AttentionGroup:
    """Full attention in so many kv groups."""
    return AttentionGroup(
        block_tokens=block_tokens, kv_groups=tuple(range(members)), is_draft=is_draft
    )


def window(
    span_tokens: int, block_tokens: int = 2, members: int = 1, *, is_draft: bool = False
) -> AttentionGroup:
    """A sliding window in so many kv groups."""
    return AttentionGroup(
        kind=AttentionKind.SLIDING_WINDOW,
        block_tokens=block_tokens,
        kv_groups=tuple(range(members)),
        span_tokens=span_tokens,
        is_draft=is_draft,
    )


def local(span_tokens: int, block_tokens: int = 2, members: int = 1) -> AttentionGroup:
    """Chunked local attention in so many kv groups."""
    return AttentionGroup(
        kind=AttentionKind.CHUNKED_LOCAL,
        block_tokens=block_tokens,
        kv_groups=tuple(range(members)),
        span_tokens=span_tokens,
    )


def mamba(block_tokens: int = 2, members: int = 1) -> AttentionGroup:
    """Mamba layers in so many kv groups."""
    return AttentionGroup(
        kind=AttentionKind.MAMBA, block_tokens=block_tokens, kv_groups=tuple(range(members))
    )


def hashes_of(run: bytes) -> list[bytes]:
    """The blocks of a run."""
    return [run[start : start + HASH_BYTES] for start in range(0, len(run), HASH_BYTES)]


def group_hashes(layout: AttentionLayout, chain: TokenChain, group: int) -> list[bytes]:
    """The hash of every block of a group: that of the last hash block in it."""
    step = layout.groups[group].block_tokens // layout.hash_block_tokens
    hashes = chain.hashes
    return [hashes[stop - 1] for stop in range(step, len(hashes) + 1, step)]


def blocks_held(
    manager: OpalKVCacheManager, counts: Callable[[ObjectRecord], bool]
) -> dict[int, set[bytes]]:
    """By group, the blocks of all objects in all tiers that count."""
    held: dict[int, set[bytes]] = {group: set() for group in range(len(manager.layout.groups))}
    for tier in manager.storage.tiers:
        for record in tier.index.records.values():
            if counts(record):
                held[record.group].update(hashes_of(record.run))
    return held


def needs(group: AttentionGroup, tokens: int, computed_tokens: int) -> range:
    """The blocks that must be there for a hit of so many tokens, beyond the computed ones."""
    first, stop = group.needed_blocks(tokens)
    first = max(first, computed_tokens // group.block_tokens)
    if group.is_draft and first < stop:
        stop += 1  # the block behind it tells that the last one is what a draft would see
    return range(first, stop)


def longest_hit(
    layout: AttentionLayout,
    chain: TokenChain,
    held: dict[int, set[bytes]],
    *,
    computed_tokens: int,
    most_tokens: int,
    groups: Iterable[int] | None = None,
) -> int:
    """The longest servable length by trying all of them, or what is computed."""
    chosen = range(len(layout.groups)) if groups is None else list(groups)
    hashes = {group: group_hashes(layout, chain, group) for group in chosen}

    def is_servable(tokens: int) -> bool:
        return all(
            block < len(hashes[group]) and hashes[group][block] in held[group]
            for group in chosen
            for block in needs(layout.groups[group], tokens, computed_tokens)
        )

    unit = layout.alignment_tokens
    lengths = range(most_tokens - most_tokens % unit, computed_tokens, -unit)
    return next(filter(is_servable, lengths), computed_tokens)


def limited_blocks(job: StoreJob, layout: AttentionLayout) -> int:
    """Blocks of a store that count against what may be in flight: states are stored in any case."""
    limited = [item for item in job.objects if layout.groups[item.group].retention != "last"]
    return sum(len(item.block_ids) for item in limited)
