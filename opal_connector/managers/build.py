"""From a configuration and the sizes of the tiers to a manager: the only place that wires books."""

from collections.abc import Mapping

from opal_connector.config import OpalConfig
from opal_connector.events import EventLog
from opal_connector.eviction import make_policy
from opal_connector.keys import OpalTokenDatabase
from opal_connector.managers.coordinator import Unitary
from opal_connector.managers.manager import OpalKVCacheManager
from opal_connector.managers.single_type import SINGLE_TYPE_MANAGERS
from opal_connector.managers.storage_backend import OpalStorageBackend
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.managers.tier_pool import TierPool


def build_manager(
    config: OpalConfig,
    *,
    kind: str,
    block_tokens: int,
    chunk_blocks: int,
    row_bytes: int,
    tier_rows: Mapping[str, int],
    log: EventLog,
    ranks: int = 1,
) -> OpalKVCacheManager:
    """The books for one kv group of `kind` (a key of `SINGLE_TYPE_MANAGERS`).

    `tier_rows` maps every configured tier to the rows of `row_bytes` bytes that it has.
    """
    tiers = [
        OpalStorageBackend(
            tier=name,
            pool=TierPool(capacity_rows=tier_rows[name], row_bytes=row_bytes),
            policy=make_policy(config.tier(name).eviction_policy),
            log=log,
            eviction_threshold=config.tier(name).eviction_threshold,
        )
        for name in config.kvc_tiers
    ]
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
        ranks=ranks,
    )
