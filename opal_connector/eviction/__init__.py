"""Who leaves next. A policy knows order only: never bytes, clocks, logs or configuration."""

from opal_connector.eviction.base import EvictionPolicy
from opal_connector.eviction.lru import LRUPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {
    "LRU": LRUPolicy,
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
