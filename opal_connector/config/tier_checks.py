"""Whether the settings of a tier outside this process make sense."""

from opal_connector.config.errors import ConfigError
from opal_connector.config.schema import (
    EngineTierConfig,
    FileTierConfig,
    KeyedTierConfig,
    LocalNVMeConfig,
    SharedTierConfig,
)
from opal_connector.config.sizes import check_size
from opal_connector.config.store_checks import check_address, check_engine_tier


def check_keyed_tier(name: str, tier: KeyedTierConfig, *, is_used: bool) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: A value is missing or out of range.
    """
    if not 0.1 <= tier.timeout_seconds <= 600:
        raise ConfigError(
            f"{name}.timeout_seconds: found {tier.timeout_seconds}, allowed: 0.1 to 600"
        )
    if isinstance(tier, FileTierConfig) and is_used and not tier.path:
        raise ConfigError(f"{name}.path: found {tier.path!r}, allowed: the path of a directory")
    if isinstance(tier, LocalNVMeConfig) and tier.reserve_GB != 0:
        check_size(f"{name}.reserve_GB", tier.reserve_GB)
    if isinstance(tier, SharedTierConfig):
        _check_shared_tier(name, tier)
    if isinstance(tier, EngineTierConfig):
        check_engine_tier(name, tier)
        if is_used:
            check_address(name, tier)


def _check_shared_tier(name: str, tier: SharedTierConfig) -> None:
    if not 0 <= tier.lookup_timeout_seconds <= 5:
        raise ConfigError(
            f"{name}.lookup_timeout_seconds: found {tier.lookup_timeout_seconds}, allowed: 0 to 5"
        )
    if not 0.1 <= tier.refresh_seconds <= 3600:
        raise ConfigError(
            f"{name}.refresh_seconds: found {tier.refresh_seconds}, allowed: 0.1 to 3600"
        )
