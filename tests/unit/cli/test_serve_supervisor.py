"""What a supervisor does about an engine that misbehaves; the rest is seen with whole clusters."""

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from serve_world import lives

from opal_connector.cli.serving.guard import Guard
from opal_connector.cli.serving.log_sink import LogSink
from opal_connector.cli.serving.plans import InstancePlan
from opal_connector.cli.serving.schema import RestartSettings
from opal_connector.cli.serving.supervisor import State, Supervisor
from opal_connector.cluster.router.config import InstanceConfig

RESTING = "import time; time.sleep(600)"


class Surroundings:
    """Writes down what it is told."""

    def __init__(self, *, is_well: bool = True, fault: Exception | None = None) -> None:
        self.told: list[str] = []
        self._is_well = is_well
        self._fault = fault

    async def is_healthy(self, plan: InstancePlan) -> bool:
        return self._is_well

    def is_silent(self, plan: InstancePlan) -> bool:
        return False

    async def on_ready(self, plan: InstancePlan) -> None:
        self.told.append("ready")
        if self._fault is not None:
            raise self._fault

    def on_end(self, plan: InstancePlan) -> None:
        self.told.append("end")

    def on_failed(self, plan: InstancePlan) -> None:
        self.told.append("failed")


def supervised(
    surroundings: Surroundings,
    settings: RestartSettings,
    check: Callable[[Supervisor], Any],
    script: str = RESTING,
) -> None:
    """Runs an engine, and a check of its supervisor."""
    plan = InstancePlan(
        "one", 1, (sys.executable, "-c", script), {}, InstanceConfig(url="http://127.0.0.1:1")
    )

    async def body() -> None:
        guard, sink = Guard(), LogSink()
        made = Supervisor(plan, settings, surroundings, guard=guard, sink=sink)
        try:
            made.start()
            await check(made)
        finally:
            await made.stop(1.0)
            guard.close()
            sink.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(body(), 30))


async def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_an_engine_that_cannot_be_admitted_does_not_run_on_unseen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fault of our own is said with its traceback, and the engine is not left to itself."""
    surroundings = Surroundings(fault=ValueError("it is there already"))

    async def check(made: Supervisor) -> None:
        await eventually(lambda: made.pid is not None)
        pid = made.pid
        await eventually(lambda: made.state is State.FAILED)
        assert surroundings.told == ["ready", "failed"]
        assert pid is not None
        await eventually(lambda: not lives(pid))

    supervised(surroundings, RestartSettings(), check)
    (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "one is not watched any more" in said.getMessage()
    assert said.exc_info is not None


def test_an_engine_that_never_becomes_healthy_is_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is given its time, killed, and in the end given up; nobody was told that it was ready."""
    surroundings = Surroundings(is_well=False)
    settings = RestartSettings(ready_seconds=0.05, first_seconds=0.01, jitter=0, limit=1)

    async def check(made: Supervisor) -> None:
        await eventually(lambda: made.state is State.FAILED)
        assert made.restarts == 1
        assert made.pid is None
        assert surroundings.told == ["failed"]

    supervised(surroundings, settings, check)
    assert "was not healthy within" in caplog.text


def test_stopping_while_it_waits_to_be_started_again_starts_nothing() -> None:
    """The end does not wait for a backoff."""
    surroundings = Surroundings(is_well=False)
    settings = RestartSettings(first_seconds=60, longest_seconds=60, jitter=0)

    async def check(made: Supervisor) -> None:
        await eventually(lambda: made.state is State.WAITING)
        began = time.monotonic()
        await made.stop(1.0)
        assert time.monotonic() - began < 5
        assert made.state is State.STOPPED
        assert made.pid is None

    supervised(surroundings, settings, check, script="raise SystemExit(1)")
