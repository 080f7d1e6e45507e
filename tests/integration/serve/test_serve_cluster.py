"""A cluster of engines that are real processes: served, restarted, scaled, never left behind."""

import asyncio
import os
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from router_world import eventually
from serve_world import environment, fake_cluster, lives, pids

from opal_connector.cli.serving.log_sink import LogSink
from opal_connector.cli.serving.plans import InstancePlan
from opal_connector.cli.serving.running import RunningCluster, cluster
from opal_connector.cli.serving.scaler import Scaler
from opal_connector.cli.serving.supervisor import State
from opal_connector.cluster.router.instances import Health

TOKENS = list(range(64))


def run(body: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(body, 60))


async def ask(running: RunningCluster, **more: Any) -> tuple[int, str | None]:
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{running.url}/v1/completions", json={"prompt": TOKENS, **more}) as answer,
    ):
        await answer.read()
        return answer.status, answer.headers.get("X-Opal-Worker")


async def status_of(running: RunningCluster, path: str) -> int:
    async with aiohttp.ClientSession() as client, client.get(running.url + path) as answer:
        return answer.status


def test_the_router_answers_at_once_and_engines_come_to_it(tmp_path: Path) -> None:
    """Somebody who asks too early is told to wait; both engines serve with their tiers' events."""

    async def body() -> None:
        async with cluster(fake_cluster(tmp_path)) as running:
            assert await status_of(running, "/health") == 200
            assert await status_of(running, "/ready") == 503
            assert await ask(running) == (503, None)
            await running.until_serving(seconds=30)
            assert await status_of(running, "/ready") == 200
            assert (await ask(running))[0] == 200
            workers = running.core.index.workers
            await eventually(lambda: {*workers} == {"engine-1", "engine-2"}, "their events")
            children = pids(running)
            assert len(children) == 2
        assert not any(map(lives, children))

    run(body())


def test_an_engine_that_is_killed_comes_back_and_is_used_again(tmp_path: Path) -> None:
    """Its end is known at once, what it had in memory is forgotten, requests go on elsewhere."""

    async def body() -> None:
        async with cluster(fake_cluster(tmp_path)) as running:
            await running.until_serving(seconds=30)
            victim = running.supervisors["engine-1"]
            killed = victim.pid
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            instance = running.core.fleet.get("engine-1")
            assert instance is not None
            await eventually(lambda: instance.health is Health.DEAD, "its death")
            assert [await ask(running) for _ in range(4)] == [(200, "engine-2")] * 4
            await running.until_serving(seconds=30)
            assert victim.restarts == 1
            assert victim.pid not in (None, killed)
            running.core.router.set_policy("RoundRobin")
            found = {(await ask(running))[1] for _ in range(2)}
            assert found == {"engine-1", "engine-2"}

    run(body())


def test_what_an_administrator_has_drained_stays_so_when_its_engine_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That an engine was started again is no reason to send it requests."""

    async def body() -> None:
        async with cluster(fake_cluster(tmp_path)) as running:
            await running.until_serving(seconds=30)
            drained = running.core.fleet.get("engine-1")
            assert drained is not None
            assert await running.core.drain(drained)
            ready: list[str] = []
            on_ready = running.on_ready

            async def noted(plan: InstancePlan) -> None:
                await on_ready(plan)
                ready.append(plan.name)

            monkeypatch.setattr(running, "on_ready", noted)
            for pid in pids(running):
                os.kill(pid, signal.SIGKILL)
            await eventually(lambda: len(ready) == 2, "both engines")
            assert drained.health is Health.UP
            assert [one.name for one in running.taking()] == ["engine-2"]
            drained.is_draining = False  # as `resume` does
            assert len(running.taking()) == 2

    run(body())


def test_requests_at_an_engine_that_dies_are_answered_by_another(tmp_path: Path) -> None:
    """Nobody who has not had a byte yet sees it."""

    async def body() -> None:
        config = fake_cluster(tmp_path, environment={"FAKE_TOKEN_SECONDS": 0.3})
        async with cluster(config) as running:
            await running.until_serving(seconds=30)
            running.core.router.set_policy("RoundRobin")
            under_way = [asyncio.create_task(ask(running, max_tokens=2)) for _ in range(8)]
            victim = running.core.fleet.get("engine-1")
            assert victim is not None
            await eventually(lambda: victim.in_flight == 4, "half of them there")
            pid = running.supervisors["engine-1"].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            answers = await asyncio.gather(*under_way)
            assert [status for status, _ in answers] == [200] * 8
            retries = [
                n for (event, _), n in running.core.forwarder.counts.items() if event == "retry"
            ]
            assert sum(retries) == 4

    run(body())


def test_an_engine_that_cannot_start_is_given_up_and_the_other_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said loudly, with the engine's own last words, and stops nobody else."""
    instances = [{"name": "good"}, {"name": "bad", "environment": {"FAKE_DIES": "1"}}]

    async def body() -> None:
        restart = {"first_seconds": 0.01, "longest_seconds": 0.02, "limit": 2}
        config = fake_cluster(tmp_path, instances=instances, restart=restart)
        async with cluster(config) as running:
            bad = running.supervisors["bad"]
            await eventually(lambda: bad.state is State.FAILED, "its failure")
            await running.until_serving(1, seconds=30)
            assert await ask(running) == (200, "good")
            assert bad.restarts == 2
            assert not running.has_failed.is_set()

    run(body())
    said = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 1
    assert "bad HAS FAILED: it ended 3 times in a row" in said[0].getMessage()
    assert "it dies at once" in said[0].getMessage()


