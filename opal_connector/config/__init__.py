"""What a user may write, and nothing else."""

from opal_connector.config.convert import converted, read_mapping
from opal_connector.config.endpoints import Endpoint, parse_endpoint
from opal_connector.config.errors import ConfigError
from opal_connector.config.load import CONFIG_FILE_FIELD, load_config
from opal_connector.config.schema import (
    TIER_NAMES,
    CPUMemoryConfig,
    CurveConfig,
    DistributedFSConfig,
    EngineTierConfig,
    EventsConfig,
    FileTierConfig,
    KeyedTierConfig,
    LocalNVMeConfig,
    MooncakeConfig,
    ObjectStoreConfig,
    OpalConfig,
    SharedTierConfig,
    TierConfig,
    ValkeyConfig,
)
from opal_connector.config.sizes import chunk_blocks_for, parse_size_bytes

__all__ = [
    "CONFIG_FILE_FIELD",
    "TIER_NAMES",
    "CPUMemoryConfig",
    "ConfigError",
    "CurveConfig",
    "DistributedFSConfig",
    "Endpoint",
    "EngineTierConfig",
    "EventsConfig",
    "FileTierConfig",
    "KeyedTierConfig",
    "LocalNVMeConfig",
    "MooncakeConfig",
    "ObjectStoreConfig",
    "OpalConfig",
    "SharedTierConfig",
    "TierConfig",
    "ValkeyConfig",
    "chunk_blocks_for",
    "converted",
    "load_config",
    "parse_endpoint",
    "parse_size_bytes",
    "read_mapping",
]
