"""Whether the settings of a store that others run make sense: its address, its options, its limits.

What is found there is not repeated where a secret may be in it.
"""

import re
from collections.abc import Mapping
from typing import Final, NoReturn
from urllib.parse import SplitResult, parse_qs, urlsplit

from opal_connector.config.errors import ConfigError
from opal_connector.config.schema import (
    EngineTierConfig,
    MooncakeConfig,
    ObjectStoreConfig,
    ValkeyConfig,
)
from opal_connector.config.shown import shown
from opal_connector.config.sizes import check_size

_BUCKET_URL: Final = re.compile(r"(s3|s3a|gs|az|azure|abfs|abfss)://[^/?#@:]+(/[^?#]*)?")
_AZURE_FILES_URL: Final = re.compile(r"abfss?://[^/?#@:]+@[^/?#@:]+(/[^?#]*)?")  # with its account
_VALKEY_URL: Final = re.compile(r"(rediss?://[^\s]+|unix://[^\s]+)")
_DATABASE: Final = re.compile(r"/?|/[0-9]{1,9}/?")
_MASTER: Final = re.compile(r"[^\s:/@]+:([0-9]{1,5})")
_METADATA: Final = re.compile(r"(https?|etcd|redis)://[^\s]+|P2PHANDSHAKE")
_PREFIX: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ENDPOINT: Final = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
_ENDPOINT_ENDS: Final = ("endpoint", "endpoint_url", "endpoint_url_sts", "base_url")
_OPTION_PREFIXES: Final = ("aws_", "azure_storage_", "azure_", "google_")
# In any case, as obstore reads them.
_YES_OR_NO: Final = frozenset({"1", "true", "on", "yes", "y", "0", "false", "off", "no", "n"})
_FLAGS: Final = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "disable_bulk_delete",
        "disable_tagging",
        "http1_only",
        "http2_only",
        "imdsv1_fallback",
        "randomize_addresses",
        "request_payer",
        "s3_express",
        "skip_signature",
        "sse_bucket_key_enabled",
        "unsigned_payload",
        "use_azure_cli",
        "use_emulator",
        "use_fabric_endpoint",
        "virtual_hosted_style_request",
    }
)
_MOST_PORT: Final = (1 << 16) - 1
_LEAST_MOONCAKE_SECONDS: Final = 2.0  # its library waits for whole seconds
_LIMIT: Final[dict[type, str]] = {
    ObjectStoreConfig: "rules of the bucket say what leaves it",
    ValkeyConfig: "the server's maxmemory says what it holds",
    MooncakeConfig: "the memory that was given to it says what it holds",
}
_EVICTS: Final[dict[type, str]] = {
    ObjectStoreConfig: "rules of the bucket say what leaves it",
    ValkeyConfig: "the server's maxmemory-policy says what leaves it",
    MooncakeConfig: "its master says what leaves it",
}


def check_engine_tier(name: str, tier: EngineTierConfig) -> None:
    """Refuse values out of range, and those that have no effect.

    Raises:
        ConfigError: There is one.
    """
    _check_no_limits(name, tier)
    if tier.shared_name is not None and not 0 < len(tier.shared_name) <= 128:
        _refuse(
            f"{name}.shared_name",
            shown(tier.shared_name),
            "a name of 1 to 128 characters, or leave it out",
        )
    prefix = getattr(tier, "prefix", "opal")
    if not _PREFIX.fullmatch(prefix):
        _refuse(f"{name}.prefix", shown(prefix), "1 to 64 letters, digits, '_', '.' and '-'")
    if isinstance(tier, MooncakeConfig):
        if tier.timeout_seconds < _LEAST_MOONCAKE_SECONDS:
            _refuse(
                f"{name}.timeout_seconds",
                shown(tier.timeout_seconds),
                "2 to 600, since its library waits for whole seconds",
            )
        if tier.segment_GB != 0:
            check_size(f"{name}.segment_GB", tier.segment_GB)
        if not 1 <= tier.replicas <= 16:
            _refuse(f"{name}.replicas", shown(tier.replicas), "1 to 16")
    if isinstance(tier, ObjectStoreConfig):
        _check_options(f"{name}.options", tier.options)


