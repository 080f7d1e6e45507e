"""The `vllm.general_plugins` entry point: makes the short name `OpalConnector` known to vLLM."""

import functools
from typing import Any

from opal_connector.config import load_config

_NAME = "OpalConnector"


def register() -> None:
    """Register the connector. Runs in every vLLM process, maybe several times in one."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            _NAME, "opal_connector.integrations.vllm.connector", _NAME
        )
    _check_settings_early(KVConnectorFactory)


def _check_settings_early(factory: Any) -> None:
    """Make the factory refuse wrong settings, and tiers without their libraries, when it is asked.

    vLLM asks while it puts its configuration together, in the front-end process. No hook of a
    connector is sure to see the settings before the model is loaded, which may take minutes.
    """
    find_class = factory.get_connector_class
    if hasattr(find_class, "checks_opal_settings"):
        return

    @functools.wraps(find_class)
    def checked(kv_transfer_config: Any) -> Any:
        if kv_transfer_config.kv_connector == _NAME:
            from opal_connector.tiers.engines import check_engine_libraries

            check_engine_libraries(load_config(kv_transfer_config.kv_connector_extra_config))
        return find_class(kv_transfer_config)

    checked.checks_opal_settings = True  # type: ignore[attr-defined]
    factory.get_connector_class = checked
