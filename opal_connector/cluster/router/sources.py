"""What the router knows of the cluster: the index, and the events that feed it."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from opal_connector.cluster.ingest import (
    DiscoveryError,
    KVBMFeed,
    NativeSource,
    Source,
    VllmSource,
    discover,
)
from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.router.config import InstanceConfig, VllmEvents
from opal_connector.cluster.router.decide import Router
from opal_connector.cluster.router.instances import Fleet, Instance
from opal_connector.events.channel import InstanceDescription
from opal_connector.reports import RateLimitedWarnings

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
_DISCOVERY_SECONDS = 2.0


class ClusterIndex(KVBM):
    """A `KVBM` that tells a router before a worker leaves it, whoever removes it."""

    router: Router | None = None
    on_join: Callable[[str], None] | None = None

    def join(self, description: InstanceDescription) -> None:
        """A worker is there, is described anew, or has begun again."""
        is_new = description.instance_id not in self.workers
        super().join(description)
        if is_new and self.on_join is not None:
            self.on_join(description.instance_id)

    def remove_worker(self, worker_id: str) -> None:
        """A worker is gone, with everything that it said and that was expected of it."""
        if self.router is not None and worker_id in self.workers:
            self.router.forget_worker(worker_id)
        super().remove_worker(worker_id)


class EventSources:
    """Follows the events of every instance, and tells each which workers it is.

    Mutable state: the sources by instance, those that are still being asked for their events. The
    loop's thread alone uses it.
    """

    def __init__(self, index: KVBM, fleet: Fleet) -> None:
        self._index = index
        self._fleet = fleet
        self._warnings = RateLimitedWarnings(logger)
        self.feed = KVBMFeed(index)
        self._followed: dict[str, list[Source]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._poller: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look which workers the sources feed."""
        self._poller = asyncio.create_task(self._poll())

    def follow(self, instance: Instance) -> None:
        """Follow an instance's events from now on.

        Raises:
            ValueError: One of them is followed for another instance already.
        """
        config = instance.config
        self._followed[instance.name] = []
        if config.vllm_events == "auto":
            self._asking[instance.name] = asyncio.create_task(self._discover(instance))
            return
        for source in _sources(config):
            self.feed.add(source)
            self._followed[instance.name].append(source)

    def unfollow(self, instance: Instance) -> None:
        """Follow an instance no more; what it said is forgotten at once."""
        asking = self._asking.pop(instance.name, None)
        if asking is not None:
            asking.cancel()
        for source in self._followed.pop(instance.name, []):
            self.feed.remove(source.name)

    def is_settled(self, instance: Instance) -> bool:
        """Whether all that an instance has said is known, and it is being listened to."""
        names = {source.name for source in self._followed.get(instance.name, [])}
        statuses = [status for status in self.feed.statuses() if status.name in names]
        return bool(statuses) and all(status.is_settled for status in statuses)

    def forget_volatile(self, instance: Instance) -> int:
        """An instance's process is gone, and what it had in memory with it; blocks forgotten."""
        blocks = 0
        for worker_id in instance.worker_ids:
            state = self._index.workers.get(worker_id)
            if state is None:
                continue
            for group, tier in list(state.block_counts):
                if not state.tier(tier).is_persistent:
                    blocks += self._index.clear_tier(worker_id, tier, group)
        return blocks

    def resync(self, instance: Instance) -> None:
        """Compare what is known of an instance with what it says that it has."""
        for worker_id in instance.worker_ids:
            self.feed.resync(worker_id)

    async def close(self) -> None:
        """Follow nothing any more."""
        tasks = [*self._asking.values(), *([self._poller] if self._poller is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.feed.close()

    async def _discover(self, instance: Instance) -> None:
        """Ask a server for its events until it tells."""
        config = instance.config
        while True:
            try:
                sources = await asyncio.to_thread(
                    discover, config.url, worker=config.label, tls=instance.tls
                )
                for source in sources:
                    self.feed.add(source)
                    self._followed[config.label].append(source)
                return
            except (DiscoveryError, ValueError) as error:
                self._warnings.warn(f"discover {config.label}", "no events to follow: %s", error)
            await asyncio.sleep(_DISCOVERY_SECONDS)

    async def _poll(self) -> None:
        while True:
            known = {status.name: status.worker_ids for status in self.feed.statuses()}
            for instance in self._fleet:
                sources = self._followed.get(instance.name, [])
                found = [worker for source in sources for worker in known.get(source.name, ())]
                instance.worker_ids = tuple(dict.fromkeys(found)) or (instance.name,)
            await asyncio.sleep(POLL_SECONDS)


def _sources(config: InstanceConfig) -> Iterable[Source]:
    events = config.vllm_events
    if isinstance(events, str):
        events = VllmEvents(endpoint=events)
    if events is None:
        return [NativeSource(endpoint, config.events_curve) for endpoint in config.channels]
    return [
        VllmSource(
            worker=config.label,
            endpoint=events.endpoint,
            replay_endpoint=events.replay_endpoint,
            topic=events.topic,
            block_tokens=events.block_tokens,
        )
    ]