def check_address(name: str, tier: EngineTierConfig) -> None:
    """Refuse an address that is none.

    Raises:
        ConfigError: It is missing, or wrong.
    """
    match tier:
        case ObjectStoreConfig():
            _check_bucket(f"{name}.url", tier.url)
        case ValkeyConfig():
            _check_valkey(f"{name}.url", tier.url)
        case MooncakeConfig():
            _check_host_and_port(f"{name}.master", tier.master)
            if tier.admin is not None:
                _check_host_and_port(f"{name}.admin", tier.admin)
            if not _METADATA.fullmatch(tier.metadata or ""):
                field = f"{name}.metadata"
                _refuse(
                    field,
                    shown(tier.metadata, field),
                    "the URL of the metadata server, or P2PHANDSHAKE",
                )
        case _:
            pass  # no other engine


def _check_host_and_port(field: str, value: str | None) -> None:
    found = _MASTER.fullmatch(value or "")
    if found is None or not 0 < int(found.group(1)) <= _MOST_PORT:
        _refuse(field, shown(value), "HOST:PORT")


def plain_option(name: str) -> str:
    """An option without its case and the name of the cloud: obstore knows it under both."""
    plain = name.lower()
    for prefix in _OPTION_PREFIXES:
        if plain.startswith(prefix):
            return plain.removeprefix(prefix)
    return plain


def _check_no_limits(name: str, tier: EngineTierConfig) -> None:
    limits = {
        "capacity_GB": tier.capacity_GB,
        "eviction_threshold": tier.eviction_threshold,
        "eviction_target": tier.eviction_target,
    }
    if not isinstance(tier, ValkeyConfig):
        limits["ttl_seconds"] = tier.ttl_seconds
    for field, value in limits.items():
        if value is not None:
            _refuse(f"{name}.{field}", shown(value), f"leave it out; {_LIMIT[type(tier)]}")
    if tier.eviction_policy != "LRU":  # the default, which says nothing
        _refuse(
            f"{name}.eviction_policy",
            shown(tier.eviction_policy),
            f"leave it out; {_EVICTS[type(tier)]}",
        )


def _check_options(field: str, options: Mapping[str, str]) -> None:
    for name, value in options.items():
        plain = plain_option(name)
        if plain in _FLAGS:
            if value.strip().lower() not in _YES_OR_NO:
                _refuse(f"{field}.{name}", "another text", "'true' or 'false'")
        elif plain.endswith(_ENDPOINT_ENDS) and not _is_endpoint(value):
            _refuse(f"{field}.{name}", _address(value), "http://HOST:PORT or https://HOST")


def _is_endpoint(text: str) -> bool:
    return _ENDPOINT.fullmatch(text) is not None and _split(text) is not None


def _check_bucket(field: str, url: str | None) -> None:
    text = url or ""
    if not _BUCKET_URL.fullmatch(text) and not _AZURE_FILES_URL.fullmatch(text):
        _refuse(
            field,
            _address(url),
            "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX, without credentials",
        )


def _check_valkey(field: str, url: str | None) -> None:
    split = _split(url or "")
    if split is None or not _VALKEY_URL.fullmatch(url or ""):
        _refuse(field, _address(url), "redis://HOST:PORT/DB, rediss:// or unix://")
    is_socket = split.scheme == "unix"
    if is_socket and not split.path.strip("/"):
        _refuse(field, _address(url), "unix:///PATH/TO/SOCKET?db=0")
    if not is_socket and not split.hostname:
        _refuse(field, _address(url), "redis://HOST:PORT/DB, with a host")
    databases = parse_qs(split.query, keep_blank_values=True).get("db", [])
    is_number = all(re.fullmatch(r"[0-9]{1,9}", text) for text in databases)
    if not is_number or len(databases) > 1 or not (is_socket or _DATABASE.fullmatch(split.path)):
        _refuse(field, "a database that is no number", "redis://HOST:PORT/0, or db=0 behind the ?")


def _split(url: str) -> SplitResult | None:
    """The parts of a URL, None if it has none or its port is not one."""
    try:
        split = urlsplit(url)
        return split if split.port is None or split.port else None
    except ValueError:
        return None


def _address(url: str | None) -> str:
    return shown(url, "url")


def _refuse(field: str, found: str, allowed: str) -> NoReturn:
    raise ConfigError(f"{field}: found {found}, allowed: {allowed}")
