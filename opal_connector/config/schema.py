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


class KeyedTierConfig(TierConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tier of objects that lie outside this process under their names.

    `write` says what comes here: with "through" a copy of everything that a faster tier takes,
    with "demote" what a faster tier is about to evict, with "off" only what no faster tier takes.
    While the tier is full, `admission` "adaptive" takes chunks at second sight where first sight
    is not worth a write. An operation that takes longer than `timeout_seconds` is given up.
    """

    write: Literal["through", "demote", "off"] = "through"
    admission: Literal["adaptive", "always"] = "adaptive"
    timeout_seconds: float = 10.0
    concurrency: int = 4


class FileTierConfig(KeyedTierConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tier of files, under the directory `path`."""

    path: str | None = None
    fsync: bool = False


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


class EngineTierConfig(KeyedTierConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A store for many instances that others run; it limits itself, so there is no capacity here.

    A lookup waits `lookup_timeout_seconds` at most for news about what it does not know; every
    `refresh_seconds` what others wrote and what the store evicted is looked for. Instances that
    write the same address share one store in the eyes of the router; where they must write it
    differently, `shared_name` says that it is the same.
    """

    lookup_timeout_seconds: float = 0.5
    refresh_seconds: float = 30.0
    shared_name: str | None = None


class ObjectStoreConfig(EngineTierConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A bucket: `url` is s3://, gs:// or az:// with a prefix; `options` are those of obstore."""

    url: str | None = None
    options: dict[str, str] = {}


class ValkeyConfig(EngineTierConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A Valkey or Redis server: `url` is redis://, rediss:// or unix://.

    Keys begin with `prefix`. With `ttl_seconds` the server drops what was not used for so long.
    """

    url: str | None = None
    prefix: str = "opal"


class MooncakeConfig(EngineTierConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A Mooncake Store: its master (HOST:PORT) and its metadata server (an URL).

    Every worker gives `segment_GB` of its memory to the store. With `admin` (HOST:PORT) its master
    is asked there what the store holds.
    """

    master: str | None = None
    metadata: str | None = None
    admin: str | None = None
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    local_host: str = ""
    segment_GB: float | str = 0  # noqa: N815 - beside capacity_GB
    replicas: int = 1
    prefix: str = "opal"


SharedTierConfig = DistributedFSConfig | EngineTierConfig


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


TIER_NAMES: tuple[str, ...] = (
    "CPUMemory",
    "LocalNVMe",
    "DistributedFS",
    "ObjectStore",
    "Mooncake",
    "Valkey",
)


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
    ObjectStore: ObjectStoreConfig = ObjectStoreConfig()
    Mooncake: MooncakeConfig = MooncakeConfig()
    Valkey: ValkeyConfig = ValkeyConfig()

    def tier(self, name: str) -> TierConfig:
        """The settings of a configured tier."""
        if name not in TIER_NAMES:
            raise KeyError(name)
        settings: TierConfig = getattr(self, name)
        return settings

    def keyed_tier(self, name: str) -> KeyedTierConfig | None:
        """The settings of a tier of objects outside this process; None for memory."""
        tier = self.tier(name)
        return tier if isinstance(tier, KeyedTierConfig) else None

    def shared_tier(self) -> tuple[str, SharedTierConfig] | None:
        """The tier that instances share, if one is used: its name and its settings."""
        for name in self.kvc_tiers:
            tier = self.tier(name)
            if isinstance(tier, SharedTierConfig):
                return name, tier
        return None
