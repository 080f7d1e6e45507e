"""The configuration as Structs: names, types, defaults. Names of tiers are Opal's own."""

from typing import Literal

import msgspec


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings that every tier has.

    `capacity_GB` is GiB when a number ("8"), or a size with a unit ("512MiB"); None asks the tier
    for its default. Eviction starts when a store would fill more than `eviction_threshold` of it
    and, where it goes on in the background, stops at `eviction_target`. What was not used for
    `ttl_seconds` leaves.
    """

    capacity_GB: float | str | None = None  # noqa: N815 - Opal's own name
    eviction_policy: Literal[
        "LRU", "FIFO", "LFU", "SIEVE", "S3-FIFO", "ARC", "W-TinyLFU", "AUTO"
    ] = "LRU"
    eviction_threshold: float | None = None
    eviction_target: float | None = None
    ttl_seconds: float | None = None
    concurrency: int = 2


class CPUMemoryConfig(TierConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Host memory: one pool per worker. Default 25 % of free memory, at most 8 GiB."""


class FileTierConfig(TierConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tier of files.

    `write` says what comes here: with "through" a copy of everything that a faster tier takes,
    with "demote" what a faster tier is about to evict, with "off" only what no faster tier takes.
    While the tier is full, `admission` "adaptive" takes chunks at second sight where first sight
    is not worth a write. An operation that takes longer than `timeout_seconds` is given up.
    """

    path: str | None = None
    write: Literal["through", "demote", "off"] = "through"
    admission: Literal["adaptive", "always"] = "adaptive"
    timeout_seconds: float = 10.0
    fsync: bool = False
    concurrency: int = 4


class LocalNVMeConfig(FileTierConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A directory on a local disk, per worker. Default 50 % of free space.

    `reserve_GB` of the filesystem stay free, whatever the capacity.
    """

    reserve_GB: float | str = "1GiB"  # noqa: N815 - beside capacity_GB


class DistributedFSConfig(FileTierConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A directory that every instance mounts; the capacity is for all of them together.

    A lookup waits `lookup_timeout_seconds` at most for news about what it does not know; what
    others wrote is found anyway within `refresh_seconds`.
    """

    lookup_timeout_seconds: float = 0.1
    refresh_seconds: float = 10.0


class CurveConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """CURVE keys, in files as `zmq.auth.create_certificates` writes them.

    The instance's own is a secret one; the others are the public ones of those who may follow it.
    """

    secret_key_file: str
    client_key_files: tuple[str, ...]


class EventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The event channel of an instance: who asks at `endpoint` is told everything else.

    Events are published at `publish_endpoint`, by default the port after it; a port of 0 is any
    free one. Ranks of data parallelism shift both ports by two each. What was published stays for
    a replay until it exceeds `replay_size`. With `curve` everything is encrypted, and nobody is
    answered whose key is not known.
    """

    endpoint: str = "tcp://127.0.0.1:5601"
    publish_endpoint: str | None = None
    heartbeat_seconds: float = 1.0
    replay_size: float | str = "64MiB"
    curve: CurveConfig | None = None


TIER_NAMES: tuple[str, ...] = ("CPUMemory", "LocalNVMe", "DistributedFS")


class OpalConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything under `kv_connector_extra_config`. README has the table."""

    kvc_tiers: tuple[str, ...] = ("CPUMemory",)
    chunk_size: int | str = 256
    save_unfull_chunk: bool = True
    max_kvc_ready_requests: int = 8
    kvcevent_coalesce_time: float = 0.05
    instance_id: str | None = None
    events: EventsConfig | None = None
    weights_id: str | None = None
    quotas: dict[str, float] = {}
    CPUMemory: CPUMemoryConfig = CPUMemoryConfig()
    LocalNVMe: LocalNVMeConfig = LocalNVMeConfig()
    DistributedFS: DistributedFSConfig = DistributedFSConfig()

    def tier(self, name: str) -> TierConfig:
        """The settings of a configured tier."""
        tiers: dict[str, TierConfig] = {
            "CPUMemory": self.CPUMemory,
            "LocalNVMe": self.LocalNVMe,
            "DistributedFS": self.DistributedFS,
        }
        return tiers[name]

    def file_tier(self, name: str) -> FileTierConfig | None:
        """The settings of a tier of files; None for another one."""
        tier = self.tier(name)
        return tier if isinstance(tier, FileTierConfig) else None
