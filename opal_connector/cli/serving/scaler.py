"""Starts and stops instances as the queues want it, or tells a command to."""

import asyncio
import logging
import os
import shlex
import time
from collections import Counter
from typing import Final, Protocol

from opal_connector.cli.serving.engine_process import EngineProcess
from opal_connector.cli.serving.guard import Guard
from opal_connector.cli.serving.log_sink import LogSink
from opal_connector.cli.serving.scaling import Scaling
from opal_connector.cli.serving.schema import ServeConfig
from opal_connector.cli.serving.supervisor import Supervisor
from opal_connector.cluster.router.core import RouterCore

logger = logging.getLogger(__name__)

_TICK_SECONDS: Final = 1.0
_COMMAND_NAME: Final = "scale"


class Scaled(Protocol):
    """What is scaled."""

    config: ServeConfig
    supervisors: dict[str, Supervisor]

    @property
    def core(self) -> RouterCore:
        """The router's parts."""

    def add(self) -> str:
        """Start one more and return its name."""

    async def remove(self, name: str, drain_seconds: float) -> None:
        """Let one end what is under way there, and stop it."""


class Scaler:
    """Looks at the queues every second.

    Mutable state: its task, who is leaving, counters. The loop's thread alone uses it.
    """

    def __init__(self, scaled: Scaled, guard: Guard, sink: LogSink) -> None:
        self._scaled = scaled
        self._guard = guard
        self._sink = sink
        self._settings = scaled.config.file.scaling
        self._scaling = Scaling(self._settings, scaled.config.least_instances)
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._command: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """Look from now on."""
        self._task = asyncio.create_task(self._run(), name="scaler")
        self._task.add_done_callback(_report)

    async def close(self) -> None:
        """Look no more. Whoever is leaving is left to whoever stops all."""
        tasks = [*self._leaving.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._command is not None:
            await self._command.stop(0.0)

    # ---- inside ----

    @property
    def _is_elsewhere(self) -> bool:
        return self._settings.scale_command is not None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                await self.look(time.monotonic())
            except Exception:
                # What failed once, such as a port that was not free, need not fail again.
                logger.exception("the number of instances could not be changed")

    async def look(self, now: float) -> None:
        """Change the number of instances, where that is due."""
        core = self._scaled.core
        requests = sum(one.in_flight for one in core.fleet) + core.admission.waiting
        instances = len(self._instances())
        wanted = self._scaling.wanted(now, requests=requests, instances=instances)
        if wanted == instances:
            return
        direction = "up" if wanted > instances else "down"
        self.counts[direction] += 1
        logger.info(
            "%d requests for %d instances: scaling %s to %d", requests, instances, direction, wanted
        )
        if self._is_elsewhere:
            await self._tell(wanted, direction)
        elif direction == "up":
            await self._more()
        else:
            self._less()

    def _instances(self) -> list[str]:
        """Those that serve or will: our own, and where others scale, those that they added."""
        supervisors = self._scaled.supervisors
        names = [
            name
            for name, supervisor in supervisors.items()
            if supervisor.is_active and name not in self._leaving
        ]
        if self._is_elsewhere:
            names += [
                one.name
                for one in self._scaled.core.fleet
                if one.name not in supervisors and not one.is_draining
            ]
        return names

    async def _more(self) -> None:
        """Have one stay that is leaving, or start another one."""
        fleet = self._scaled.core.fleet
        for name, task in self._leaving.items():
            instance = fleet.get(name)
            if instance is None:
                continue  # it is being stopped already
            task.cancel()
            await asyncio.wait([task])
            instance.is_draining = False
            fleet.on_change()
            logger.info("%s stays", name)
            return
        self._scaled.add()

    def _less(self) -> None:
        """Have the one leave that was started last."""
        name = self._instances()[-1]
        task = asyncio.create_task(self._scaled.remove(name, self._settings.drain_seconds))
        self._leaving[name] = task
        task.add_done_callback(lambda _: self._leaving.pop(name, None))
        task.add_done_callback(_report)

    async def _tell(self, wanted: int, direction: str) -> None:
        given = self._settings.scale_command
        assert given is not None
        words = shlex.split(given) if isinstance(given, str) else list(given)
        environment = {
            **os.environ,
            "OPAL_SCALE_WANTED": str(wanted),
            "OPAL_SCALE_DIRECTION": direction,
        }
        try:
            command = self._command = EngineProcess(
                [*words, str(wanted), direction],
                environment,
                self._guard,
                lambda line: self._sink.line(_COMMAND_NAME, line),
            )
        except OSError as error:
            self.counts["command_failed"] += 1
            logger.error("scale_command cannot be started: %s", error.strerror)
            return
        try:
            async with asyncio.timeout(self._settings.command_seconds):
                await command.wait()
        except TimeoutError:
            logger.error("scale_command took longer than command_seconds and is ended")
        code = await command.stop(0.0)
        self._command = None
        if code:
            self.counts["command_failed"] += 1
            logger.error("scale_command ended with code %d", code)


def _report(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("%s has failed", task.get_name(), exc_info=task.exception())
