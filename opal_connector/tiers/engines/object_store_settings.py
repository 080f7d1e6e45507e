"""A bucket's store in the library `obstore`, from a URL and what users call its options."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from opal_connector.config import ConfigError
from opal_connector.tiers.engines.libraries import (
    profile_of,
    require_libraries,
    require_profiles,
)
from opal_connector.tiers.engines.store_endpoints import YES, s3_endpoint

if TYPE_CHECKING:
    from obstore.store import ObjectStore, RetryConfig

# An attempt gets most of the time and is not repeated if it used it up; what fails at once is.
_ATTEMPT_SHARE: Final = 0.75
_RETRY_SHARE: Final = 0.2
_CONNECT_SHARE: Final = 0.5
_CONNECT_SECONDS_MAX: Final = 5.0
_FIRST_PAUSE_SECONDS: Final = 0.05
_PAUSE_SHARE_MAX: Final = 0.04
_RETRIES: Final = 4
_PREFIXES: Final = ("aws_", "azure_", "google_")
_FLAGS: Final = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "http1_only",
        "http2_only",
        "randomize_addresses",
    }
)
_TEXTS: Final = frozenset(
    {
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "user_agent",
    }
)
_OURS: Final = frozenset({"timeout", "connect_timeout", "read_timeout"})


def make_store(url: str, options: Mapping[str, str], timeout_seconds: float) -> "ObjectStore":
    """The store under a URL. Connects to nothing; credentials come with the first request.

    Raises:
        ConfigError: `obstore` is not installed, or there is no such option.
    """
    require_libraries("ObjectStore")
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    config, client = _split(options)
    arguments: dict[str, Any] = {}
    if url.startswith("s3"):
        # Every row has its own check; hashing all bytes a second time costs more than sending them.
        config.setdefault("aws_unsigned_payload", "true")
        if _is_plain_http(config):
            client.setdefault("allow_http", True)
        arguments = _profile(config)
    arguments["config"] = config
    arguments["client_options"] = client | _times(timeout_seconds)
    arguments["retry_config"] = _retry_config(timeout_seconds)
    try:
        store: ObjectStore = from_url(url, **arguments)
    except (BaseError, ValueError) as error:
        raise _as_config_error(error) from None
    return store


def _split(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """The options of the store, and those of its HTTP client, which the library keeps apart."""
    config: dict[str, str] = {}
    client: dict[str, Any] = {}
    for name, value in options.items():
        plain = name.lower()
        for prefix in _PREFIXES:
            plain = plain.removeprefix(prefix)
        if plain in _OURS:
            raise ConfigError(
                f"ObjectStore.options: found {name!r}, allowed: leave it out; "
                "ObjectStore.timeout_seconds says how long a request may take"
            )
        if plain in _FLAGS:
            client[plain] = value.strip().lower() in YES
        elif plain in _TEXTS:
            client[plain] = value
        else:
            config[name.lower()] = value
    return config, client


def _is_plain_http(config: Mapping[str, str]) -> bool:
    """Whether the endpoint is plain HTTP, or the environment allows that."""
    is_allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() in YES
    return is_allowed or s3_endpoint(config, os.environ).startswith("http://")


def _profile(config: dict[str, str]) -> dict[str, Any]:
    """The credentials of the profile that the environment names, if it has none itself.

    Its region is put into `config`, unless there is one.
    """
    profile = profile_of(config, os.environ)
    if not profile:
        return {}
    require_profiles()
    import boto3
    from botocore.exceptions import BotoCoreError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        session = boto3.Session()
        provider = Boto3CredentialProvider(session)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(
            f"AWS_PROFILE: found {profile!r}, which cannot be used: {error}"
        ) from None
    if session.region_name:
        config.setdefault("aws_region", session.region_name)
    return {"credential_provider": provider}


def _times(timeout_seconds: float) -> dict[str, timedelta]:
    connect_seconds = min(_CONNECT_SECONDS_MAX, _CONNECT_SHARE * timeout_seconds)
    return {
        "timeout": timedelta(seconds=_ATTEMPT_SHARE * timeout_seconds),
        "connect_timeout": timedelta(seconds=connect_seconds),
    }


def _retry_config(timeout_seconds: float) -> "RetryConfig":
    pause_seconds = max(0.001, _PAUSE_SHARE_MAX * timeout_seconds)
    return {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=_RETRY_SHARE * timeout_seconds),
        "backoff": {
            "init_backoff": timedelta(seconds=min(_FIRST_PAUSE_SECONDS, pause_seconds)),
            "max_backoff": timedelta(seconds=pause_seconds),
            "base": 2,
        },
    }


def _as_config_error(error: Exception) -> ConfigError:
    if type(error).__name__ == "UnknownConfigurationKeyError":
        first = str(error).partition("\n")[0]
        return ConfigError(f"ObjectStore.options: {first}")
    if "Account must be specified" in str(error):
        return ConfigError(
            "ObjectStore.options: found no 'azure_storage_account_name', allowed: the account's "
            "name, or leave it out and set AZURE_STORAGE_ACCOUNT_NAME"
        )
    # The text of other errors may have values of options in it, and so a secret.
    return ConfigError(
        f"ObjectStore: found options or an environment that no client can be made of "
        f"({type(error).__name__}), allowed: those that obstore documents"
    )
