"""What an engine is started with: flags, placeholders, and what each instance has of its own."""

import json
from collections.abc import Mapping
from typing import Any, Final

from opal_connector.cli.model_store import cache_directory
from opal_connector.cli.serving.schema import InstanceSettings, ServeFile
from opal_connector.config import TIER_NAMES

# What serve itself says to every engine.
OWN_FLAGS: Final = frozenset({"host", "port", "model", "kv-transfer-config"})
RANKS_FLAG: Final = "data-parallel-size"  # the router follows every rank
OWN_TIER_FIELDS: Final = frozenset({"instance_id"})
_EVENTS: Final = "events"


def filled(value: Any, name: str, number: int) -> Any:
    """The value with {name}, {number}, {index} and {cache} in its texts filled in, however deep.

    The number is from one on, the index from zero, as those of devices are.
    """
    if isinstance(value, str):
        for placeholder, text in (
            ("{name}", name),
            ("{number}", str(number)),
            ("{index}", str(number - 1)),
            ("{cache}", str(cache_directory())),
        ):
            value = value.replace(placeholder, text)
        return value
    if isinstance(value, Mapping):
        return {key: filled(inner, name, number) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [filled(inner, name, number) for inner in value]
    return value


def given_environment(file: ServeFile, one: InstanceSettings, number: int) -> dict[str, str]:
    """What the configuration sets of an instance's environment."""
    assert one.name is not None
    given = filled({**file.environment, **one.environment}, one.name, number)
    return {field: str(value) for field, value in given.items()}


def merged_tiers(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, the fields of a tier and of the channel one by one; `above` wins."""
    merged = {**below, **above}
    for name in (*TIER_NAMES, _EVENTS):
        if isinstance(below.get(name), Mapping) and isinstance(above.get(name), Mapping):
            merged[name] = {**below[name], **above[name]}
    return merged


def flag_name(text: str) -> str:
    """A flag as vLLM spells it, without its dashes."""
    return text.removeprefix("--").replace("_", "-")


def merged_flags(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Flags from several places; the later ones win."""
    return {flag_name(name): value for layer in layers for name, value in layer.items()}


def command_flags(flags: Mapping[str, Any]) -> list[str]:
    """Flags as a command line: true and false are `--flag` and `--no-flag`, null leaves it out."""
    words: list[str] = []
    for name, value in flags.items():
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, Mapping):
            words += [f"--{name}", json.dumps(value)]
        elif isinstance(value, list | tuple):
            words += [f"--{name}", *map(str, value)]
        else:
            words += [f"--{name}", str(value)]
    return words
