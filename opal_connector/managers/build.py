"""From a configuration and the sizes of the tiers to a manager: the only place that wires books."""

import time
from collections.abc import Callable, Mapping

from opal_connector.config import OpalConfig
from opal_connector.events import EventLog
from opal_connector.eviction import make_policy
from opal_connector.keys import OpalTokenDatabase
from opal_connector.managers.asking import Asking
from opal_connector.managers.coordinator import Unitary
from opal_connector.managers.manager import OpalKVCacheManager
from opal_connector.managers.placement import TierRules
from opal_connector.managers.quotas import Quotas
from opal_connector.managers.shared_space import SharedSpace
from opal_connector.managers.single_type import SINGLE_TYPE_MANAGERS
from opal_connector.managers.storage_backend import OpalStorageBackend
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.managers.tier_pool import FileSpace, Space, TierPool
from opal_connector.managers.watermarks import TierLimits

_THRESHOLD_AHEAD = 0.95  # where room is made in the background, before it is needed


def build_manager(
    config: OpalConfig,
    *,
    kind: str,
    block_tokens: int,
    chunk_blocks: int,
    spaces: Mapping[str, Space],
    log: EventLog,
    ranks: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> OpalKVCacheManager:
    """The books for one kv group of `kind` (a key of `SINGLE_TYPE_MANAGERS`).

    `spaces` maps every configured tier to its room, as `tier_space` makes it.
    """
    rules = [_rules(config, name) for name in config.kvc_tiers]
    tiers = []
    for place, name in enumerate(config.kvc_tiers):
        settings = config.tier(name)
        evicts_ahead = config.file_tier(name) is not None or any(
            rule.write == "demote" for rule in rules[place + 1 :]
        )
        threshold = settings.eviction_threshold
        if threshold is None:
            threshold = _THRESHOLD_AHEAD if evicts_ahead else 1.0
        tiers.append(
            OpalStorageBackend(
                tier=name,
                space=spaces[name],
                policy=make_policy(settings.eviction_policy),
                log=log,
                limits=TierLimits(
                    threshold=threshold,
                    target=settings.eviction_target,
                    evicts_ahead=evicts_ahead,
                    ttl_seconds=settings.ttl_seconds,
                    quotas=config.quotas,
                ),
                clock=clock,
            )
        )
    storage = OpalStorageManager(tiers, log)
    group = SINGLE_TYPE_MANAGERS[kind](
        group=0, chunk_blocks=chunk_blocks, save_unfull_chunk=config.save_unfull_chunk
    )
    return OpalKVCacheManager(
        database=OpalTokenDatabase(
            block_tokens=block_tokens,
            chunk_blocks=chunk_blocks,
            save_unfull_chunk=config.save_unfull_chunk,
        ),
        storage=storage,
        coordinator=Unitary(storage, [group]),
        rules=rules,
        asking=_asking(config, chunk_blocks),
        quotas=Quotas(config.quotas),
        ranks=ranks,
        clock=clock,
    )


def _asking(config: OpalConfig, chunk_blocks: int) -> Asking | None:
    """Questions about the shared tier, if there is one and lookups may wait for answers."""
    timeout_seconds = config.DistributedFS.lookup_timeout_seconds
    if "DistributedFS" not in config.kvc_tiers or timeout_seconds == 0:
        return None
    return Asking(
        tier=config.kvc_tiers.index("DistributedFS"),
        group=0,
        chunk_blocks=chunk_blocks,
        timeout_seconds=timeout_seconds,
    )


def _rules(config: OpalConfig, name: str) -> TierRules:
    settings = config.file_tier(name)
    if settings is None:
        return TierRules(write="off", admission="always")
    return TierRules(write=settings.write, admission=settings.admission)


def tier_space(
    config: OpalConfig,
    name: str,
    *,
    capacity_bytes: int,
    row_bytes: int,
    file_bytes: Callable[[int, int], int],
) -> Space:
    """The room of a configured tier; `file_bytes(blocks, row_bytes)` is the size of a file."""
    if config.file_tier(name) is None:
        return TierPool(capacity_rows=capacity_bytes // row_bytes, row_bytes=row_bytes)
    kind = SharedSpace if name == "DistributedFS" else FileSpace
    return kind(
        capacity_bytes=capacity_bytes, file_bytes=lambda blocks: file_bytes(blocks, row_bytes)
    )
