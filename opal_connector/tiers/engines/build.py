"""Clients of engines from their settings."""

from collections.abc import Callable
from functools import partial
from typing import Final

from opal_connector.config import (
    EngineTierConfig,
    MooncakeConfig,
    ObjectStoreConfig,
    ValkeyConfig,
    parse_size_bytes,
)
from opal_connector.tiers.engines.client import EngineClient

UNLIMITED_BYTES: Final = 1 << 60  # an engine limits itself: books never find it full
# An operation that uses up its time is answered by its client, before its thread is given up.
_CLIENT_SHARE: Final = 0.8


def make_engine_client(
    name: str, settings: EngineTierConfig, *, gives_memory: bool = False
) -> EngineClient:
    """The client of a configured tier. Connects to nothing.

    With `gives_memory` it contributes the memory that is configured to an engine that is made of
    its clients: of an instance its workers do, and its scheduler does not.

    Raises:
        ConfigError: The library that it needs is not installed.
    """
    timeout_seconds = _CLIENT_SHARE * settings.timeout_seconds
    match settings:
        case ObjectStoreConfig(url=str(url)):
            from opal_connector.tiers.engines.object_store import ObjectStoreClient

            return ObjectStoreClient(url, options=settings.options, timeout_seconds=timeout_seconds)
        case ValkeyConfig(url=str(url)):
            from opal_connector.tiers.engines.valkey import ValkeyClient

            return ValkeyClient(
                url,
                prefix=settings.prefix,
                ttl_seconds=settings.ttl_seconds,
                timeout_seconds=timeout_seconds,
                connections=settings.concurrency,
            )
        case MooncakeConfig(master=str(master), metadata=str(metadata)):
            from opal_connector.tiers.engines.mooncake import MooncakeClient
            from opal_connector.tiers.engines.mooncake_listing import ListingMooncakeClient

            make: Callable[..., EngineClient] = MooncakeClient
            if settings.admin is not None:
                make = partial(ListingMooncakeClient, admin=settings.admin)
            return make(
                master=master,
                metadata=metadata,
                protocol=settings.protocol,
                device=settings.device,
                local_host=settings.local_host,
                segment_bytes=_segment_bytes(settings) if gives_memory else 0,
                replicas=settings.replicas,
                prefix=settings.prefix,
                timeout_seconds=timeout_seconds,
            )
        case _:
            raise ValueError(f"{name} has no address")  # the configuration is checked before


def _segment_bytes(settings: MooncakeConfig) -> int:
    return parse_size_bytes(settings.segment_GB) if settings.segment_GB else 0
