"""The books of one simulated instance: the real ones, over tiers without a byte."""

import msgspec

from opal_connector.config import chunk_blocks_for
from opal_connector.events import EventLog
from opal_connector.keys import plain_layout
from opal_connector.managers import OpalKVCacheManager, build_manager, tier_space
from opal_connector.simulation.clock import VirtualClock
from opal_connector.simulation.settings import ReplaySettings


def chunk_blocks(settings: ReplaySettings, block_tokens: int) -> int:
    """Blocks of a chunk."""
    return chunk_blocks_for(
        settings.chunk_tokens or block_tokens,
        block_tokens=block_tokens,
        block_bytes=settings.bytes_per_token * block_tokens,
        warn=lambda _text: None,
    )


def make_books(
    settings: ReplaySettings,
    *,
    block_tokens: int,
    clock: VirtualClock,
    log: EventLog,
    has_siblings: bool = False,
) -> OpalKVCacheManager:
    """A manager that asks its shared directory only if others write there, too."""
    row_bytes = settings.bytes_per_token * block_tokens
    config = settings.config
    if not has_siblings:
        shared = msgspec.structs.replace(config.DistributedFS, lookup_timeout_seconds=0.0)
        config = msgspec.structs.replace(config, DistributedFS=shared)
    return build_manager(
        config,
        layout=plain_layout(block_tokens),
        chunk_blocks=chunk_blocks(settings, block_tokens),
        spaces={
            name: tier_space(
                config,
                name,
                capacity_bytes=settings.capacity_bytes(name),
                row_bytes=row_bytes,
                file_bytes=lambda blocks, row_bytes, members: blocks * members * row_bytes,
            )
            for name in config.kvc_tiers
        },
        log=log,
        clock=lambda: clock.now,
    )
