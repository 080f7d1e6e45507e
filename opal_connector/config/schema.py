"""The configuration as Structs: names, types, defaults. Names of tiers are Opal's own."""

from typing import Literal

import msgspec


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings that every tier has.

    `capacity_GB` is GiB when a number ("8"), or a size with a unit ("512MiB"); None asks the tier
    for its default. Eviction starts when a store would fill more than `eviction_threshold` of it.
    """

    capacity_GB: float | str | None = None  # noqa: N815 - Opal's own name
    eviction_policy: Literal["LRU"] = "LRU"
    eviction_threshold: float = 1.0
    concurrency: int = 2


class CPUMemoryConfig(TierConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Host memory: one pool per worker. Default 25 % of free memory, at most 8 GiB."""


TIER_NAMES: tuple[str, ...] = ("CPUMemory",)


class OpalConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything under `kv_connector_extra_config`. README has the table."""

    kvc_tiers: tuple[str, ...] = ("CPUMemory",)
    chunk_size: int | str = 256
    save_unfull_chunk: bool = True
    max_kvc_ready_requests: int = 8
    kvcevent_coalesce_time: float = 0.05
    weights_id: str | None = None
    CPUMemory: CPUMemoryConfig = CPUMemoryConfig()

    def tier(self, name: str) -> TierConfig:
        """The settings of a configured tier."""
        return {"CPUMemory": self.CPUMemory}[name]
