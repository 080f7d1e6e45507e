"""What a user may write under `adapter_params`."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from opal_connector.config import (
    TIER_NAMES,
    ConfigError,
    CPUMemoryConfig,
    DistributedFSConfig,
    LocalNVMeConfig,
    OpalConfig,
    converted,
    load_config,
)

_TOP: Final = "adapter_params"
_MOST_NAMESPACE: Final = 128


class AdapterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The tiers, fastest first, and their settings: those of Opal's own connector.

    `quotas` are shares of every tier by cache_salt. Servers with different `namespace`s share no
    object even where they share a directory: for what LMCache's keys do not tell, such as adapters
    or other weights under the same model name.
    """

    kvc_tiers: tuple[str, ...] = ("CPUMemory",)
    namespace: str = ""
    quotas: dict[str, float] = {}
    CPUMemory: CPUMemoryConfig = CPUMemoryConfig()
    LocalNVMe: LocalNVMeConfig = LocalNVMeConfig()
    DistributedFS: DistributedFSConfig = DistributedFSConfig()


_INNER: Final[dict[str, type[msgspec.Struct]]] = {
    name: type(OpalConfig().tier(name)) for name in TIER_NAMES
}


def load_settings(params: Mapping[str, Any]) -> tuple[OpalConfig, str]:
    """The checked configuration and the namespace of `adapter_params`.

    Raises:
        ConfigError: A value is unknown, of the wrong kind, out of range or contradictory.
    """
    settings = converted(params, AdapterSettings, top=_TOP, inner=_INNER)
    if len(settings.namespace) > _MOST_NAMESPACE:
        raise ConfigError(
            f"namespace: found {len(settings.namespace)} characters, allowed: {_MOST_NAMESPACE}"
        )
    allowed = [name for name in TIER_NAMES if name in AdapterSettings.__struct_fields__]
    if not settings.kvc_tiers:
        raise ConfigError(f"kvc_tiers: found none, allowed: some of {', '.join(allowed)}")
    for place, name in enumerate(settings.kvc_tiers):
        if name not in allowed:
            raise ConfigError(f"kvc_tiers[{place}]: found {name!r}, allowed: {', '.join(allowed)}")
    given = {name: value for name, value in params.items() if name != "namespace"}
    return load_config(given), settings.namespace
