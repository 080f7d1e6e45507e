"""Whether the libraries are installed that the stores of a configuration need."""

import importlib.util
import os
from collections.abc import Mapping
from typing import Final

from opal_connector.config import ConfigError, EngineTierConfig, ObjectStoreConfig, OpalConfig
from opal_connector.tiers.engines.store_endpoints import first_of

_EXTRAS: Final = {"ObjectStore": "object-store", "Valkey": "valkey", "Mooncake": "mooncake"}
_PACKAGES: Final = {  # and the modules that are in them
    "ObjectStore": {"obstore": "obstore"},
    "Valkey": {"redis": "redis", "hiredis": "hiredis"},
    "Mooncake": {"mooncake-transfer-engine-non-cuda": "mooncake"},
}


def check_engine_libraries(config: OpalConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse tiers whose libraries are not installed. Loads none of them.

    For whoever is about to load a model: a client says it when it is made, minutes later.

    Raises:
        ConfigError: One is missing.
    """
    for name in config.kvc_tiers:
        settings = config.tier(name)
        if not isinstance(settings, EngineTierConfig):
            continue
        require_libraries(name)
        if isinstance(settings, ObjectStoreConfig) and (settings.url or "").startswith("s3"):
            options = {field.lower(): value for field, value in settings.options.items()}
            if profile_of(options, environment):
                require_profiles()


def require_libraries(tier: str) -> None:
    """Refuse a tier if a library of its client is missing.

    Raises:
        ConfigError: One is.
    """
    missing = [name for name, module in _PACKAGES[tier].items() if not _is_there(module)]
    if missing:
        raise ConfigError(
            f"{tier}: the Python package {missing[0]!r} is missing: "
            f"pip install 'opal-connector[{_EXTRAS[tier]}]'"
        )


def require_profiles() -> None:
    """Refuse a profile of AWS if the library is missing that reads it.

    Raises:
        ConfigError: It is.
    """
    if not _is_there("boto3"):
        raise ConfigError(
            "ObjectStore: the Python package 'boto3' is missing, which reads the profile that "
            "AWS_PROFILE names: pip install boto3, or set AWS_ACCESS_KEY_ID"
        )


def profile_of(options: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """The profile of AWS whose credentials are used; none where there are keys."""
    has_keys = first_of(options, ("aws_access_key_id", "access_key_id")) or environment.get(
        "AWS_ACCESS_KEY_ID"
    )
    return "" if has_keys else environment.get("AWS_PROFILE", "")


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
