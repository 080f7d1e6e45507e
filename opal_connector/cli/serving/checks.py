"""What the types of the configuration do not say."""

import os
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from opal_connector.cli.serving.engine_arguments import (
    OWN_TIER_FIELDS,
    filled,
    given_environment,
    merged_tiers,
)
from opal_connector.cli.serving.schema import InstanceSettings, ServeConfig, ServeFile
from opal_connector.config import (
    ConfigError,
    DistributedFSConfig,
    OpalConfig,
    SharedTierConfig,
    load_config,
    parse_endpoint,
)
from opal_connector.config.shown import shown
from opal_connector.tiers.engines import check_engine_libraries, engine_identity

_ENDPOINTS: Final = ("endpoint", "publish_endpoint")
_POSITIVE: Final = {
    "scaling": ("max_queue_threshold", "command_seconds"),
    "restart": (
        "first_seconds",
        "longest_seconds",
        "well_seconds",
        "hung_seconds",
        "ready_seconds",
    ),
}
_FROM_ZERO: Final = {
    "scaling": ("scale_latency", "quiet_seconds", "drain_seconds"),
    "restart": ("limit",),
    "stop": ("drain_seconds", "kill_seconds"),
    "prewarm": ("prefixes", "seconds"),
}
_AT_LEAST_ONE: Final = {"scaling": ("max_workers", "min_workers")}
_SHARES: Final = {"restart": ("jitter",), "scaling": ("scale_in_share",)}


