"""opal_connector: KV cache of vLLM in an ordered hierarchy of tiers.

Importing this package loads neither vllm nor torch; `OpalConnector` is resolved on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opal_connector.engine import OpalKVCacheEngine
    from opal_connector.integrations.vllm.connector import OpalConnector

__version__ = "0.1.0"
__all__ = ["OpalConnector", "OpalKVCacheEngine", "__version__"]

_LAZY = {
    "OpalConnector": "opal_connector.integrations.vllm.connector",
    "OpalKVCacheEngine": "opal_connector.engine",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
