"""What one of a router's processes tells the others, and does when they tell something."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator

from opal_connector.cluster.router.core import RouterCore
from opal_connector.cluster.router.dashboard_rings import SentRequest
from opal_connector.cluster.router.peer_messages import (
    Began,
    Computed,
    Ended,
    Finished,
    Hello,
    Measured,
    Message,
    Standing,
)
from opal_connector.cluster.router.shared_router import SharedRouter
from opal_connector.config import ConfigError

logger = logging.getLogger(__name__)


class ProcessBooks:
    """The part of a router's books that its processes have in common.

    What an administrator wants is one whole, with the time of its last change: whoever has an older
    one takes the newer. Mutable state: that time, and the newest that is to be taken; the loop's
    thread alone uses it.
    """

    def __init__(self, core: RouterCore, router: SharedRouter) -> None:
        self._core = core
        self._router = router
        self._changed_at = 0.0
        self._wanted: Standing | None = None
        self._taking: asyncio.Task[None] | None = None
        self.tell: Callable[[Message], None] = lambda _: None
        router.tell = self._tell
        core.on_admin = self._changed
        core.forwarder.recent.on_end = self._finished
        core.fleet.elsewhere = lambda instance: sum(
            router.elsewhere[worker_id] for worker_id in instance.worker_ids
        )

    def standing(self) -> Iterator[Message]:
        """Everything that a process must know which heard nothing so far."""
        yield self._now()
        yield from self._router.under_way()

    def hear(self, peer: int, message: Message) -> None:
        """Another process tells something."""
        match message:
            case Began() | Computed() | Measured() | Ended():
                self._router.hear(peer, message, time.monotonic())
                if isinstance(message, Ended):
                    self._core.admission.wake()
            case Finished(request):
                self._core.forwarder.recent.add(request)
            case Standing():
                self._take(message)
            case Hello():
                raise ValueError("it has said who it is")

    def lose(self, peer: int) -> None:
        """Another process is gone."""
        self._router.lose(peer, time.monotonic())
        self._core.admission.wake()

    async def settle(self) -> None:
        """Wait until what an administrator wants is so."""
        if self._taking is not None:
            await self._taking

    def close(self) -> None:
        """Take nothing more."""
        if self._taking is not None:
            self._taking.cancel()

    # ---- inside ----

    def _tell(self, message: Message) -> None:
        self.tell(message)

    def _finished(self, request: SentRequest) -> None:
        self.tell(Finished(request))

    def _changed(self) -> None:
        # A clock that was set back must not make a change older than the one before it.
        self._changed_at = max(time.time(), math.nextafter(self._changed_at, math.inf))
        self.tell(self._now())

    def _now(self) -> Standing:
        core = self._core
        return Standing(
            self._changed_at,
            core.router.policy_name,
            tuple(instance.config for instance in core.fleet),
            tuple(instance.name for instance in core.fleet if instance.is_draining),
        )

    def _take(self, standing: Standing) -> None:
        if standing.changed_at <= self._changed_at:
            return
        self._changed_at = standing.changed_at
        self._wanted = standing
        if self._taking is None or self._taking.done():
            self._taking = asyncio.create_task(self._take_all())

    async def _take_all(self) -> None:
        while self._wanted is not None:
            standing, self._wanted = self._wanted, None
            await self._become(standing)

    async def _become(self, standing: Standing) -> None:
        core = self._core
        core.router.set_policy(standing.policy)
        wanted = {config.label: config for config in standing.instances}
        for instance in core.fleet:
            if wanted.get(instance.name) != instance.config:
                core.remove(instance)
        for name, config in wanted.items():
            if core.fleet.get(name) is not None:
                continue
            try:
                await core.add(config, is_held=name in standing.draining)
            except (ConfigError, ValueError) as error:
                logger.error("%s cannot be added here: %s", name, error)
        for instance in core.fleet:
            instance.is_draining = instance.name in standing.draining
        core.fleet.on_change()
