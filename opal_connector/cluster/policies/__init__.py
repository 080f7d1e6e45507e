"""Which worker a request goes to, one file per idea. Names are what a configuration says."""

from collections.abc import Callable
from typing import Final

from opal_connector.cluster.policies.balanced import Balanced, BalancedSettings
from opal_connector.cluster.policies.base import Candidate, Choice, CostTerms, Policy
from opal_connector.cluster.policies.simple import LeastLoaded, MaxPrefix, Random, RoundRobin

_MAKERS: Final[dict[str, Callable[[int | None], Policy]]] = {
    "RoundRobin": lambda _: RoundRobin(),
    "LeastLoaded": LeastLoaded,
    "Random": Random,
    "MaxPrefix": MaxPrefix,
    "Balanced": lambda seed: Balanced(seed=seed),
}
POLICY_NAMES: Final = tuple(_MAKERS)


def make_policy(name: str, seed: int | None = None) -> Policy:
    """A policy by its name, in any case.

    Raises:
        ValueError: There is none of that name.
    """
    for known, make in _MAKERS.items():
        if known.lower() == name.lower():
            return make(seed)
    raise ValueError(f"policy: found {name!r}, allowed are {', '.join(POLICY_NAMES)}")


__all__ = [
    "POLICY_NAMES",
    "Balanced",
    "BalancedSettings",
    "Candidate",
    "Choice",
    "CostTerms",
    "LeastLoaded",
    "MaxPrefix",
    "Policy",
    "Random",
    "RoundRobin",
    "make_policy",
]