def test_when_all_engines_have_failed_that_is_known(tmp_path: Path) -> None:
    """Whoever runs the cluster need not wait for ever."""

    async def body() -> None:
        restart = {"first_seconds": 0.01, "longest_seconds": 0.02, "limit": 0}
        config = fake_cluster(tmp_path, environment={"FAKE_DIES": 1}, restart=restart)
        async with cluster(config) as running:
            with pytest.raises(RuntimeError, match="all engines have failed"):
                await running.until_serving(seconds=30)

    run(body())


def test_an_engine_that_ignores_the_request_to_end_is_killed_with_its_children(
    tmp_path: Path,
) -> None:
    """The end takes seconds, whatever engines do."""
    child_file = tmp_path / "child"

    async def body() -> list[int]:
        config = fake_cluster(
            tmp_path,
            instances=1,
            environment={"FAKE_DEAF": 1, "FAKE_CHILD": str(child_file)},
            stop={"drain_seconds": 0.1, "kill_seconds": 0.2},
        )
        async with cluster(config) as running:
            await running.until_serving(seconds=30)
            found = [*pids(running), int(child_file.read_text())]
            assert all(map(lives, found))
            began = time.monotonic()
        assert time.monotonic() - began < 5
        assert not any(map(lives, found))

    run(body())


def test_lines_have_their_engines_names_and_go_to_files_too(tmp_path: Path) -> None:
    """Whose line it is can be seen, and read later."""

    async def body() -> None:
        config = fake_cluster(tmp_path, environment={"FAKE_FIRST_LINE": "I am {name}"})
        out = (tmp_path / "out").open("w+")
        sink = LogSink(out, directory=tmp_path / "logs")
        async with cluster(config, sink=sink) as running:
            await running.until_serving(seconds=30)
        sink.close()
        out.seek(0)
        text = out.read()
        assert {"engine-1 | I am engine-1", "engine-2 | I am engine-2"} <= {*text.splitlines()}
        assert (tmp_path / "logs" / "engine-1.log").read_text() == "I am engine-1\n"

    run(body())


def test_instances_come_and_go_with_the_queue(tmp_path: Path) -> None:
    """A long queue brings one more that is used; when it is short again, the last one leaves."""
    scaling = {
        "enable_scaling": True,
        "max_queue_threshold": 2,
        "scale_latency": 0,
        "max_workers": 2,
        "quiet_seconds": 0.1,
    }

    async def body() -> None:
        config = fake_cluster(
            tmp_path, instances=1, environment={"FAKE_TOKEN_SECONDS": 1.0}, scaling=scaling
        )
        async with cluster(config, environment()) as running:
            await running.until_serving(seconds=30)
            running.core.router.set_policy("LeastLoaded")
            under_way = [asyncio.create_task(ask(running, max_tokens=5)) for _ in range(3)]
            await running.until_serving(2, seconds=30)
            assert (await ask(running, max_tokens=1))[1] == "engine-2"
            assert [status for status, _ in await asyncio.gather(*under_way)] == [200] * 3
            pid = running.supervisors["engine-2"].pid
            assert pid is not None
            await eventually(lambda: "engine-2" not in running.supervisors, "one less")
            await eventually(lambda: not lives(pid), "its end")
            assert [one.name for one in running.core.fleet] == ["engine-1"]
            counts = running.counts()["scaling"]
            assert (counts["up"], counts["down"]) == (1, 1)

    run(body())


