"""A module of LMCache's multi-process server that tells Opal's cluster what the server holds.

--server-module '{"module_path": "opal_connector.integrations.lmcache.server_module",
                  "config": {"events": {"endpoint": "tcp://127.0.0.1:5601"}}}'
"""

import threading
from typing import Any

import torch  # noqa: F401 - LMCache's native module needs it to be there first
from lmcache.v1.multiprocess.ext_server_module import ExtServerModuleBuildContext

from opal_connector.cluster.publisher import Publisher
from opal_connector.config import ConfigError
from opal_connector.events import KVCEvent
from opal_connector.integrations.lmcache.bindings import TokenBindings
from opal_connector.integrations.lmcache.books import ObjectBooks
from opal_connector.integrations.lmcache.bus_follower import BusFollower
from opal_connector.integrations.lmcache.instance_facts import ServerFacts
from opal_connector.integrations.lmcache.module_settings import (
    ServerModuleSettings,
    channel_settings,
    load_module_settings,
)
from opal_connector.integrations.lmcache.placements import PlacementBooks
from opal_connector.integrations.lmcache.tier_follower import TierFollower, opal_adapters


def build_server_modules(context: ExtServerModuleBuildContext) -> "OpalEventModule":
    """What `--server-module` calls.

    Raises:
        ConfigError: The configuration is wrong, or LMCache's events are off.
    """
    settings = load_module_settings(context.config)
    if not context.server_context.event_bus.enabled:
        raise ConfigError(
            "server-module: found LMCache's event bus off (--disable-observability), "
            "allowed: on, because its events are what is announced"
        )
    return OpalEventModule(context.server_context, settings)


class OpalEventModule:
    """LMCache's chunks as an instance on Opal's event channel.

    The channel opens as soon as it is known which model it is about. Mutable state: the followers
    of Opal's own adapters, the sources on the bus that were seen, whether the channel has been
    opened or closed; guarded by `_lock`.
    """

    def __init__(self, context: Any, settings: ServerModuleSettings) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._followers: dict[ObjectBooks, TierFollower] = {}
        self._sources: dict[ObjectBooks, str] = {}
        self._is_open = False
        self._is_closed = False
        self._placements = PlacementBooks(
            TokenBindings(context.chunk_size), self._announce, settings.model
        )
        self._bus = BusFollower(context, self._placements, self._refresh)
        self._facts = ServerFacts(context, self._placements, self._bus, settings.served_model_name)
        self.publisher = Publisher(channel_settings(settings), self._facts, detach=self._detach)
        self._bus.follow(context.event_bus)
        self._refresh()

    @property
    def context(self) -> Any:
        """LMCache's server context."""
        return self._context

    def report_status(self) -> dict[str, Any]:
        """What `/status` says of the channel."""
        counts, endpoint = self._placements.counts(), self.publisher.endpoint
        return {
            "opal_events": {
                "is_publishing": self.publisher.is_alive and endpoint is not None,
                "endpoint": endpoint.announced if endpoint is not None else None,
                "model": self._placements.model,
                "announced_chunks": counts.announced,
                "chunks_without_tokens": counts.without_tokens,
                "chunks_of_other_models": counts.of_other_models,
                "dropped_events": self._bus.dropped_events,
                "resyncs": self._bus.resyncs,
                "failures": self._bus.failures,
            }
        }

    def close(self) -> None:
        """Publish what is left and end."""
        self._bus.close()
        with self._lock:
            self._is_closed = True
            followers = list(self._followers.values())
            self._followers.clear()
        for follower in followers:
            follower.detach()
        self.publisher.close()

    # ---- inside ----

    def _announce(self, event: KVCEvent) -> None:
        self.publisher.hear(event)

    def _detach(self) -> None:
        """Nobody hears any more. Called by the publisher's thread."""
        self._placements.announce = _nowhere

    def _refresh(self) -> None:
        """The adapters may be others now, or the model may be known."""
        adapters = list(
            opal_adapters(pair[1] for pair in self._context.storage_manager.l2_adapters())
        )
        with self._lock:
            if self._is_closed:
                return
            books = [adapter.books for adapter in adapters]
            for one in [known for known in self._followers if known not in books]:
                self._followers.pop(one).detach()
                self._placements.replace(self._sources.pop(one), ())
            for one in books:
                if one not in self._followers:
                    source = self._sources[one] = f"opal/{id(one):x}"
                    self._followers[one] = TierFollower(one, self._placements, source)
            self._facts.followers = tuple(self._followers.values())
            if self._facts.is_ready and not self._is_open:
                self._is_open = True
                self.publisher.start()


def _nowhere(event: KVCEvent) -> None:
    """Where events go when nobody hears."""
