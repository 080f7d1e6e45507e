"""From a configuration and the sizes of the tiers to a manager: the only place that wires books."""

import time
from collections.abc import Callable, Mapping, Sequence

from opal_connector.config import OpalConfig, SharedTierConfig
from opal_connector.events import EventLog
from opal_connector.eviction import make_policy
from opal_connector.keys import AttentionLayout, OpalTokenDatabase
from opal_connector.managers.asking import Asking
from opal_connector.managers.coordinator import NoPrefixCache, OpalKVCacheCoordinator, Unitary
from opal_connector.managers.hybrid import Hybrid
from opal_connector.managers.kinds import make_managers
from opal_connector.managers.manager import OpalKVCacheManager
from opal_connector.managers.placement import TierRules
from opal_connector.managers.quotas import Quotas
from opal_connector.managers.records import ObjectGroup
from opal_connector.managers.shared_space import SharedSpace
from opal_connector.managers.single_type import SingleTypeManager
from opal_connector.managers.storage_backend import OpalStorageBackend
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.managers.tier_pool import FileSpace, Space, TierPool
from opal_connector.managers.watermarks import TierLimits

_THRESHOLD_AHEAD = 0.95  # where room is made in the background, before it is needed


def build_manager(
    config: OpalConfig,
    *,
    layout: AttentionLayout,
    chunk_blocks: int,
    spaces: Mapping[str, Space],
    log: EventLog,
    ranks: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> OpalKVCacheManager:
    """The books for the groups of `layout`, of kinds in `SINGLE_TYPE_MANAGERS`.

    Chunks have `chunk_blocks` blocks of its `hash_block_tokens`: a multiple of its alignment.
    `spaces` maps every configured tier to its room, as `tier_space` makes it.
    """
    managers = make_managers(
        layout,
        chunk_tokens=chunk_blocks * layout.hash_block_tokens,
        save_unfull_chunk=config.save_unfull_chunk,
    )
    groups = [ObjectGroup(manager.members, manager.is_chain) for manager in managers]
    storage, rules = build_storage(config, groups=groups, spaces=spaces, log=log, clock=clock)
    coordinator = make_coordinator(storage, managers, layout)
    return OpalKVCacheManager(
        database=OpalTokenDatabase(
            block_tokens=layout.hash_block_tokens,
            chunk_blocks=chunk_blocks,
            save_unfull_chunk=config.save_unfull_chunk,
        ),
        storage=storage,
        coordinator=coordinator,
        rules=rules,
        asking=_asking(config, coordinator),
        quotas=Quotas(config.quotas),
        ranks=ranks,
        clock=clock,
    )


def build_storage(
    config: OpalConfig,
    *,
    groups: Sequence[ObjectGroup],
    spaces: Mapping[str, Space],
    log: EventLog,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[OpalStorageManager, list[TierRules]]:
    """The configured tiers, and how each of them gets its objects."""
    rules = [_rules(config, name) for name in config.kvc_tiers]
    tiers = [
        _tier(config, name, rules[place + 1 :], spaces[name], log, groups, clock)
        for place, name in enumerate(config.kvc_tiers)
    ]
    return OpalStorageManager(tiers, log, groups), rules


def _tier(
    config: OpalConfig,
    name: str,
    below: Sequence[TierRules],
    space: Space,
    log: EventLog,
    groups: Sequence[ObjectGroup],
    clock: Callable[[], float],
) -> OpalStorageBackend:
    """The books of one configured tier; `below` are the rules of those after it."""
    settings = config.tier(name)
    evicts_ahead = config.keyed_tier(name) is not None or any(
        rule.write == "demote" for rule in below
    )
    threshold = settings.eviction_threshold
    if threshold is None:
        threshold = _THRESHOLD_AHEAD if evicts_ahead else 1.0
    return OpalStorageBackend(
        tier=name,
        space=space,
        policy=make_policy(settings.eviction_policy),
        log=log,
        limits=TierLimits(
            threshold=threshold,
            target=settings.eviction_target,
            evicts_ahead=evicts_ahead,
            ttl_seconds=settings.ttl_seconds,
            quotas=config.quotas,
        ),
        groups=groups,
        clock=clock,
    )


def make_coordinator(
    storage: OpalStorageManager, managers: Sequence[SingleTypeManager], layout: AttentionLayout
) -> OpalKVCacheCoordinator:
    """The coordinator for these groups: the simplest that can serve them."""
    if not managers:
        return NoPrefixCache((), layout)
    if layout.is_plain:
        return Unitary(storage, managers, layout)
    return Hybrid(storage, managers, layout)


def _asking(config: OpalConfig, coordinator: OpalKVCacheCoordinator) -> Asking | None:
    """Questions about the shared tier, if there is one and lookups may wait for answers."""
    shared = config.shared_tier()
    if shared is None or shared[1].lookup_timeout_seconds == 0:
        return None
    name, settings = shared
    return Asking(
        tier=config.kvc_tiers.index(name),
        coordinator=coordinator,
        timeout_seconds=settings.lookup_timeout_seconds,
    )


def _rules(config: OpalConfig, name: str) -> TierRules:
    settings = config.keyed_tier(name)
    if settings is None:
        return TierRules(write="off", admission="always")
    return TierRules(write=settings.write, admission=settings.admission)


def tier_space(
    config: OpalConfig,
    name: str,
    *,
    capacity_bytes: int,
    row_bytes: int,
    file_bytes: Callable[[int, int, int], int],
) -> Space:
    """The room of a configured tier; `file_bytes(blocks, row_bytes, members)` is that of a file."""
    if config.keyed_tier(name) is None:
        return TierPool(capacity_rows=capacity_bytes // row_bytes, row_bytes=row_bytes)
    kind = SharedSpace if isinstance(config.tier(name), SharedTierConfig) else FileSpace
    return kind(
        capacity_bytes=capacity_bytes,
        file_bytes=lambda blocks, members: file_bytes(blocks, row_bytes, members),
    )
