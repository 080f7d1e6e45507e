"""What `opal serve` is told: the Structs of its configuration."""

from typing import Any, Literal

import msgspec

from opal_connector.cluster.router.config import RouterConfig


class InstanceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one instance has of its own; its values win over those for all, one by one.

    `api_key_env` names the environment variable with the key that this engine asks for.
    """

    name: str | None = None
    port: int | None = None
    api_key_env: str | None = None
    vllm: dict[str, Any] = {}
    environment: dict[str, str | int | float] = {}
    tiers: dict[str, Any] = {}


class ScalingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When instances are started and stopped.

    One more is started when there are more than `max_queue_threshold` requests per instance, one is
    stopped when without it there would be less than `scale_in_share` of that for `quiet_seconds`.
    After a change nothing is changed for `scale_latency` seconds. `min_workers` None is the number
    of instances that the file names. With `scale_command` nothing is started or stopped here.
    """

    enable_scaling: bool = False
    max_queue_threshold: float = 4
    scale_latency: float = 40.0
    max_workers: int = 50
    min_workers: int | None = None
    scale_in_share: float = 0.5
    quiet_seconds: float = 60.0
    drain_seconds: float = 600.0
    scale_command: str | tuple[str, ...] | None = None
    command_seconds: float = 60.0


class RestartSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When an engine that has ended is started again.

    The first time after `first_seconds`, then after twice as long each time up to
    `longest_seconds`, give or take `jitter` of it. One that served for `well_seconds` begins anew;
    after `limit` failures in a row it stays down (None: never). One that lives and does not answer
    for `hung_seconds` is killed. One that is not healthy after `ready_seconds` has failed, too.
    """

    first_seconds: float = 1.0
    longest_seconds: float = 60.0
    jitter: float = 0.2
    well_seconds: float = 60.0
    limit: int | None = 5
    hung_seconds: float = 120.0
    ready_seconds: float = 600.0


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the engines' lines go: to standard error, and to a file each in `directory`."""

    colour: Literal["auto", "always", "never"] = "auto"
    directory: str | None = None


class StopSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long what is under way may take at the end, and then how long the engines may."""

    drain_seconds: float = 5.0
    kill_seconds: float = 5.0


class PrewarmSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many prefixes an instance reads from its tiers first, and for how long at most."""

    prefixes: int = 16
    seconds: float = 10.0


class ServeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file as it is written. `command` starts an engine, vLLM's server where it is None.

    With `own_cores` engines on the CPU share the processor's cores out among themselves.
    """

    model: str
    instances: int | tuple[InstanceSettings, ...] = 1
    tiers: dict[str, Any] | None = {}
    vllm: dict[str, Any] = {}
    environment: dict[str, str | int | float] = {}
    command: tuple[str, ...] | None = None
    own_cores: bool = True
    router: dict[str, Any] = {}
    scaling: ScalingSettings = ScalingSettings()
    restart: RestartSettings = RestartSettings()
    logs: LogSettings = LogSettings()
    stop: StopSettings = StopSettings()
    prewarm: PrewarmSettings = PrewarmSettings()


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The file, checked, with what follows from it.

    `model_path` is what engines are given; `instances` are those that the file names.
    """

    file: ServeFile
    model_path: str
    instances: tuple[InstanceSettings, ...]
    router: RouterConfig
    has_lasting_tier: bool

    @property
    def least_instances(self) -> int:
        """Fewer there are never."""
        least = self.file.scaling.min_workers
        return len(self.instances) if least is None else least
