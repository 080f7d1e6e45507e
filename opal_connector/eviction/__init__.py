"""Who leaves next. A policy knows order only: never bytes, clocks, logs or configuration."""

from opal_connector.eviction.arc import ARCPolicy
from opal_connector.eviction.auto import AutoPolicy
from opal_connector.eviction.base import EvictionPolicy
from opal_connector.eviction.fifo import FIFOPolicy
from opal_connector.eviction.lfu import LFUPolicy
from opal_connector.eviction.lru import LRUPolicy
from opal_connector.eviction.s3fifo import S3FIFOPolicy
from opal_connector.eviction.sieve import SievePolicy
from opal_connector.eviction.tinylfu import WTinyLFUPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {
    "LRU": LRUPolicy,
    "FIFO": FIFOPolicy,
    "LFU": LFUPolicy,
    "SIEVE": SievePolicy,
    "S3-FIFO": S3FIFOPolicy,
    "ARC": ARCPolicy,
    "W-TinyLFU": WTinyLFUPolicy,
    "AUTO": AutoPolicy,
}

__all__ = ["POLICIES", "EvictionPolicy", "LRUPolicy", "make_policy"]


def make_policy(name: str) -> EvictionPolicy:
    """A fresh policy by its configured name.

    Raises:
        ValueError: No such policy; the message lists those there are.
    """
    try:
        return POLICIES[name]()
    except KeyError:
        known = ", ".join(POLICIES)
        raise ValueError(f"unknown eviction policy {name!r}; known: {known}") from None
