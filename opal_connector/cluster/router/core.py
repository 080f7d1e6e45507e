"""The router's parts put together, without a socket that clients reach."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from opal_connector.cluster.router.access import read_key
from opal_connector.cluster.router.admission import Admission, Placement
from opal_connector.cluster.router.audit import Audit
from opal_connector.cluster.router.config import InstanceConfig, RouterConfig
from opal_connector.cluster.router.decide import Router
from opal_connector.cluster.router.forwarding import Forwarder
from opal_connector.cluster.router.health import HealthWatch, ask
from opal_connector.cluster.router.instances import Fleet, Instance
from opal_connector.cluster.router.local_tokenizer import load_tokenizers
from opal_connector.cluster.router.local_tokens import LocalTokens
from opal_connector.cluster.router.prompt_tokens import BodyTokens, EngineTokens, PromptTokens
from opal_connector.cluster.router.self_check import EventCheck
from opal_connector.cluster.router.sources import POLL_SECONDS, ClusterIndex, EventSources
from opal_connector.cluster.router.upstream import UpstreamBroken
from opal_connector.reports import RateLimitedWarnings

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_PROBE_SECONDS = 0.2
_LONGEST_PROBE_SECONDS = 60.0


class RouterCore:
    """Everything that one router knows and does.

    Mutable state: that of its parts, and counters of what happened to instances. The loop's thread
    alone uses it.
    """

    def __init__(
        self,
        config: RouterConfig,
        environ: Mapping[str, str] = os.environ,
        *,
        router_type: type[Router] = Router,
    ) -> None:
        self.config = config
        self._environ = environ
        self.index = ClusterIndex()
        self.router = router_type(
            self.index, config.policy, affinity=config.affinity, balanced=config.balanced
        )
        self.index.router = self.router
        self.index.on_join = self.router.loads.welcome
        self.fleet = Fleet(config.queue.max_in_flight)
        self.sources = EventSources(self.index, self.fleet)
        self.admission = Admission(self.router, self.fleet, config.queue)
        self.health = HealthWatch(
            self.fleet, config.health, on_death=self._on_death, on_return=self._on_return
        )
        self.audit = Audit(config.audit, self.sources.resync)
        self.engine_tokens = EngineTokens(config.tokens, self._names_of, self._tokenize)
        tokens: list[PromptTokens] = [BodyTokens(self._names_of)]
        self.local_tokens = LocalTokens(
            load_tokenizers(config.tokens),
            self._names_of,
            self.engine_tokens,
            asks_engine=config.tokens.engine,
        )
        tokens.append(self.local_tokens)
        if config.tokens.engine:
            tokens.append(self.engine_tokens)
        self.forwarder = Forwarder(
            self.router,
            self.fleet,
            self.admission,
            config.limits,
            tokens,
            hides_authorization=config.security.api_key_env is not None,
        )
        self.event_check = EventCheck(self.index, self.router)
        self.forwarder.on_cached = self._on_answer
        self.forwarder.on_failure = self.health.failed
        self.on_admin: Callable[[], None] = lambda: None  # what an administrator wants has changed
        self._warnings = RateLimitedWarnings(logger)
        self._checking: asyncio.Task[None] | None = None
        self.collectors: list[Any] = []  # of those that have more to tell on /metrics
        self.deaths = 0
        self.forgotten_blocks = 0

    async def start(self) -> None:
        """Know the instances, and whether they are well."""
        self.sources.start()
        self._checking = asyncio.create_task(self._check())
        await asyncio.gather(*(self.add(instance) for instance in self.config.instances))

    async def close(self) -> None:
        """Let everything go."""
        if self._checking is not None:
            self._checking.cancel()
        self.local_tokens.close()
        await self.health.close()
        await self.sources.close()
        for instance in self.fleet:
            instance.pool.close()

    # ---- instances ----

    async def add(self, config: InstanceConfig, *, is_held: bool = False) -> Instance:
        """One more instance; returns when it was asked for its health once.

        One that `is_held` is followed and sent nothing, as if it drained, until that is undone.

        Raises:
            ValueError: It is there already, or one of its event endpoints is.
            ConfigError: Its key is not in the environment.
        """
        instance = Instance(
            config,
            breaker=self.config.breaker,
            connect_seconds=self.config.limits.connect_timeout_seconds,
            api_key=read_key("api_key_env", config.api_key_env, self._environ),
        )
        instance.is_draining = is_held
        self.fleet.add(instance)
        try:
            self.sources.follow(instance)
        except ValueError:
            self.sources.unfollow(instance)
            self.fleet.remove(instance.name)
            raise
        await self.health.check(instance)
        if self.fleet.get(instance.name) is instance:
            self.health.watch(instance)
        return instance

    async def drain(self, instance: Instance) -> bool:
        """Send an instance nothing more and wait for what is under way; whether all of it ended."""
        instance.is_draining = True
        self.fleet.on_change()
        deadline = time.monotonic() + self.config.limits.drain_seconds
        while self._under_way(instance) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        return not self._under_way(instance)

    def remove(self, instance: Instance) -> None:
        """One instance less, at once; what is under way there may end."""
        self.fleet.remove(instance.name)
        self.health.forget(instance)
        for worker_id in instance.worker_ids:
            self.router.forget_worker(worker_id)
            self.audit.forget(worker_id)
        self.sources.unfollow(instance)
        instance.pool.close()

    # ---- inside ----

    def _under_way(self, instance: Instance) -> int:
        return instance.in_flight + self.fleet.elsewhere(instance)

    async def _check(self) -> None:
        """Hold tokenizers and events against the engines."""
        probe_at, wait_seconds = 0.0, _PROBE_SECONDS
        while True:
            now = time.monotonic()
            try:
                self.event_check.look(now)
                if self.local_tokens.unprobed and now >= probe_at:
                    if not await self._probe_tokenizers(now):
                        wait_seconds = min(2 * wait_seconds, _LONGEST_PROBE_SECONDS)
                    probe_at = time.monotonic() + wait_seconds
            except Exception as error:  # noqa: BLE001 - one fault must not end all later checks
                self._warnings.warn("check", "a check against the engines failed: %r", error)
            await asyncio.sleep(POLL_SECONDS)

    async def _probe_tokenizers(self, now: float) -> bool:
        """Probe those whose engine is well; returns whether each of these told."""
        told = True
        for model in list(self.local_tokens.unprobed):
            if self.fleet.well(now, model, ()):
                told &= await self.local_tokens.probe(model)
        return told

    def _on_answer(self, placement: Placement, cached_tokens: int | None) -> None:
        self.audit.see(placement, cached_tokens)
        self.event_check.see(placement)

    def _on_death(self, instance: Instance) -> None:
        blocks = self.sources.forget_volatile(instance)
        self.deaths += 1
        self.forgotten_blocks += blocks
        broken = instance.pool.fail_unanswered(UpstreamBroken("dead", "it does not live any more"))
        logger.warning(
            "%s is dead: %d blocks that it had in memory are forgotten, %d requests go elsewhere",
            instance.name,
            blocks,
            broken,
        )

    def _on_return(self, instance: Instance) -> None:
        logger.warning("%s is back", instance.name)
        for worker_id in instance.worker_ids:
            self.router.loads.welcome(worker_id)
        self.sources.resync(instance)

    def _names_of(self, asked: str | None) -> tuple[str | None, str | None]:
        """The model, where the index knows it by this name, and the adapter that is asked for."""
        if asked is None or any(places.model == asked for places in self.index.models()):
            return asked, None
        for instance in self.fleet:
            if instance.models.get(asked) is not None:
                return None, asked
        return None, None

    async def _tokenize(self, model: str | None, question: bytes) -> bytes | None:
        """Ask the instance with the least to do."""
        well = self.fleet.well(time.monotonic(), model, ())
        if not well:
            return None
        instance = min(well, key=lambda one: one.in_flight)
        try:
            status, answer = await ask(instance, "POST", "/tokenize", question, limit=64 << 20)
        except UpstreamBroken:
            return None
        return answer if status == 200 else None


def is_taking(fleet: Fleet) -> bool:
    """Whether at least one instance takes requests."""
    now = time.monotonic()
    return any(instance.is_well(now) for instance in fleet)
