"""What a store is called, so that instances that share it know that they do."""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from hashlib import sha256
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from opal_connector.config import (
    EngineTierConfig,
    MooncakeConfig,
    ObjectStoreConfig,
    ValkeyConfig,
)
from opal_connector.tiers.engines.store_endpoints import (
    azure_account,
    azure_endpoint,
    first_of,
    google_endpoint,
    is_azure_fabric,
    is_virtual_hosted,
    s3_endpoint,
)

_VALKEY_PORT: Final = 6379
_WEB_PORTS: Final = {"http": 80, "https": 443}
_LOCAL_NAMES: Final = frozenset(
    {"", "localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"}
)
_USUAL_LOOPBACKS: Final = frozenset({"127.0.0.1", "::1", "0.0.0.0", "::"})  # reach one listener
_PROVIDERS: Final = {"s3": "s3", "s3a": "s3", "gs": "gs"}  # others are spellings of az
_BUCKET_OPTIONS: Final = {
    "s3": ("aws_bucket", "aws_bucket_name", "bucket", "bucket_name"),
    "gs": ("google_bucket", "google_bucket_name", "bucket", "bucket_name"),
    "az": ("azure_container_name", "container_name"),
}
# Names of buckets are unique in all regions, but for those of China.
_AMAZON: Final = re.compile(
    r"(.+\.)?s3(-accelerate|-fips)?(\.dualstack)?([.-][a-z]{2}(-[a-z]+)+-[0-9]+)?(\.vpce)?"
    r"\.amazonaws\.com(?P<china>\.cn)?"
)
_GOOGLE: Final = "storage.googleapis.com"
_FABRIC: Final = "fabric"


def engine_identity(settings: EngineTierConfig, environment: Mapping[str, str] = os.environ) -> str:
    """The store's name, the same for all instances that write to the same place.

    How an address is spelled, credentials and how it is reached are no part of it; what the
    environment says of the place is. A place that only this host reaches has the host's name in
    it. Nothing is asked of anybody; `shared_name` overrides.
    """
    if settings.shared_name is not None:
        return sha256(settings.shared_name.encode()).hexdigest()[:32]
    parts: tuple[str, ...] = ()
    match settings:
        case ObjectStoreConfig(url=str(url)):
            parts = _bucket(url, settings.options, environment)
        case ValkeyConfig(url=str(url)):
            parts = (*_server(url), settings.prefix)
        case MooncakeConfig(master=str(master)):
            host, _, port = master.rpartition(":")
            parts = (_host(host), str(int(port)), settings.prefix)
        case _:
            pass
    return sha256("\0".join((type(settings).__name__, *parts)).encode()).hexdigest()[:32]


def _bucket(
    url: str, options: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[str, ...]:
    split = urlsplit(url)
    provider = _PROVIDERS.get(split.scheme, "az")
    given = {name.lower(): value for name, value in options.items()}
    container, _, host = split.netloc.rpartition("@")  # the form of Azure with its account
    bucket = first_of(given, _BUCKET_OPTIONS[provider]) or container or split.netloc
    match provider:
        case "s3":
            within = f"{bucket}." if is_virtual_hosted(given, environment) else ""
            place = _s3(s3_endpoint(given, environment), within)
        case "gs":
            endpoint = google_endpoint(given, environment)
            place = ("" if urlsplit(endpoint).hostname == _GOOGLE else _endpoint(endpoint),)
        case _:
            place = _azure(host if container else "", given, environment)
    return (provider, *place, bucket, unquote(split.path).strip("/"))


def _s3(endpoint: str, within: str) -> tuple[str, ...]:
    """Amazon's own, or which other; `within` its host the bucket's name may stand first."""
    own = _AMAZON.fullmatch(urlsplit(endpoint).hostname or "")
    if own is not None:
        return (own["china"] or "",)
    return (_endpoint(endpoint, within),)


def _azure(
    host: str, options: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[str, ...]:
    account = azure_account(host.partition(".")[0], options, environment)
    endpoint = azure_endpoint(options, environment)
    name = urlsplit(endpoint).hostname or ""
    is_own = not endpoint or name == f"{account}.blob.core.windows.net"
    is_fabric = host.endswith(".fabric.microsoft.com") or is_azure_fabric(options, environment)
    if name == f"{account}.blob.fabric.microsoft.com" or (not endpoint and is_fabric):
        return (account, _FABRIC)
    return (account, "" if is_own else _endpoint(endpoint))


def _endpoint(url: str, within: str = "") -> str:
    """A server of the web, whatever the spelling of its address."""
    if not url:
        return ""
    split = urlsplit(url)
    port = split.port or _WEB_PORTS.get(split.scheme, 0)
    host = (split.hostname or "").removeprefix(within.lower())
    return f"{_host(host)}:{port}{split.path.rstrip('/')}"


def _server(url: str) -> tuple[str, ...]:
    """The server and the database of `redis`' URLs; the query goes before the path."""
    split = urlsplit(url)
    named = parse_qs(split.query).get("db", [""])[0]
    if split.scheme == "unix":
        path = os.path.normpath(unquote(split.path))
        return (_local(path), str(int(named or 0)))
    database = named or split.path.strip("/")
    return (_host(split.hostname or ""), str(split.port or _VALKEY_PORT), str(int(database or 0)))


def _host(name: str) -> str:
    """A host, whatever the spelling; what means this host on every host has its name in it."""
    plain = unquote(name).lower().rstrip(".")
    if plain in _LOCAL_NAMES or plain.endswith(".localhost"):
        return _local("localhost")
    try:
        address = ipaddress.ip_address(plain)
    except ValueError:
        return plain
    address = getattr(address, "ipv4_mapped", None) or address
    if str(address) in _USUAL_LOOPBACKS:
        return _local("localhost")
    if address.is_loopback or address.is_link_local:
        return _local(str(address))
    return str(address)


def _local(name: str) -> str:
    return f"{name} of {socket.gethostname()}"
