"""The tiers of one adapter, from the configuration and what the host has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from opal_connector.config import FileTierConfig, OpalConfig, parse_size_bytes
from opal_connector.integrations.lmcache.contexts import ContextFiles
from opal_connector.integrations.lmcache.identity import MOST_ROWS, ROW_BYTES
from opal_connector.integrations.vllm.host_resources import available_memory_bytes
from opal_connector.managers import Space, tier_space
from opal_connector.tiers import (
    CPUMemory,
    LaneSettings,
    Tier,
    allocate_host_rows,
    file_bytes,
    make_keyed_tier,
)

_MEMORY_SHARE: Final = 0.25
_MEMORY_LIMIT_BYTES: Final = 8 << 30


class AdapterTiers(msgspec.Struct, frozen=True, eq=False):
    """Tiers, fastest first, with their threads, their room, and the contexts of their files."""

    stores: list[Tier]
    lanes: list[LaneSettings]
    spaces: Mapping[str, Space]
    contexts: Mapping[int, ContextFiles]
    most_rows: int


def make_adapter_tiers(config: OpalConfig, namespace: bytes) -> AdapterTiers:
    """Take the memory, and begin to read what names in the directories refer to."""
    stores: list[Tier] = []
    lanes: list[LaneSettings] = []
    spaces: dict[str, Space] = {}
    contexts: dict[int, ContextFiles] = {}
    most_rows = 0
    for place, name in enumerate(config.kvc_tiers):
        settings = config.keyed_tier(name)
        if settings is None:
            store, capacity_bytes = _memory(config)
            lanes.append(LaneSettings(threads=config.tier(name).concurrency))
        else:
            assert isinstance(settings, FileTierConfig)  # others are refused with the settings
            assert settings.path is not None  # checked with the configuration
            store, capacity_bytes = make_keyed_tier(name, settings, row_bytes=ROW_BYTES, rank=0)
            seconds = settings.timeout_seconds
            lanes.append(LaneSettings(threads=settings.concurrency, timeout_seconds=seconds))
            contexts[place] = ContextFiles(Path(settings.path).expanduser(), namespace)
        stores.append(store)
        most_rows = max(most_rows, min(MOST_ROWS, capacity_bytes // ROW_BYTES))
        spaces[name] = tier_space(
            config,
            name,
            capacity_bytes=capacity_bytes,
            row_bytes=ROW_BYTES,
            file_bytes=file_bytes,
        )
    return AdapterTiers(stores, lanes, spaces, contexts, most_rows)


def _memory(config: OpalConfig) -> tuple[Tier, int]:
    capacity = config.CPUMemory.capacity_GB
    if capacity is not None:
        capacity_bytes = parse_size_bytes(capacity)
    else:
        capacity_bytes = min(_MEMORY_LIMIT_BYTES, int(available_memory_bytes() * _MEMORY_SHARE))
    row_count = capacity_bytes // ROW_BYTES
    return CPUMemory(allocate_host_rows(row_count=row_count, row_bytes=ROW_BYTES)), capacity_bytes
