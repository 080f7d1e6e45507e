"""A cluster on this machine: the router in this loop, an engine per instance as a child.

The router shares the process and the loop with those who watch the engines. It is told of an
engine's end by the same loop that sees it, before any request can fail; adding an instance and
asking how long the queues are are calls; and there is one process less that can die. Nothing else
in this process takes time: lines of engines are read and written by threads.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Final

import aiohttp

from opal_connector.cli.serving.guard import Guard
from opal_connector.cli.serving.load import instance_name
from opal_connector.cli.serving.log_sink import LogSink
from opal_connector.cli.serving.plans import InstancePlan, Planner
from opal_connector.cli.serving.scaler import Scaler
from opal_connector.cli.serving.schema import InstanceSettings, ServeConfig
from opal_connector.cli.serving.serve_metrics import ServeCollector
from opal_connector.cli.serving.supervisor import State, Supervisor
from opal_connector.cluster.router.core import RouterCore
from opal_connector.cluster.router.instances import Health, Instance
from opal_connector.cluster.router.prewarm import Prewarm
from opal_connector.cluster.router.server import RouterServer

logger = logging.getLogger(__name__)

_HEALTH_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.05


class RunningCluster:
    """The instances, and the router before them.

    Mutable state: the supervisors by name, in the order in which they were started, who is sent
    nothing until it is ready, and whether it ends. The loop's thread alone uses it, and it must be
    the main one.

    Args:
        config: What to run.
        environ: Where the keys are, and what engines get as their environment.
        sink: Takes the engines' lines; it is closed by whoever made it.

    Raises:
        ConfigError: A key, or a file for TLS, is not there.
    """

    def __init__(
        self, config: ServeConfig, environ: Mapping[str, str] = os.environ, *, sink: LogSink
    ) -> None:
        self.config = config
        self.server = RouterServer(config.router, environ)
        self.supervisors: dict[str, Supervisor] = {}
        self.has_failed = asyncio.Event()
        self._held: set[str] = set()
        self._planner = Planner(config, environ)
        self._sink = sink
        self._guard: Guard | None = None
        self._http: aiohttp.ClientSession | None = None
        self._at_once = asyncio.Event()
        self._scaler: Scaler | None = None
        self._prewarm: Prewarm | None = None
        prewarm = config.file.prewarm
        if config.has_lasting_tier and prewarm.prefixes and prewarm.seconds:
            self._prewarm = Prewarm(self.core, prewarm.prefixes, prewarm.seconds)
        self.core.collectors.append(ServeCollector(self.supervisors, self.counts))

    @property
    def url(self) -> str:
        """Where clients reach the router."""
        return self.server.url

    @property
    def core(self) -> RouterCore:
        """The router's parts."""
        return self.server.core

    async def start(self) -> None:
        """Start everything, and wait for nothing but the router.

        Raises:
            ConfigError: A key is not in the environment.
            OSError: The router's address cannot be listened at, or no process can be started.
        """
        plans = [
            self._planner.plan(settings, number)
            for number, settings in enumerate(self.config.instances, 1)
        ]
        await self.server.start()
        self._guard = Guard()
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_SECONDS))
        for plan in plans:
            self._supervise(plan)
        if self.config.file.scaling.enable_scaling:
            self._scaler = Scaler(self, self._guard, self._sink)
            self._scaler.start()

    async def until_serving(self, count: int | None = None, seconds: float = 600.0) -> None:
        """Wait until so many instances, or all that the file names, take requests.

        Raises:
            TimeoutError: They do not, in that time.
            RuntimeError: All have failed.
        """
        wanted = len(self.config.instances) if count is None else count
        async with asyncio.timeout(seconds):
            while len(self.taking()) < wanted:
                if self.has_failed.is_set():
                    raise RuntimeError("all engines have failed")
                await asyncio.sleep(_POLL_SECONDS)

    def taking(self) -> list[Instance]:
        """The instances that take requests now."""
        now = time.monotonic()
        return [instance for instance in self.core.fleet if instance.is_well(now)]

    def counts(self) -> dict[str, Counter[str]]:
        """What was counted, by part."""
        found: dict[str, Counter[str]] = {}
        if self._scaler is not None:
            found["scaling"] = self._scaler.counts
        if self._prewarm is not None:
            found["prewarm"] = self._prewarm.counts
        return found

    # ---- one more, one less ----

    def add(self) -> str:
        """Start one more instance and return its name.

        It is one that the file names and that is not there, or one that has failed for good, or
        the one with the first number that nobody has: names last, and with them directories.
        """
        number, settings = self._next()
        assert settings.name is not None
        failed = self.core.fleet.get(settings.name)
        if failed is not None:
            self.core.remove(failed)
        self._supervise(self._planner.plan(settings, number))
        return settings.name

    def _next(self) -> tuple[int, InstanceSettings]:
        for number in itertools.count(1):
            named = self.config.instances[number - 1 : number]
            settings = named[0] if named else InstanceSettings(name=instance_name(number))
            assert settings.name is not None
            there = self.supervisors.get(settings.name)
            if there is None or there.state is State.FAILED:
                return number, settings
        raise AssertionError  # there are always more numbers

    async def remove(self, name: str, drain_seconds: float) -> None:
        """Send an instance nothing more, wait so long for what is under way there, and stop it."""
        instance = self.core.fleet.get(name)
        if instance is not None:
            instance.is_draining = True
            self.core.fleet.on_change()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_seconds):
                    while instance.in_flight:
                        await asyncio.sleep(_POLL_SECONDS)
            if self.core.fleet.get(name) is instance:
                self.core.remove(instance)
        # Until it has ended nobody else gets its name, and with it its directory.
        await self.supervisors[name].stop(self.config.file.stop.kill_seconds)
        del self.supervisors[name]
        logger.info("%s is stopped", name)

    # ---- the end ----

    async def stop(self) -> None:
        """Let what is under way end, for a while, and end everything."""
        if self._scaler is not None:
            await self._scaler.close()
        ending = asyncio.create_task(self._end())
        at_once = asyncio.create_task(self._at_once.wait())
        await asyncio.wait([ending, at_once], return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        if not ending.done():
            for supervisor in self.supervisors.values():
                supervisor.kill()
        await ending
        await self.server.close()
        if self._http is not None:
            await self._http.close()
        if self._guard is not None:
            await asyncio.to_thread(self._guard.close)
        self._planner.close()

    def stop_now(self) -> None:
        """Wait for nothing any more."""
        self._at_once.set()

    async def _end(self) -> None:
        seconds = self.config.file.stop.kill_seconds
        serving = [one for one in self.supervisors.values() if one.state is State.SERVING]
        others = [one for one in self.supervisors.values() if one.state is not State.SERVING]
        stopped = [asyncio.create_task(one.stop(seconds)) for one in others]
        drained = asyncio.create_task(self.server.drain())
        at_once = asyncio.create_task(self._at_once.wait())
        await asyncio.wait(
            [drained, at_once],
            timeout=self.config.file.stop.drain_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for task in (drained, at_once):
            task.cancel()
        if self._at_once.is_set():
            seconds = 0.0
        await self.core.health.close()  # that they end is no news now
        await asyncio.gather(*stopped, *(one.stop(seconds) for one in serving))

    # ---- what becomes of engines ----

    async def is_healthy(self, plan: InstancePlan) -> bool:
        """Whether its server answers that it is well."""
        assert self._http is not None
        try:
            async with self._http.get(f"{plan.url}/health") as answer:
                return answer.status < 300
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    def is_silent(self, plan: InstancePlan) -> bool:
        """Whether the router takes it for dead."""
        instance = self.core.fleet.get(plan.name)
        return instance is not None and instance.health is Health.DEAD

    async def on_ready(self, plan: InstancePlan) -> None:
        """Let the router know it, and send it requests."""
        instance = self.core.fleet.get(plan.name)
        if instance is None:
            self._held.add(plan.name)
            instance = await self.core.add(plan.router, is_held=True)
        else:
            await self.core.health.check(instance)
        if self._prewarm is not None and instance.health is Health.UP:
            try:
                await self._prewarm.warm(instance)
            except Exception:  # one that is cold serves as well
                logger.exception("%s could not be warmed", plan.name)
        if plan.name in self._held:  # else an administrator has it drained
            self._held.discard(plan.name)
            instance.is_draining = False
        self.core.fleet.on_change()

    def on_end(self, plan: InstancePlan) -> None:
        """The router need not find out by itself."""
        instance = self.core.fleet.get(plan.name)
        if instance is not None:
            if not instance.is_draining:
                self._held.add(plan.name)
            instance.is_draining = True  # until it is ready again
            self.core.health.died(instance)

    def on_failed(self, plan: InstancePlan) -> None:
        """There may be nobody left."""
        self.on_end(plan)
        names = self.supervisors.keys()
        others = [one for one in self.core.fleet if one.name not in names]
        if not others and not any(one.is_active for one in self.supervisors.values()):
            self.has_failed.set()

    def _supervise(self, plan: InstancePlan) -> None:
        assert self._guard is not None
        if self._planner.files.directory is not None:
            self._guard.remove(self._planner.files.directory)
        supervisor = Supervisor(
            plan, self.config.file.restart, self, guard=self._guard, sink=self._sink
        )
        self.supervisors[plan.name] = supervisor
        supervisor.start()


@contextlib.asynccontextmanager
async def cluster(
    config: ServeConfig,
    environ: Mapping[str, str] = os.environ,
    *,
    sink: LogSink | None = None,
) -> AsyncIterator[RunningCluster]:
    """Runs a cluster for the length of an `async with` block, which begins when the router listens.

    Whatever happens, nothing of it is left behind. Without a sink the engines' lines go nowhere.
    """
    own = sink or LogSink()
    try:
        running = RunningCluster(config, environ, sink=own)
        try:
            await running.start()
            yield running
        finally:
            await running.stop()
    finally:
        if sink is None:
            await asyncio.to_thread(own.close)