def test_a_command_is_told_the_wanted_number_where_somebody_else_scales(tmp_path: Path) -> None:
    """It gets number and direction as arguments and in its environment; nothing is started here."""
    said = tmp_path / "said"
    script = f'echo "$1 $2 $OPAL_SCALE_WANTED $OPAL_SCALE_DIRECTION" >> {said}'
    scaling = {
        "enable_scaling": True,
        "max_queue_threshold": 1,
        "scale_latency": 30,
        "scale_command": ["sh", "-c", script, "hook"],
    }

    async def body() -> None:
        config = fake_cluster(
            tmp_path, instances=1, environment={"FAKE_TOKEN_SECONDS": 1.0}, scaling=scaling
        )
        async with cluster(config) as running:
            assert running._guard is not None
            scaler = Scaler(running, running._guard, running._sink)
            await scaler.look(0)
            assert not scaler.counts  # our own that are starting count, although nobody asks them
            await running.until_serving(seconds=30)
            under_way = [asyncio.create_task(ask(running, max_tokens=3)) for _ in range(3)]
            await eventually(said.exists, "the command")
            await asyncio.gather(*under_way)
            assert len(running.supervisors) == 1

    run(body())
    assert said.read_text() == "2 up 2 up\n"


def test_an_engine_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    """One that lives and answers nobody is as good as dead."""

    async def body() -> None:
        restart = {"first_seconds": 0.05, "jitter": 0.0, "hung_seconds": 0.3}
        async with cluster(fake_cluster(tmp_path, restart=restart)) as running:
            await running.until_serving(seconds=30)
            victim = running.supervisors["engine-2"]
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGSTOP)
            await eventually(lambda: victim.restarts == 1, "its restart")
            await running.until_serving(seconds=30)

    run(body())


def test_names_last_so_that_directories_are_found_again(tmp_path: Path) -> None:
    """Who comes is first one that the file names, with what it has of its own; a failed one too."""
    instances = [{"name": "left"}, {"name": "right", "environment": {"FAKE_FIRST_LINE": "right"}}]

    async def body() -> None:
        async with cluster(fake_cluster(tmp_path, instances=instances)) as running:
            await running.until_serving(seconds=30)
            await running.remove("right", drain_seconds=1)
            assert [*running.supervisors] == ["left"]
            assert (running.add(), running.add()) == ("right", "engine-3")
            again = running.supervisors["right"].plan
            assert again.environment["FAKE_FIRST_LINE"] == "right"
            await running.until_serving(3, seconds=30)
            running.supervisors["right"].state = State.FAILED
            running.supervisors["right"].kill()
            assert running.add() == "right"

    run(body())


def test_one_that_is_leaving_stays_when_the_queue_grows_again(tmp_path: Path) -> None:
    """That is faster than to start another one."""
    scaling = {
        "max_queue_threshold": 2,
        "scale_latency": 0,
        "min_workers": 1,
        "max_workers": 2,
        "quiet_seconds": 0.0,
        "scale_in_share": 1.0,
    }

    async def body() -> None:
        environment = {"FAKE_TOKEN_SECONDS": 0.5}
        config = fake_cluster(tmp_path, scaling=scaling, environment=environment)
        async with cluster(config) as running:
            await running.until_serving(seconds=30)
            running.core.router.set_policy("RoundRobin")
            pids_before = pids(running)
            assert running._guard is not None
            scaler = Scaler(running, running._guard, running._sink)
            instance = running.core.fleet.get("engine-2")
            assert instance is not None
            long = [asyncio.create_task(ask(running, max_tokens=12)) for _ in range(2)]
            await eventually(lambda: instance.in_flight, "a request there")
            await scaler.look(0)
            await eventually(lambda: instance.is_draining, "its leave")
            more = [asyncio.create_task(ask(running, max_tokens=6)) for _ in range(3)]
            await eventually(lambda: running.core.forwarder.under_way == 5, "more requests")
            await scaler.look(1)
            assert not instance.is_draining
            assert [status for status, _ in await asyncio.gather(*long, *more)] == [200] * 5
            assert pids(running) == pids_before
            await scaler.close()

    run(body())
