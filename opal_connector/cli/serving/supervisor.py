"""Keeps the engine of one instance running: starts it, watches it, starts it again."""

import asyncio
import logging
import time
from enum import StrEnum
from typing import Final, Protocol

from opal_connector.cli.serving.backoff import Backoff
from opal_connector.cli.serving.engine_process import EngineProcess
from opal_connector.cli.serving.guard import Guard
from opal_connector.cli.serving.log_sink import LogSink
from opal_connector.cli.serving.plans import InstancePlan
from opal_connector.cli.serving.schema import RestartSettings

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.2
_WATCH_SECONDS: Final = 1.0


class State(StrEnum):
    """What an instance's engine does; `waiting` to be started again, `failed` for good."""

    STARTING = "starting"
    SERVING = "serving"
    WAITING = "waiting"
    FAILED = "failed"
    STOPPED = "stopped"


class Surroundings(Protocol):
    """Who is told what becomes of an engine, and can be asked how it does."""

    async def is_healthy(self, plan: InstancePlan) -> bool:
        """Whether its server answers that it is well."""

    def is_silent(self, plan: InstancePlan) -> bool:
        """Whether it has not answered for a while, although it did before."""

    async def on_ready(self, plan: InstancePlan) -> None:
        """It is healthy for the first time since it was started."""

    def on_end(self, plan: InstancePlan) -> None:
        """Its process has ended after it was healthy."""

    def on_failed(self, plan: InstancePlan) -> None:
        """It is not started again."""


class Supervisor:
    """One instance's engine.

    Mutable state: what it does, its process, how often it was started again. The loop's thread
    alone uses it.
    """

    def __init__(
        self,
        plan: InstancePlan,
        settings: RestartSettings,
        surroundings: Surroundings,
        *,
        guard: Guard,
        sink: LogSink,
    ) -> None:
        self.plan = plan
        self.state = State.STARTING
        self.restarts = 0
        self._settings = settings
        self._surroundings = surroundings
        self._guard = guard
        self._sink = sink
        self._backoff = Backoff(settings)
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The engine's process, while there is one."""
        process = self._process
        return None if process is None or process.has_ended else process.pid

    @property
    def is_active(self) -> bool:
        """Whether it serves, or will."""
        return self.state in (State.STARTING, State.SERVING, State.WAITING)

    def start(self) -> None:
        """Start it, and see to it from now on."""
        self._task = asyncio.create_task(self._run(), name=f"supervisor of {self.plan.name}")
        self._task.add_done_callback(self._on_done)

    async def stop(self, seconds: float) -> None:
        """Stop it: a request, and after so many seconds by force."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if self.state is not State.FAILED:
            self.state = State.STOPPED
        if self._process is not None:
            await self._process.stop(seconds)

    def kill(self) -> None:
        """End its processes at once; whoever waits for them goes on."""
        if self._process is not None:
            self._process.kill()

    # ---- inside ----

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled() or task.exception() is None:
            return
        logger.error("%s is not watched any more", self.plan.name, exc_info=task.exception())
        self._give_up()

    async def _run(self) -> None:
        while True:
            self.state = State.STARTING
            code, served_seconds = await self._run_once()
            wait = self._backoff.next_wait(served_seconds)
            if wait is None:
                logger.error(
                    "%s HAS FAILED: it ended %d times in a row, the last time %s, and stays down; "
                    "the others go on. The end of its log:\n%s",
                    self.plan.name,
                    self._backoff.failures,
                    _ending(code),
                    self._sink.tail(self.plan.name),
                )
                self._give_up()
                return
            self.state = State.WAITING
            logger.warning(
                "%s ended %s and is started again in %.1f s", self.plan.name, _ending(code), wait
            )
            await asyncio.sleep(wait)
            self.restarts += 1

    def _give_up(self) -> None:
        self.state = State.FAILED
        self.kill()
        self._surroundings.on_failed(self.plan)

    async def _run_once(self) -> tuple[int | None, float]:
        """Its exit code, None where it could not be started, and how long it has served."""
        plan, served_seconds = self.plan, 0.0
        try:
            process = self._process = EngineProcess(
                plan.command, plan.environment, self._guard, self._take_line
            )
        except OSError as error:
            logger.warning("%s cannot be started: %s", plan.name, error.strerror)
            return None, served_seconds
        logger.info("%s is started at %s (process %d)", plan.name, plan.url, process.pid)
        began = time.monotonic()
        if await self._until_healthy(process):
            logger.info("%s was ready after %.1f s", plan.name, time.monotonic() - began)
            self.state = State.SERVING
            began = time.monotonic()
            await self._while_it_serves(process)
            self._surroundings.on_end(plan)
            served_seconds = time.monotonic() - began
        process.kill()
        return await process.clear(), served_seconds

    def _take_line(self, text: str) -> None:
        self._sink.line(self.plan.name, text)

    async def _until_healthy(self, process: EngineProcess) -> bool:
        """Wait for it; whether it became healthy before it ended or took too long."""
        deadline = time.monotonic() + self._settings.ready_seconds
        while not process.has_ended:
            if await self._surroundings.is_healthy(self.plan):
                return not process.has_ended
            if time.monotonic() > deadline:
                logger.error(
                    "%s was not healthy within %.0f s", self.plan.name, self._settings.ready_seconds
                )
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return False

    async def _while_it_serves(self, process: EngineProcess) -> None:
        """Until its end, which is brought about where it lives and says nothing any more."""
        admitted = asyncio.create_task(self._surroundings.on_ready(self.plan))
        ended = asyncio.create_task(process.wait())
        silent_since: float | None = None
        try:
            while not ended.done() and not _has_failed(admitted):
                await asyncio.wait([ended], timeout=_WATCH_SECONDS)
                if not self._surroundings.is_silent(self.plan):
                    silent_since = None
                    continue
                now = time.monotonic()
                silent_since = silent_since or now
                if now - silent_since >= self._settings.hung_seconds and not ended.done():
                    logger.error(
                        "%s lives and has not answered for %.0f s: it is killed",
                        self.plan.name,
                        now - silent_since,
                    )
                    process.kill()
        finally:
            for task in (admitted, ended):
                task.cancel()
            await asyncio.wait([admitted, ended])
        if _has_failed(admitted):
            admitted.result()


def _has_failed(task: "asyncio.Task[None]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


def _ending(code: int | None) -> str:
    if code is None:
        return "before it began"
    return f"by signal {-code}" if code < 0 else f"with code {code}"
