"""Engines that others run: values by key for many processes. Their libraries load when used."""

from opal_connector.tiers.engines.build import (
    UNLIMITED_BYTES,
    make_engine_client,
)
from opal_connector.tiers.engines.client import EngineClient, Listed, Span
from opal_connector.tiers.engines.engine_medium import EngineMedium
from opal_connector.tiers.engines.engine_tier import EngineTier
from opal_connector.tiers.engines.identity import engine_identity
from opal_connector.tiers.engines.libraries import check_engine_libraries

__all__ = [
    "UNLIMITED_BYTES",
    "EngineClient",
    "EngineMedium",
    "EngineTier",
    "Listed",
    "Span",
    "check_engine_libraries",
    "engine_identity",
    "make_engine_client",
]
