"""The `vllm.general_plugins` entry point: makes the short name `OpalConnector` known to vLLM."""


def register() -> None:
    """Register the connector. Runs in every vLLM process, maybe several times in one."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "OpalConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "OpalConnector", "opal_connector.integrations.vllm.connector", "OpalConnector"
        )
