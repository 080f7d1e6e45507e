"""How one instance is started and reached: its command line, its environment, its ports."""

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from opal_connector.cli.server_process import HOST, free_port, opal_transfer_config
from opal_connector.cli.serving.cores import own_cores
from opal_connector.cli.serving.engine_arguments import (
    RANKS_FLAG,
    command_flags,
    filled,
    given_environment,
    merged_flags,
    merged_tiers,
)
from opal_connector.cli.serving.private_files import PrivateFiles
from opal_connector.cli.serving.schema import InstanceSettings, ServeConfig
from opal_connector.cluster.router.config import InstanceConfig
from opal_connector.config import (
    CONFIG_FILE_FIELD,
    TIER_NAMES,
    ConfigError,
    EngineTierConfig,
    OpalConfig,
    read_mapping,
)
from opal_connector.config.endpoints import PORTS_PER_RANK, parse_endpoint

_VLLM: Final = ("{python}", "-m", "vllm.entrypoints.openai.api_server")
_FLAGS: Final = {
    "enable-prompt-tokens-details": True,  # the router compares what was cached with its books
    "disable-access-log-for-endpoints": "/health,/metrics,/v1/models",  # asked every second
}
_ENVIRONMENT: Final = {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1"}
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1"}  # a local directory is all that is needed
_PORT_TRIES: Final = 50
_STORES: Final = frozenset(
    name for name in TIER_NAMES if isinstance(OpalConfig().tier(name), EngineTierConfig)
)


class InstancePlan(msgspec.Struct, frozen=True):
    """One instance, for as long as it is there: restarts change nothing of it."""

    name: str
    number: int
    command: tuple[str, ...]
    environment: dict[str, str]
    router: InstanceConfig

    @property
    def url(self) -> str:
        """Where its server is reached."""
        return self.router.url


class Planner:
    """Makes plans.

    Mutable state: the ports that were given out, by instance, so that none is given twice. One that
    comes again gives back those that it had. And the files with what is not for command lines,
    which `close` removes.
    """

    def __init__(self, config: ServeConfig, environ: Mapping[str, str] = os.environ) -> None:
        self._config = config
        self._environ = environ
        self._named = {one.port for one in config.instances if one.port is not None}
        self._named.add(config.router.port)
        self._given: dict[str, set[int]] = {}
        self.files = PrivateFiles()

    def close(self) -> None:
        """Remove the files: no engine that was planned is started any more."""
        self.files.close()

    def plan(self, settings: InstanceSettings, number: int) -> InstancePlan:
        """The plan of one instance.

        Raises:
            ConfigError: Its key is not in the environment.
            OSError: There are no free ports, or a file cannot be written.
        """
        file, name = self._config.file, settings.name
        assert name is not None
        self._given[name] = set()
        port = settings.port or self._free(name, 1)
        flags = filled(merged_flags(_FLAGS, file.vllm, settings.vllm), name, number)
        words = file.command or _VLLM
        command = [sys.executable if word == "{python}" else word for word in words]
        command = filled(command, name, number)
        command += ["--host", HOST, "--port", str(port), "--model", self._config.model_path]
        events: tuple[str, ...] = ()
        if file.tiers is not None:
            tiers = filled(merged_tiers(file.tiers, settings.tiers), name, number)
            ranks = max(1, int(flags.get(RANKS_FLAG) or 1))
            tiers["instance_id"] = name
            tiers["events"], events = self._events(name, tiers.get("events"), ranks)
            transfer = opal_transfer_config(self._without_stores(name, tiers))
            command += command_flags({"kv-transfer-config": transfer})
        return InstancePlan(
            name,
            number,
            (*command, *command_flags(flags)),
            self._environment(settings, number),
            InstanceConfig(
                url=f"http://{HOST}:{port}",
                name=name,
                events=events,
                api_key_env=settings.api_key_env,
            ),
        )

    def _events(self, name: str, given: Any, ranks: int) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The channel's settings, and where each rank's is reached."""
        events = dict(given or {})
        if events.get("endpoint") is None:
            first = self._free(name, PORTS_PER_RANK * ranks)
            events["endpoint"] = f"tcp://{HOST}:{first}"
            events["publish_endpoint"] = f"tcp://{HOST}:{first + 1}"
        endpoint = parse_endpoint(events["endpoint"])
        if endpoint.is_any_host:
            endpoint = msgspec.structs.replace(endpoint, host=HOST)
        reached = [endpoint.next_to(PORTS_PER_RANK * rank).address for rank in range(ranks)]
        return events, tuple(reached)

    def _without_stores(self, name: str, tiers: dict[str, Any]) -> dict[str, Any]:
        """The settings without those of stores, which may have credentials: they are in a file.

        An engine's command line can be read by everybody on this host, and vLLM logs it.
        """
        stores = {field: value for field, value in tiers.items() if field in _STORES}
        if not stores:
            return tiers
        given = tiers.get(CONFIG_FILE_FIELD)
        if given is not None:
            stores = merged_tiers(read_mapping(given, CONFIG_FILE_FIELD), stores)
        rest = {field: value for field, value in tiers.items() if field not in _STORES}
        return {**rest, CONFIG_FILE_FIELD: str(self.files.write(name, stores))}

    def _environment(self, settings: InstanceSettings, number: int) -> dict[str, str]:
        file = self._config.file
        key: dict[str, str] = {}
        if settings.api_key_env is not None:
            value = self._environ.get(settings.api_key_env)
            if not value:
                raise ConfigError(
                    f"instances[{number - 1}].api_key_env: found {settings.api_key_env!r}, "
                    "allowed: an environment variable that is set"
                )
            key = {"VLLM_API_KEY": value}
        offline = _OFFLINE if os.path.isdir(self._config.model_path) else {}
        given = given_environment(file, settings, number)
        whole = {**self._environ, **_ENVIRONMENT, **offline, **key, **given}
        if file.command is not None or not file.own_cores:
            return whole
        return {**own_cores(number, len(self._config.instances), whole), **whole}

    def _free(self, name: str, count: int) -> int:
        taken = self._named.union(*self._given.values())
        for _ in range(_PORT_TRIES):
            first = free_port(count)
            wanted = set(range(first, first + count))
            if not wanted & taken:
                self._given[name] |= wanted
                return first
        raise OSError("all free ports are given out already")
