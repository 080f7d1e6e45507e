"""Feeding an index: what instances publish, followed through losses, restarts and resets.

The machines know neither sockets nor clocks; the sources carry messages to them; the feed owns the
sources and lives in one event loop.
"""

from opal_connector.cluster.ingest.discovery import DiscoveryError, discover
from opal_connector.cluster.ingest.feed import KVBMFeed
from opal_connector.cluster.ingest.native_machine import NativeMachine
from opal_connector.cluster.ingest.sources import NativeSource, Source, SourceStatus, VllmSource
from opal_connector.cluster.ingest.states import (
    BlockIndex,
    SourceLimits,
    SourceMetrics,
    SourceState,
)
from opal_connector.cluster.ingest.vllm_machine import VllmMachine

__all__ = [
    "BlockIndex",
    "DiscoveryError",
    "KVBMFeed",
    "NativeMachine",
    "NativeSource",
    "Source",
    "SourceLimits",
    "SourceMetrics",
    "SourceState",
    "SourceStatus",
    "VllmMachine",
    "VllmSource",
    "discover",
]