def refuse(field: str, found: object, allowed: str) -> NoReturn:
    """Say what is wrong with a field, without what may be a secret.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(f"{field}: found {shown(found, field)}, allowed: {allowed}")


def check_numbers(file: ServeFile) -> None:
    """Numbers are in their ranges."""
    rules: tuple[tuple[Mapping[str, tuple[str, ...]], Callable[[float], bool], str], ...] = (
        (_POSITIVE, lambda value: value > 0, "above 0"),
        (_FROM_ZERO, lambda value: value >= 0, "0 or more"),
        (_AT_LEAST_ONE, lambda value: value >= 1, "at least 1"),
        (_SHARES, lambda value: 0 <= value <= 1, "0 to 1"),
    )
    for table, is_allowed, allowed in rules:
        for part, fields in table.items():
            for field in fields:
                value = getattr(getattr(file, part), field)
                if value is not None and not is_allowed(value):
                    refuse(f"{part}.{field}", value, allowed)
    for field in ("scale_command", "command"):
        found = file.command if field == "command" else file.scaling.scale_command
        if found is not None and not _words(found):
            refuse(field if field == "command" else f"scaling.{field}", found, "a program")


def check_tiers(config: ServeConfig) -> None:
    """Tiers are right for every instance, also for one that scaling may add.

    Private directories are one instance's alone, and a shared one is the same for all.
    """
    file = config.file
    if file.tiers is None:
        return
    _check_own("tiers", file.tiers, may_have_endpoints=len(config.instances) == 1)
    private: dict[tuple[str, str], list[str]] = defaultdict(list)
    shared: set[str] = set()
    for number, one in enumerate(_all_instances(config), 1):
        where = f"instances[{number - 1}].tiers"
        _check_own(where, one.tiers, may_have_endpoints=True)
        assert one.name is not None
        found = _loaded(filled(merged_tiers(file.tiers, one.tiers), one.name, number))
        if "LocalNVMe" in found.kvc_tiers:
            private["LocalNVMe", str(found.LocalNVMe.path)].append(one.name)
        environment = {**os.environ, **given_environment(file, one, number)}
        if _is_our_python(file):
            _check_libraries(found, environment)
        if (shared_tier := found.shared_tier()) is not None:
            shared.add(shared_place(*shared_tier, environment))
    for (tier, path), names in private.items():
        if len(names) > 1:
            refuse(
                f"tiers.{tier}.path", path, "a directory for each instance, such as /disk/{name}"
            )
    if len(shared) > 1:
        refuse(
            "tiers",
            sorted(shared),
            "one directory or store that all instances share, or none at all",
        )


def check_ports(config: ServeConfig) -> None:
    """No port is meant for two: an engine would be taken for well since another one answers."""
    used = {config.router.port: "router.port"} if config.router.port else {}
    for number, one in enumerate(config.instances, 1):
        for field, port in _given_ports(config, one, number):
            full = f"instances[{number - 1}].{field}"
            if port in used:
                refuse(full, port, f"a port that is not that of {used[port]}")
            used[port] = full


def has_lasting_tier(file: ServeFile) -> bool:
    """Whether a new or restarted engine finds something in its tiers.

    Raises:
        ConfigError: Opal's configuration has a mistake.
    """
    if file.tiers is None:
        return False
    tiers = _loaded(file.tiers)
    return any(tiers.keyed_tier(name) is not None for name in tiers.kvc_tiers)


def shared_place(
    name: str, settings: SharedTierConfig, environment: Mapping[str, str] = os.environ
) -> str:
    """Where a shared tier is, for comparing: instances that name another place share nothing."""
    if isinstance(settings, DistributedFSConfig):
        return str(settings.path)
    return f"{name} {engine_identity(settings, environment)}"


def _all_instances(config: ServeConfig) -> list[InstanceSettings]:
    instances = list(config.instances)
    scaling = config.file.scaling
    grows = scaling.enable_scaling and scaling.scale_command is None
    if grows and scaling.max_workers > len(instances):
        instances.append(InstanceSettings(name="one more"))
    return instances


def _given_ports(
    config: ServeConfig, one: InstanceSettings, number: int
) -> Iterator[tuple[str, int]]:
    if one.port is not None:
        yield "port", one.port
    assert one.name is not None
    tiers = filled(merged_tiers(config.file.tiers or {}, one.tiers), one.name, number)
    events = tiers.get("events") or {}
    given = {field: parse_endpoint(events[field]) for field in _ENDPOINTS if events.get(field)}
    endpoint = given.get("endpoint")
    if endpoint is not None:
        if not endpoint.port:
            field = f"instances[{number - 1}].tiers.events.endpoint"
            refuse(field, events["endpoint"], "one with a port, which the router must know")
        given.setdefault("publish_endpoint", endpoint.next_to(1))
    for field, found in given.items():
        if found.port:
            yield f"tiers.events.{field}", found.port


def _words(given: str | Sequence[str]) -> Sequence[str]:
    """The words of a command, none where its quotes do not fit."""
    try:
        return shlex.split(given) if isinstance(given, str) else given
    except ValueError:
        return ()


def _check_own(where: str, tiers: Mapping[str, Any], *, may_have_endpoints: bool) -> None:
    for field in OWN_TIER_FIELDS:
        if tiers.get(field) is not None:
            refuse(f"{where}.{field}", tiers[field], "nothing, since it is the instance's name")
    events = tiers.get("events")
    if isinstance(events, Mapping) and events.get("curve") is not None:
        refuse(
            f"{where}.events.curve",
            events["curve"],
            "nothing, since this router has no key; `opal router` takes events_curve",
        )
    if may_have_endpoints or not isinstance(events, Mapping):
        return
    for field in _ENDPOINTS:
        if events.get(field) is not None:
            refuse(
                f"{where}.events.{field}",
                events[field],
                "nothing, since each instance has its own; it may stand in instances[].tiers",
            )


def _is_our_python(file: ServeFile) -> bool:
    """Whether engines have the libraries that we have."""
    return file.command is None or not {"{python}", sys.executable}.isdisjoint(file.command)


def _check_libraries(config: OpalConfig, environment: Mapping[str, str]) -> None:
    try:
        check_engine_libraries(config, environment)
    except ConfigError as error:
        raise ConfigError(f"tiers.{error}") from None


def _loaded(tiers: Mapping[str, Any]) -> OpalConfig:
    try:
        return load_config(tiers)
    except ConfigError as error:
        raise ConfigError(f"tiers.{error}") from None
