"""From a user's dictionary or file to a checked `OpalConfig`, with one clear error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from opal_connector.config.schema import TIER_NAMES, OpalConfig, TierConfig
from opal_connector.config.sizes import parse_size_bytes

_FILE_FIELD = "opal_config"
# Defaults of vLLM and of other connectors may share the dictionary; these are read by vLLM itself.
_HOST_FIELDS = frozenset({"kv_connector_module_path"})


class ConfigError(ValueError):
    """A user's mistake in the configuration: the field, what was found, what is allowed."""


def load_config(extra: Mapping[str, Any] | None) -> OpalConfig:
    """The checked configuration of `kv_connector_extra_config`.

    Values may also stand in the JSON or YAML file that `opal_config` names; what is written in
    the dictionary itself wins.

    Raises:
        ConfigError: A value is unknown, of the wrong kind, out of range or contradictory.
    """
    given = {key: value for key, value in (extra or {}).items() if key not in _HOST_FIELDS}
    file_name = given.pop(_FILE_FIELD, None)
    merged = {**_read_file(file_name), **given} if file_name is not None else given
    try:
        config = msgspec.convert(merged, OpalConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), merged)) from None
    _check(config)
    return config


def _read_file(name: object) -> dict[str, Any]:
    if not isinstance(name, str):
        raise ConfigError(f"opal_config: found {name!r}, allowed is the path of a file")
    try:
        text = Path(name).expanduser().read_text()
    except OSError as error:
        raise ConfigError(
            f"opal_config: found {name!r}, which cannot be read ({error.strerror})"
        ) from None
    try:
        loaded = yaml.safe_load(text)  # JSON is YAML
    except yaml.YAMLError as error:
        place = str(error).replace("\n", " ")
        raise ConfigError(f"opal_config: {name!r} is neither JSON nor YAML: {place}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"opal_config: {name!r} holds no mapping of names to values")
    if _FILE_FIELD in loaded:
        raise ConfigError(f"opal_config: {name!r} names another opal_config; one file is allowed")
    return loaded


def _explain(message: str, given: Mapping[str, Any]) -> str:
    """Put msgspec's path first and add what was found there and the fields there are."""
    text, _, path = message.partition(" - at ")
    path = path.strip("`")
    where = path.removeprefix("$.").removeprefix("$") or "kv_connector_extra_config"
    if "unknown field" in text:
        owner: type[msgspec.Struct] = OpalConfig
        if where in TIER_NAMES:
            owner = type(OpalConfig().tier(where))
        allowed = ", ".join(owner.__struct_fields__)
        field = text.split("`")[1]
        full = f"{where}.{field}" if where in TIER_NAMES else field
        return f"{full}: unknown field; allowed here: {allowed}"
    found: Any = given
    for part in where.split("."):
        found = found.get(part, "?") if isinstance(found, Mapping) else "?"
    return f"{where}: found {found!r}; {text[0].lower()}{text[1:]}"


def _check(config: OpalConfig) -> None:
    for index, name in enumerate(config.kvc_tiers):
        if name not in TIER_NAMES:
            raise ConfigError(
                f"kvc_tiers[{index}]: found {name!r}, allowed: {', '.join(TIER_NAMES)}"
            )
    if len(set(config.kvc_tiers)) != len(config.kvc_tiers):
        raise ConfigError(f"kvc_tiers: found {list(config.kvc_tiers)}, each tier is allowed once")
    is_auto = config.chunk_size == "auto"
    if not is_auto and (isinstance(config.chunk_size, str) or config.chunk_size < 1):
        raise ConfigError(
            f"chunk_size: found {config.chunk_size!r}, allowed: a number of tokens or 'auto'"
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
    if config.weights_id is not None and not config.weights_id:
        raise ConfigError("weights_id: found '', allowed: any other text, or leave it out")
    for name in TIER_NAMES:
        _check_tier(name, config.tier(name))


def _check_tier(name: str, tier: TierConfig) -> None:
    if tier.capacity_GB is not None:
        try:
            parse_size_bytes(tier.capacity_GB)
        except (ValueError, OverflowError):
            raise ConfigError(
                f"{name}.capacity_GB: found {tier.capacity_GB!r}, "
                "allowed: GiB as a positive number, or a size such as '512MiB'"
            ) from None
    if not 0 < tier.eviction_threshold <= 1:
        raise ConfigError(
            f"{name}.eviction_threshold: found {tier.eviction_threshold}, "
            "allowed: above 0, at most 1"
        )
    if not 1 <= tier.concurrency <= 64:
        raise ConfigError(f"{name}.concurrency: found {tier.concurrency}, allowed: 1 to 64")
