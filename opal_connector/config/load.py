"""From a user's dictionary or file to a checked `OpalConfig`, with one clear error."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from opal_connector.config.convert import converted, read_mapping
from opal_connector.config.endpoints import parse_endpoint
from opal_connector.config.errors import ConfigError
from opal_connector.config.schema import (
    TIER_NAMES,
    CurveConfig,
    EventsConfig,
    OpalConfig,
    SharedTierConfig,
    TierConfig,
)
from opal_connector.config.shown import shown
from opal_connector.config.sizes import check_size
from opal_connector.config.tier_checks import check_keyed_tier

CONFIG_FILE_FIELD: Final = "opal_config"
# Defaults of vLLM and of other connectors may share the dictionary; these are read by vLLM itself.
_HOST_FIELDS = frozenset({"kv_connector_module_path"})
_EVENTS = "events"
_TOP = "kv_connector_extra_config"
_INNER: Final[dict[str, type[msgspec.Struct]]] = {
    **{name: type(OpalConfig().tier(name)) for name in TIER_NAMES},
    _EVENTS: EventsConfig,
    "curve": CurveConfig,
}


def load_config(extra: Mapping[str, Any] | None) -> OpalConfig:
    """The checked configuration of `kv_connector_extra_config`.

    Values may also stand in the JSON or YAML file that `opal_config` names; what is written in
    the dictionary itself wins, value by value.

    Raises:
        ConfigError: A value is unknown, of the wrong kind, out of range or contradictory.
    """
    given = {key: value for key, value in (extra or {}).items() if key not in _HOST_FIELDS}
    file_name = given.pop(CONFIG_FILE_FIELD, None)
    merged = _merge(_read_file(file_name), given) if file_name is not None else given
    _check_names(_TOP, merged)
    config = converted(merged, OpalConfig, top=_TOP, inner=_INNER)
    _check(config)
    return config


def _read_file(name: object) -> dict[str, Any]:
    if not isinstance(name, str):
        raise ConfigError(f"opal_config: found {shown(name)}, allowed is the path of a file")
    loaded = read_mapping(name, CONFIG_FILE_FIELD)
    if CONFIG_FILE_FIELD in loaded:
        raise ConfigError(f"opal_config: {name!r} names another opal_config; one file is allowed")
    return loaded


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, the values of a tier and of the channel one by one; `above` wins."""
    merged = {**below, **above}
    for name in (*TIER_NAMES, _EVENTS):
        if isinstance(below.get(name), Mapping) and isinstance(above.get(name), Mapping):
            merged[name] = {**below[name], **above[name]}
    return merged


def _check_names(where: str, given: Mapping[Any, Any]) -> None:
    for name, value in given.items():
        if not isinstance(name, str):
            raise ConfigError(f"{where}: found {name!r} as a name, allowed: text")
        if isinstance(value, Mapping):
            _check_names(name, value)


def _check_tier_names(names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name not in TIER_NAMES:
            raise ConfigError(
                f"kvc_tiers[{index}]: found {shown(name)}, allowed: {', '.join(TIER_NAMES)}"
            )
    if len(set(names)) != len(names):
        raise ConfigError(f"kvc_tiers: found {shown(list(names))}, each tier is allowed once")


def _check(config: OpalConfig) -> None:
    _check_tier_names(config.kvc_tiers)
    is_auto = config.chunk_size == "auto"
    if not is_auto and (isinstance(config.chunk_size, str) or config.chunk_size < 1):
        raise ConfigError(
            f"chunk_size: found {shown(config.chunk_size)}, allowed: a number of tokens or 'auto'"
        )
    if config.max_kvc_ready_requests < 1:
        raise ConfigError(
            f"max_kvc_ready_requests: found {config.max_kvc_ready_requests}, allowed: at least 1"
        )
    if not 0 <= config.kvcevent_coalesce_time <= 60:
        raise ConfigError(
            f"kvcevent_coalesce_time: found {config.kvcevent_coalesce_time}, "
            "allowed: 0 to 60 seconds"
        )
    _check_events(config)
    _check_quotas(config.quotas)
    if config.weights_id is not None and not config.weights_id:
        raise ConfigError("weights_id: found '', allowed: any other text, or leave it out")
    for name in TIER_NAMES:
        _check_tier(name, config.tier(name))
        keyed_tier = config.keyed_tier(name)
        if keyed_tier is not None:
            check_keyed_tier(name, keyed_tier, is_used=name in config.kvc_tiers)
    _check_shared_tiers(config)


def _check_events(config: OpalConfig) -> None:
    if config.instance_id is not None and not 0 < len(config.instance_id) <= 128:
        raise ConfigError(
            f"instance_id: found {shown(config.instance_id)}, "
            "allowed: a name of 1 to 128 characters, or leave it out"
        )
    events = config.events
    if events is None:
        return
    for field in ("endpoint", "publish_endpoint"):
        text = getattr(events, field)
        try:
            if text is not None:
                parse_endpoint(text)
        except ValueError:
            raise ConfigError(
                f"events.{field}: found {text!r}, "
                "allowed: tcp://HOST:PORT, with port 0 for any free one"
            ) from None
    if not 0.1 <= events.heartbeat_seconds <= 60:
        raise ConfigError(
            f"events.heartbeat_seconds: found {events.heartbeat_seconds}, allowed: 0.1 to 60"
        )
    check_size("events.replay_size", events.replay_size)
    if events.curve is not None:
        _check_curve(events.curve)


def _check_curve(curve: CurveConfig) -> None:
    if not curve.client_key_files:
        raise ConfigError(
            "events.curve.client_key_files: found none, allowed: the public keys (.key) of those "
            "who may follow the events"
        )
    for path in (curve.secret_key_file, *curve.client_key_files):
        is_own = path == curve.secret_key_file
        field = "secret_key_file" if is_own else "client_key_files"
        if not Path(path).expanduser().is_file():
            raise ConfigError(f"events.curve.{field}: found {path!r}, which is no file")


def _check_quotas(quotas: Mapping[str, float]) -> None:
    for tenant, share in quotas.items():
        if not 0 < share <= 1:
            raise ConfigError(
                f"quotas.{tenant}: found {share}, "
                "allowed: a share of every tier, above 0, at most 1"
            )


def _check_tier(name: str, tier: TierConfig) -> None:
    if tier.capacity_GB is not None:
        check_size(f"{name}.capacity_GB", tier.capacity_GB)
    threshold = 1.0 if tier.eviction_threshold is None else tier.eviction_threshold
    if not 0 < threshold <= 1:
        raise ConfigError(
            f"{name}.eviction_threshold: found {threshold}, allowed: above 0, at most 1"
        )
    if tier.eviction_target is not None and not 0 < tier.eviction_target <= threshold:
        raise ConfigError(
            f"{name}.eviction_target: found {tier.eviction_target}, "
            f"allowed: above 0, at most eviction_threshold ({threshold})"
        )
    if tier.ttl_seconds is not None and not tier.ttl_seconds > 0:
        raise ConfigError(
            f"{name}.ttl_seconds: found {tier.ttl_seconds}, allowed: above 0, or leave it out"
        )
    if not 1 <= tier.concurrency <= 64:
        raise ConfigError(f"{name}.concurrency: found {tier.concurrency}, allowed: 1 to 64")


def _check_shared_tiers(config: OpalConfig) -> None:
    shared = [name for name in config.kvc_tiers if isinstance(config.tier(name), SharedTierConfig)]
    if len(shared) > 1:
        raise ConfigError(
            f"kvc_tiers: found {' and '.join(shared)}, allowed: one tier that instances share"
        )
