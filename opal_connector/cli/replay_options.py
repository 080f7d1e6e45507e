"""From what a person writes to the settings of an instance; a mistake is one sentence."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from opal_connector.cli.errors import CommandError
from opal_connector.config import ConfigError, load_config, parse_size_bytes
from opal_connector.eviction import POLICIES
from opal_connector.simulation import BELADY, DEVICES, DeviceParameters, ReplaySettings

_BLOCKS: Final = re.compile(r"([0-9]+)\s*blocks?")
_SHORT: Final = {"policy": "eviction_policy"}  # what people write, and the field's name
_CONFIG_FIELDS: Final = ("write", "admission", "eviction_threshold", "eviction_target")
_NUMBERS: Final = frozenset({"eviction_threshold", "eviction_target"})
_DEVICE_FIELDS: Final = ("bandwidth_GBps", "latency_nsec", "concurrency")
_DEFAULT_TIERS: Final = ("CPUMemory",)


class TierOption(msgspec.Struct, frozen=True):
    """One `--tier`: a name, a capacity as written, and the other values by name."""

    name: str
    capacity: str
    values: dict[str, str]


def parse_tier(text: str) -> TierOption:
    """`NAME=CAPACITY[,name=value]...`, taken apart; the values are checked later."""
    parts = text.split(",")
    name, equals, capacity = parts[0].partition("=")
    if not equals or not capacity or name not in DEVICES:
        raise CommandError(
            f"--tier: found {text!r}, allowed: NAME=CAPACITY[,name=value]..., "
            f"NAME one of {', '.join(DEVICES)}."
        )
    values: dict[str, str] = {}
    for part in parts[1:]:
        field, equals, value = part.partition("=")
        field = _SHORT.get(field, field)
        if not equals or field not in (*_SHORT.values(), *_CONFIG_FIELDS, *_DEVICE_FIELDS):
            known = ", ".join((*_SHORT, *_CONFIG_FIELDS, *_DEVICE_FIELDS))
            raise CommandError(f"--tier {name}: found {part!r}, allowed: name=value with {known}.")
        values[field] = value
    return TierOption(name, capacity, values)


def parse_policies(texts: Sequence[str]) -> list[str]:
    """The policies of all `--policy` options, each once, spelled as the configuration does."""
    known = {name.lower(): name for name in (*POLICIES, BELADY)}
    policies: list[str] = []
    for text in (part.strip() for option in texts for part in option.split(",")):
        name = known.get(text.lower())
        if name is None:
            raise CommandError(f"--policy: found {text!r}, allowed: {', '.join(known.values())}.")
        if name not in policies:
            policies.append(name)
    return policies


def make_settings(
    tiers: Sequence[TierOption],
    *,
    config_file: Path | None,
    block_bytes: int,
    **others: Any,
) -> ReplaySettings:
    """The tiers of the file and of the options, which win; `others` are fields of the settings.

    Raises:
        CommandError: The configuration refuses something.
    """
    given: dict[str, Any] = {} if config_file is None else {"opal_config": str(config_file)}
    names = list(_configured_tiers(given)) if config_file is not None else []
    devices = dict(DEVICES)
    for tier in tiers:
        if tier.name not in names:
            names.append(tier.name)
        given[tier.name] = _config_values(tier, block_bytes)
        devices[tier.name] = _device(tier, devices[tier.name])
    if not names:
        names = list(_DEFAULT_TIERS)
    given["kvc_tiers"] = names
    for name in names:
        if name not in devices:
            raise CommandError(
                f"kvc_tiers: found {name!r}, allowed here: {', '.join(devices)}; "
                "a store that others run is a DistributedFS of its bandwidth and latency."
            )
        if name != "CPUMemory":
            # Nothing is written: the path only has to be there.
            given[name] = {"path": "simulated", **given.get(name, {})}
    try:
        config = load_config(given)
    except ConfigError as error:
        raise CommandError(f"{error}.") from None
    return ReplaySettings(config=config, devices=devices, **others)


def fixed_tiers(tiers: Sequence[TierOption]) -> frozenset[str]:
    """Tiers that keep their own policy when several are compared."""
    return frozenset(tier.name for tier in tiers if "eviction_policy" in tier.values)


def size_bytes(option: str, text: str) -> int:
    """A size such as 128KiB."""
    try:
        return parse_size_bytes(text if re.search(r"[A-Za-z]", text) else f"{text}B")
    except (ValueError, OverflowError):
        raise CommandError(f"{option}: found {text!r}, allowed: a size such as 128KiB.") from None


def prefill_speed(given: float, *, parameters: float | None, tflops: float) -> float:
    """Tokens per second of a prefill: as given, or what the arithmetic of a model takes."""
    if parameters is None:
        return given
    if given:
        raise CommandError(
            "--model-parameters: found beside --prefill-tokens-per-s, allowed: one of them."
        )
    if not parameters or not tflops:
        raise CommandError("--model-parameters and --tflops: found 0, allowed: more than 0.")
    return tflops * 1e12 / (2 * parameters)


def _configured_tiers(given: dict[str, Any]) -> tuple[str, ...]:
    try:
        return load_config(given).kvc_tiers
    except ConfigError as error:
        raise CommandError(f"{error}.") from None


def _config_values(tier: TierOption, block_bytes: int) -> dict[str, Any]:
    blocks = _BLOCKS.fullmatch(tier.capacity)
    capacity = f"{int(blocks[1]) * block_bytes}B" if blocks else tier.capacity
    values: dict[str, Any] = {"capacity_GB": capacity}
    for field, text in tier.values.items():
        if field in _DEVICE_FIELDS:
            continue
        values[field] = _number(tier.name, field, text) if field in _NUMBERS else text
    return values


def _number(name: str, field: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise CommandError(f"--tier {name}: {field}: found {text!r}, allowed: a number.") from None


def _device(tier: TierOption, default: DeviceParameters) -> DeviceParameters:
    values = msgspec.to_builtins(default)
    values |= {field: text for field, text in tier.values.items() if field in _DEVICE_FIELDS}
    try:
        return msgspec.convert(values, DeviceParameters, strict=False)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        field = path.strip("`")
        raise CommandError(
            f"--tier {tier.name}: {field}: found {tier.values.get(field)!r}; "
            f"{text[0].lower()}{text[1:]}."
        ) from None
