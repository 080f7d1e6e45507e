"""From a file to a checked `ServeConfig`, with one sentence for a mistake."""

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from opal_connector.cli.model_store import models_directory, read_manifest
from opal_connector.cli.models import SMOLLM2, TINY_LLAMA
from opal_connector.cli.serving.checks import (
    check_numbers,
    check_ports,
    check_tiers,
    has_lasting_tier,
    refuse,
)
from opal_connector.cli.serving.engine_arguments import (
    OWN_FLAGS,
    RANKS_FLAG,
    flag_name,
    merged_flags,
)
from opal_connector.cli.serving.schema import (
    InstanceSettings,
    LogSettings,
    PrewarmSettings,
    RestartSettings,
    ScalingSettings,
    ServeConfig,
    ServeFile,
    StopSettings,
)
from opal_connector.cluster.router.config import RouterConfig, router_config
from opal_connector.config import ConfigError, converted, read_mapping

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")  # it is part of paths, too
_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
_MODELS: Final = {SMOLLM2: "get", TINY_LLAMA: "make"}
_INNER: Final[dict[str, type[msgspec.Struct]]] = {
    "instances": InstanceSettings,
    "scaling": ScalingSettings,
    "restart": RestartSettings,
    "logs": LogSettings,
    "stop": StopSettings,
    "prewarm": PrewarmSettings,
}


def load_serve_config(path: str | Path) -> ServeConfig:
    """The checked configuration of a YAML or JSON file.

    Raises:
        ConfigError: The file cannot be read, or a value in it is not allowed.
    """
    return serve_config(read_mapping(path))


def serve_config(given: Mapping[str, Any]) -> ServeConfig:
    """The checked configuration of a dictionary; raises as `load_serve_config`."""
    file = converted(given, ServeFile, top="serve", inner=_INNER)
    check_numbers(file)
    model_path, served_name = _model(file.model)
    instances = _instances(file)
    for where, flags in [("vllm", file.vllm)] + [
        (f"instances[{place}].vllm", one.vllm) for place, one in enumerate(instances)
    ]:
        _check_flags(where, flags)
    if served_name is not None:
        file = msgspec.structs.replace(
            file, vllm=merged_flags({"served-model-name": served_name}, file.vllm)
        )
    config = ServeConfig(
        file=file,
        model_path=model_path,
        instances=instances,
        router=_router(file, model_path, served_name),
        has_lasting_tier=has_lasting_tier(file),
    )
    _check_workers(config)
    check_tiers(config)
    check_ports(config)
    return config


def instance_name(number: int) -> str:
    """The name of an instance that has not been given one."""
    return f"engine-{number}"


def _model(text: str) -> tuple[str, str | None]:
    """What engines are given as the model, and the name it is served by where that is another."""
    path = Path(text).expanduser()
    if path.is_dir():
        return str(path.absolute()), None
    known = models_directory() / text
    if text and Path(text).name == text and read_manifest(known) is not None:
        return str(known), text
    if text in _MODELS:
        verb = _MODELS[text]
        raise ConfigError(
            f"model: found {text!r}, which must be there first: opal models {verb} {text}"
        )
    if _HUB_NAME.fullmatch(text):
        return text, None
    raise ConfigError(
        f"model: found {text!r}, allowed: a directory, a name that `opal models list` shows, or "
        "the name of a model on a hub such as organisation/model"
    )


def _instances(file: ServeFile) -> tuple[InstanceSettings, ...]:
    given = file.instances
    if isinstance(given, int):
        if not 1 <= given <= file.scaling.max_workers:
            refuse("instances", given, f"1 to max_workers ({file.scaling.max_workers}), or a list")
        given = tuple(InstanceSettings() for _ in range(given))
    if not given:
        refuse("instances", [], "at least one")
    named = tuple(
        one if one.name is not None else msgspec.structs.replace(one, name=instance_name(place))
        for place, one in enumerate(given, 1)
    )
    for field in ("name", "port"):
        seen: set[Any] = set()
        for place, one in enumerate(named):
            value = getattr(one, field)
            if value is not None and value in seen:
                refuse(f"instances[{place}].{field}", value, "one that no other instance has")
            seen.add(value)
    for place, one in enumerate(named):
        if not _NAME.fullmatch(one.name or ""):
            refuse(
                f"instances[{place}].name", one.name, "1 to 64 letters, digits, '_', '-' and '.'"
            )
        if one.port is not None and not 0 < one.port < 1 << 16:
            refuse(f"instances[{place}].port", one.port, "1 to 65535, or leave it out")
    return named


def _check_flags(where: str, flags: Mapping[str, Any]) -> None:
    seen: set[str] = set()
    for name in flags:
        flag = flag_name(name)
        if flag in OWN_FLAGS:
            refuse(f"{where}.{name}", flags[name], "nothing, since `opal serve` sets it")
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", flag, re.IGNORECASE):
            raise ConfigError(
                f"{where}: found the flag {name!r}, allowed: names such as block-size"
            )
        if flag == RANKS_FLAG and not str(flags[name] or 1).isdecimal():
            refuse(f"{where}.{name}", flags[name], "a number from 1 on")
        if flag in seen:
            raise ConfigError(f"{where}: found the flag {name!r} twice, allowed: once")
        seen.add(flag)


def _router(file: ServeFile, model_path: str, served_name: str | None) -> RouterConfig:
    given = dict(file.router)
    if "instances" in given:
        refuse("router.instances", "a list", "nothing, since the instances are those of this file")
    if given.get("workers", 1) != 1:
        refuse("router.workers", given["workers"], "1, since this process is the router")
    try:
        config = router_config(given)
    except ConfigError as error:
        raise ConfigError(f"router.{error}") from None
    if config.tokens.tokenizers or not _has_tokenizer(model_path):
        return config
    served = merged_flags(file.vllm).get("served-model-name", served_name or model_path)
    names = served if isinstance(served, list) else [served]
    tokens = msgspec.structs.replace(
        config.tokens, tokenizers={str(name): model_path for name in names}
    )
    return msgspec.structs.replace(config, tokens=tokens)


def _has_tokenizer(model_path: str) -> bool:
    """Whether the router can split prompts itself."""
    is_there = os.path.isfile(os.path.join(model_path, "tokenizer.json"))
    return is_there and importlib.util.find_spec("transformers") is not None


def _check_workers(config: ServeConfig) -> None:
    scaling, count = config.file.scaling, len(config.instances)
    least = config.least_instances
    if least > scaling.max_workers:
        refuse("scaling.min_workers", least, f"at most max_workers ({scaling.max_workers})")
    if count > scaling.max_workers:
        refuse("instances", count, f"at most scaling.max_workers ({scaling.max_workers})")
