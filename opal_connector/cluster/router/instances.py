"""The instances that a router sends to, and which of them take requests."""

import ssl
from collections.abc import Callable, Collection, Iterator
from enum import StrEnum
from typing import Final

from opal_connector.cluster.router.breaker import Breaker, BreakerSettings
from opal_connector.cluster.router.config import InstanceConfig
from opal_connector.cluster.router.upstream import ConnectionPool
from opal_connector.config import ConfigError

_RANK: Final = "/dp"


class Health(StrEnum):
    """What is known of an instance's server: new, well, failing since a moment, or dead."""

    NEW = "new"
    UP = "up"
    FAILING = "failing"
    DEAD = "dead"


class Instance:
    """One engine's server.

    Mutable state: its health, its breaker, what is under way there, which workers it is and what
    they serve. The loop's thread alone uses it.

    Raises:
        ConfigError: `ca_file` holds no certificates.
    """

    def __init__(
        self,
        config: InstanceConfig,
        *,
        breaker: BreakerSettings,
        connect_seconds: float,
        api_key: str | None = None,
    ) -> None:
        self.config = config
        self.name = config.label
        self.api_key = api_key
        self.tls = _tls(config)
        self.pool = ConnectionPool(config.address, connect_seconds, self.tls)
        self.breaker = Breaker(breaker)
        self.health = Health.NEW
        self.failing_since: float | None = None
        self.failures = 0
        self.refused = 0
        self.in_flight = 0
        self.is_draining = False
        self.worker_ids: tuple[str, ...] = (self.name,)
        self.models: dict[str, str | None] = {}  # by id, the model that an adapter is for

    def is_well(self, now: float) -> bool:
        """Whether it takes requests, once it has room."""
        return self.health is Health.UP and not self.is_draining and self.breaker.allows(now)

    def serves(self, model: str | None) -> bool:
        """Whether it serves a model, as far as that is known."""
        return model is None or not self.models or model in self.models

    def rank_of(self, worker_id: str) -> int | None:
        """The data parallel rank that a worker is, None for an engine that has one only."""
        if len(self.worker_ids) < 2:
            return None
        _, found, rank = worker_id.rpartition(_RANK)
        return int(rank) if found and rank.isdecimal() else 0


def _tls(config: InstanceConfig) -> ssl.SSLContext | None:
    """By which certificates an instance's own is judged; None where it has none."""
    if not config.address.is_tls:
        return None
    try:
        return ssl.create_default_context(cafile=config.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"ca_file: found {config.ca_file!r}, which holds no certificates in PEM ({error})"
        ) from None


class Fleet:
    """All instances by name.

    Mutable state: the instances, and who wants to know when one may take requests again.
    """

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._instances: dict[str, Instance] = {}
        self.on_change: Callable[[], None] = lambda: None
        self.elsewhere: Callable[[Instance], int] = lambda _: 0  # requests of other processes

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._instances.values()))

    def __len__(self) -> int:
        return len(self._instances)

    def get(self, name: str) -> Instance | None:
        """An instance by its name."""
        return self._instances.get(name)

    def add(self, instance: Instance) -> None:
        """One more.

        Raises:
            ValueError: One of this name is there.
        """
        if instance.name in self._instances:
            raise ValueError(f"there is an instance {instance.name!r} already")
        self._instances[instance.name] = instance
        self.on_change()

    def remove(self, name: str) -> Instance:
        """One less. Raises KeyError where there is none of this name."""
        instance = self._instances.pop(name)
        self.on_change()
        return instance

    def well(self, now: float, model: str | None, without: Collection[str]) -> list[Instance]:
        """Those that take requests for a model, once they have room."""
        found = [
            instance
            for instance in self._instances.values()
            if instance.is_well(now) and instance.name not in without
        ]
        serving = [instance for instance in found if instance.serves(model)]
        # A model that nobody names is judged by an engine, in its own words.
        known = any(model in instance.models for instance in self._instances.values())
        return serving if serving or known else found

    def has_room(self, instance: Instance) -> bool:
        """Whether an instance may be given one more now."""
        return instance.in_flight + self.elsewhere(instance) < self._max_in_flight
