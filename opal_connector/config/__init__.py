"""What a user may write, and nothing else."""

from opal_connector.config.convert import converted, read_mapping
from opal_connector.config.endpoints import Endpoint, parse_endpoint
from opal_connector.config.errors import ConfigError
from opal_connector.config.load import load_config
from opal_connector.config.schema import (
    TIER_NAMES,
    CPUMemoryConfig,
    CurveConfig,
    DistributedFSConfig,
    EventsConfig,
    FileTierConfig,
    LocalNVMeConfig,
    OpalConfig,
    TierConfig,
)
from opal_connector.config.sizes import chunk_blocks_for, parse_size_bytes

__all__ = [
    "TIER_NAMES",
    "CPUMemoryConfig",
    "ConfigError",
    "CurveConfig",
    "DistributedFSConfig",
    "Endpoint",
    "EventsConfig",
    "FileTierConfig",
    "LocalNVMeConfig",
    "OpalConfig",
    "TierConfig",
    "chunk_blocks_for",
    "converted",
    "load_config",
    "parse_endpoint",
    "parse_size_bytes",
    "read_mapping",
]
