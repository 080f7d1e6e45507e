"""What a router is told: the configuration's Structs, and how a file becomes them."""

import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from opal_connector.cluster.curve import CurveClient
from opal_connector.cluster.policies import POLICY_NAMES, BalancedSettings
from opal_connector.cluster.router.affinity import AffinitySettings
from opal_connector.cluster.router.breaker import BreakerSettings
from opal_connector.cluster.router.upstream import Address
from opal_connector.config import (
    ConfigError,
    converted,
    parse_endpoint,
    parse_size_bytes,
    read_mapping,
)

_TOP: Final = "router"
_WORKERS_MAX: Final = 64
_NAME: Final = re.compile(r"[^\s/\x00-\x1f]{1,128}")
_POLICIES: Final = {name.lower(): name for name in POLICY_NAMES}
_PORTS: Final = {"http": 80, "https": 443}


class VllmEvents(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The KV events of an engine without Opal, as its `--kv-events-config` has them."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    block_tokens: int | None = None


class InstanceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine's server.

    `events` is the endpoint of its native channel, with data parallel ranks one for each.
    `vllm_events` is for an engine without Opal: an endpoint, all of `VllmEvents`, or `auto`, which
    asks the server. Without either, only its load is known. The key for it is in the environment.
    `ca_file` has the certificates by which its own is judged, in place of the system's;
    `events_curve` the keys for `events`.
    """

    url: str
    events: str | tuple[str, ...] = ()
    vllm_events: str | VllmEvents | None = None
    name: str | None = None
    api_key_env: str | None = None
    ca_file: str | None = None
    events_curve: CurveClient | None = None

    @property
    def label(self) -> str:
        """Its name, without one its host and port."""
        return self.name or urlsplit(self.url).netloc

    @property
    def channels(self) -> tuple[str, ...]:
        """The endpoints of its native channels."""
        return (self.events,) if isinstance(self.events, str) else self.events

    @property
    def address(self) -> Address:
        """Where to connect to."""
        url = urlsplit(self.url)
        port = url.port or _PORTS[url.scheme]
        return Address(url.hostname or "", port, url.scheme == "https", url.path.rstrip("/"))


class HealthConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How instances are watched.

    Each is asked every `interval_seconds`, give or take `jitter` of that. `failing_after` failures
    in a row take it out; it is dead after `dead_after_seconds` of them, or at once when it refused
    `refused_connections` in a row: then what it had in memory is forgotten.
    """

    interval_seconds: float = 1.0
    timeout_seconds: float = 2.0
    jitter: float = 0.2
    failing_after: int = 2
    dead_after_seconds: float = 5.0
    refused_connections: int = 3


class QueueConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many requests an instance gets at a time, and how many wait for how long."""

    max_in_flight: int = 256
    max_queue: int = 512
    queue_timeout_seconds: float = 30.0
    retry_after_seconds: float = 1.0


class LimitsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is too much, or takes too long. `max_attempts` counts the first one."""

    max_body: str = "64MiB"
    max_header: str = "32KiB"
    connect_timeout_seconds: float = 2.0
    body_timeout_seconds: float = 60.0
    first_byte_timeout_seconds: float = 300.0
    request_timeout_seconds: float = 1_800.0
    max_attempts: int = 3
    drain_seconds: float = 30.0


class TokenizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model's tokenizer: its directory, and the chat template where the engine has another.

    `chat_template` is what the engine was given as `--chat-template`, a file or the text itself.
    """

    path: str
    chat_template: str | None = None


class TokensConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the tokens of a prompt become known.

    `tokenizers` maps a served model's name to a directory with its tokenizer, for prompts that are
    tokenized here; `engine` asks an instance's `/tokenize` for all others. Tokenizers are held
    against the engine in any case, by probes of our own.
    """

    tokenizers: dict[str, str | TokenizerConfig] = {}
    engine: bool = True
    timeout_seconds: float = 1.0
    cached_prompts: int = 1_024
    cached_tokens: int = 8_000_000


class AuditConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When what an instance really had is too far from what was expected of it.

    `trust` is the moving average of both' ratio; below `least_trust`, after `least_requests`, the
    instance's events are compared with what it holds, at most every `resync_seconds`.
    """

    weight: float = 0.1
    least_trust: float = 0.5
    least_requests: int = 10
    resync_seconds: float = 30.0


class SecurityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names of environment variables that hold keys, and files for TLS."""

    api_key_env: str | None = None
    admin_key_env: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A router: where it listens, its instances, how it decides and what it puts up with.

    `workers` processes share the port.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    instances: tuple[InstanceConfig, ...] = ()
    policy: str = "Balanced"
    balanced: BalancedSettings = BalancedSettings()
    affinity: AffinitySettings = AffinitySettings()
    health: HealthConfig = HealthConfig()
    breaker: BreakerSettings = BreakerSettings()
    queue: QueueConfig = QueueConfig()
    limits: LimitsConfig = LimitsConfig()
    tokens: TokensConfig = TokensConfig()
    audit: AuditConfig = AuditConfig()
    security: SecurityConfig = SecurityConfig()

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host's name is one of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_router_config(path: str | Path) -> RouterConfig:
    """The checked configuration of a YAML or JSON file.

    Raises:
        ConfigError: The file cannot be read, or a value in it is not allowed.
    """
    return router_config(read_mapping(path))


def router_config(given: Mapping[str, Any]) -> RouterConfig:
    """The checked configuration of a dictionary; raises as `load_router_config`."""
    config = _converted(given, RouterConfig)
    _check(config)
    return config


def instance_config(given: Mapping[str, Any]) -> InstanceConfig:
    """The checked configuration of one instance; raises as `load_router_config`."""
    config = _converted(given, InstanceConfig)
    _check_instance("instance", config)
    return config


_LISTED: Final[dict[str, type[msgspec.Struct]]] = {
    "instances": InstanceConfig,
    "vllm_events": VllmEvents,
}
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def _converted(given: Mapping[str, Any], kind: type[_Struct]) -> _Struct:
    return converted(given, kind, top=_TOP, inner=_LISTED)


# ---- what types do not say ----


def _refuse(field: str, found: object, allowed: str) -> None:
    raise ConfigError(f"{field}: found {found!r}, allowed: {allowed}")


def _check(config: RouterConfig) -> None:
    if not 0 <= config.port < 1 << 16:
        _refuse("port", config.port, "0 to 65535, 0 for any free one")
    if not 1 <= config.workers <= _WORKERS_MAX:
        _refuse("workers", config.workers, f"1 to {_WORKERS_MAX}")
    if not config.host:
        _refuse("host", config.host, "a name or an address, such as 127.0.0.1")
    policy_name("policy", config.policy)
    for place, instance in enumerate(config.instances):
        _check_instance(f"instances[{place}]", instance)
    labels = [instance.label for instance in config.instances]
    for place, label in enumerate(labels):
        if label in labels[:place]:
            _refuse(f"instances[{place}].name", label, "a name or address that no other one has")
    _check_numbers(config)
    for field in ("max_body", "max_header"):
        size = getattr(config.limits, field)
        try:
            parse_size_bytes(size)
        except (ValueError, OverflowError):
            _refuse(f"limits.{field}", size, "a size such as '64MiB'")
    security = config.security
    if (security.tls_certificate is None) != (security.tls_key is None):
        field = "tls_key" if security.tls_key is None else "tls_certificate"
        _refuse(f"security.{field}", None, "a file, since its other half is given")


def policy_name(field: str, given: str) -> str:
    """The policy of a name, which may be in any case; raises as `load_router_config`."""
    name = _POLICIES.get(given.lower())
    if name is None:
        raise ConfigError(f"{field}: found {given!r}, allowed: {', '.join(POLICY_NAMES)}")
    return name


def _check_instance(field: str, instance: InstanceConfig) -> None:
    try:
        url = urlsplit(instance.url)
        is_url = url.scheme in _PORTS and bool(url.hostname) and url.port != 0
    except ValueError:
        is_url = False
    if not is_url or "@" in instance.url or "?" in instance.url or "#" in instance.url:
        shown = instance.url.rpartition("@")[2]  # what is before it may be a password
        _refuse(f"{field}.url", shown, "http://HOST:PORT or https://HOST:PORT")
    if instance.name is not None and not _NAME.fullmatch(instance.name):
        _refuse(f"{field}.name", instance.name, "1 to 128 characters without spaces and slashes")
    if instance.ca_file is not None and not instance.address.is_tls:
        _refuse(f"{field}.ca_file", instance.ca_file, "nothing, since `url` is no https")
    if instance.events_curve is not None and not instance.channels:
        _refuse(f"{field}.events_curve", instance.events_curve, "nothing, without `events`")
    _check_events(field, instance)


def _check_events(field: str, instance: InstanceConfig) -> None:
    for endpoint in instance.channels:
        _check_endpoint(f"{field}.events", endpoint)
    events = instance.vllm_events
    if events is not None and instance.channels:
        _refuse(f"{field}.vllm_events", events, "nothing, since `events` has its device as well")
    if isinstance(events, str) and events != "auto":
        _check_endpoint(f"{field}.vllm_events", events)
    if isinstance(events, VllmEvents):
        _check_endpoint(f"{field}.vllm_events.endpoint", events.endpoint)
        if events.replay_endpoint is not None:
            _check_endpoint(f"{field}.vllm_events.replay_endpoint", events.replay_endpoint)


def _check_endpoint(field: str, text: str) -> None:
    try:
        endpoint = parse_endpoint(text)
        is_there = endpoint.port > 0 and endpoint.host not in {"*", "0.0.0.0", "[::]"}
    except ValueError:
        is_there = False
    if not is_there:
        _refuse(field, text, "tcp://HOST:PORT, with the host and port to connect to")


_POSITIVE: Final[dict[str, tuple[str, ...]]] = {
    "health": ("interval_seconds", "timeout_seconds", "dead_after_seconds"),
    "breaker": ("open_seconds", "longest_open_seconds"),
    "queue": ("queue_timeout_seconds", "retry_after_seconds"),
    "limits": (
        "connect_timeout_seconds",
        "body_timeout_seconds",
        "first_byte_timeout_seconds",
        "request_timeout_seconds",
        "drain_seconds",
    ),
    "tokens": ("timeout_seconds",),
    "audit": ("resync_seconds",),
    "balanced": ("assumed_tokens_per_second",),
    "affinity": ("ttl_seconds",),
}
_AT_LEAST_ONE: Final[dict[str, tuple[str, ...]]] = {
    "health": ("failing_after", "refused_connections"),
    "breaker": ("failures",),
    "queue": ("max_in_flight",),
    "limits": ("max_attempts",),
    "audit": ("least_requests",),
}
_SHARES: Final = {"health": ("jitter",), "audit": ("weight", "least_trust")}
_FROM_ZERO: Final[dict[str, tuple[str, ...]]] = {
    "queue": ("max_queue",),
    "tokens": ("cached_prompts", "cached_tokens"),
    "affinity": ("soft_factor", "max_sessions"),
}
_WEIGHTS: Final[dict[str, tuple[str, ...]]] = {
    "balanced": ("work_weight", "evenness", "decode_weight", "temperature"),
}


def _check_numbers(config: RouterConfig) -> None:
    rules: tuple[tuple[dict[str, tuple[str, ...]], Callable[[float], bool], str], ...] = (
        (_POSITIVE, lambda value: value > 0, "above 0"),
        (_AT_LEAST_ONE, lambda value: value >= 1, "at least 1"),
        (_SHARES, lambda value: 0 <= value <= 1, "0 to 1"),
        (_FROM_ZERO, lambda value: value >= 0, "0 or more"),
        (_WEIGHTS, lambda value: 0 <= value < math.inf, "a finite number from 0 on"),
    )
    for table, is_allowed, allowed in rules:
        for part, fields in table.items():
            for field in fields:
                value = getattr(getattr(config, part), field)
                if not is_allowed(value):
                    _refuse(f"{part}.{field}", value, allowed)
