"""Several processes behind one port: what one sends the others count, and one loss is no loss."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_engine import BLOCK_TOKENS, FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from router_world import PATIENCE_SECONDS, QUICK, run

from opal_connector.cluster.router.peer_messages import Began, Standing
from opal_connector.cluster.router.peers import Peers

START_SECONDS = 60.0


def prompts(count: int) -> list[list[int]]:
    chosen = random.Random(5)
    return [[chosen.randrange(1_000) for _ in range(4 * BLOCK_TOKENS)] for _ in range(count)]


class Running:
    """`opal router` with several processes."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    async def ask(self, tokens: list[int], **more: Any) -> tuple[int, str | None, str]:
        """By a connection of its own, so that any process may take it."""
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{self.url}/v1/completions", json={"prompt": tokens, **more}) as answer,
        ):
            return answer.status, answer.headers.get("X-Opal-Worker"), await answer.text()

    async def get(self, path: str, method: str = "GET", **more: Any) -> Any:
        async with (
            aiohttp.ClientSession() as client,
            client.request(method, self.url + path, **more) as answer,
        ):
            text = await answer.text()
            return json.loads(text) if "json" in answer.content_type else text

    async def samples(self, name: str) -> dict[str, float]:
        """The samples of a figure, by process."""
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(await self.get("/metrics")):
            for sample in family.samples:
                if sample.name == name:
                    found[sample.labels["process"]] += sample.value
        return found

    def children(self) -> list[int]:
        """The pids of the processes that serve."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                command = (path.parent / "cmdline").read_bytes()
                if int(fields[1]) == self.process.pid and b"spawn_main" in command:
                    found.append(int(path.parent.name))
        return found


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path, *engines: FakeEngine, count: int = 2, **changes: Any
) -> AsyncIterator[Running]:
    """Engines here, and the router in processes of its own."""
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.close)
        config = {**QUICK, "instances": [engine.config() for engine in engines], **changes}
        (tmp_path / "router.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "opal_connector.cli.main", "router"]
        command += ["--config", str(tmp_path / "router.json"), "--workers", str(count)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
            found = re.search(rb"Serving at (\S+) with", line)
            assert found, line
            made = Running(process, found[1].decode())
            await until(made, lambda: _is_followed(made, len(engines) * count))
            yield made
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def until(here: Running, condition: Any, what: str = "it") -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, f"waited in vain for {what}"
        assert here.process.returncode is None
        await asyncio.sleep(0.02)


async def _is_followed(here: Running, sources: int) -> bool:
    live = 0.0
    for family in text_string_to_metric_families(await here.get("/metrics")):
        if family.name == "opal_router_source_state":
            live += sum(sample.labels["state"] == "live" for sample in family.samples)
    return live == sources


def test_requests_reach_all_processes_and_their_figures_are_told_apart(tmp_path: Path) -> None:
    async def body() -> None:
        async with running(tmp_path, FakeEngine("one"), FakeEngine("two")) as here:
            answers = await asyncio.gather(*(here.ask(tokens) for tokens in prompts(60)))
            assert Counter(status for status, _, _ in answers) == {200: 60}
            counted = await here.samples("opal_router_decisions_total")
            assert set(counted) == {"0", "1"}
            assert sum(counted.values()) == 60

            async def is_shown() -> bool:
                state = await here.get("/dashboard/state")
                return bool(state["since_start"]["requests"] == 60 and not state["under_way"])

            await until(here, is_shown, "the page to show all requests, whoever sent them")
            pages = [await here.get("/dashboard/state") for _ in range(12)]
            assert len({page["process"] for page in pages}) == 1

    run(body())


def test_what_one_process_has_sent_all_of_them_count(tmp_path: Path) -> None:
    """Eight long requests, by many connections: each engine gets its half, whoever sent them."""

    async def body() -> None:
        engines = [FakeEngine("one"), FakeEngine("two")]
        for engine in engines:
            engine.step = asyncio.Semaphore(0)
        async with running(tmp_path, *engines, policy="LeastLoaded") as here:
            tasks = []
            for place, tokens in enumerate(prompts(8)):
                asked = here.ask(tokens, stream=True, max_tokens=1)
                tasks.append(asyncio.create_task(asked))

                async def came(wanted: int = place + 1) -> bool:
                    state = await here.get("/admin/state")
                    loads = [one["load"]["requests"] for one in state["workers"].values()]
                    return sum(loads) == wanted

                await until(here, came, f"{place + 1} requests to be counted")
            state = await here.get("/admin/state")
            loads = {name: one["load"]["requests"] for name, one in state["workers"].items()}
            assert loads == {"one": 4, "two": 4}
            for engine in engines:
                assert engine.step is not None
                for _ in range(100):
                    engine.step.release()
            await asyncio.gather(*tasks)

    run(body())


def test_sessions_are_those_of_all_processes(tmp_path: Path) -> None:
    async def body() -> None:
        engines = [FakeEngine("one"), FakeEngine("two"), FakeEngine("three")]
        async with running(
            tmp_path, *engines, policy="RoundRobin", affinity={"mode": "hard"}
        ) as here:
            chosen = [(await here.ask(tokens, user="somebody"))[1] for tokens in prompts(20)]
            assert len(set(chosen)) == 1

    run(body())


def test_a_process_that_is_killed_is_started_again_and_knows_what_an_administrator_wanted(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        engines = [FakeEngine("one"), FakeEngine("two")]
        third = await FakeEngine("three").start()
        async with running(tmp_path, *engines) as here:
            await here.get("/admin/instances", "POST", json=third.config())
            await here.get("/admin/policy", "POST", json={"policy": "RoundRobin"})
            await here.get("/admin/instances?name=one&now=true", "DELETE")

            async def is_known() -> bool:
                found = text_string_to_metric_families(await here.get("/metrics"))
                return {
                    (sample.labels["process"], sample.labels["instance"])
                    for family in found
                    for sample in family.samples
                    if sample.name == "opal_router_instance_takes_requests" and sample.value
                } == {("0", "two"), ("0", "three"), ("1", "two"), ("1", "three")}

            await until(here, is_known, "both to know both instances")
            for pid in here.children():  # each once: the first one, too, which administrators ask
                before = here.children()
                os.kill(pid, signal.SIGKILL)

                async def is_back(before: list[int] = before) -> bool:
                    with contextlib.suppress(aiohttp.ClientError):
                        now = here.children()
                        return len(now) == 2 and now != before and await is_known()
                    return False

                await until(here, is_back, "the process to be back")
                assert (await here.get("/admin/state"))["policy"] == "RoundRobin"
            answers = await asyncio.gather(*(here.ask(tokens) for tokens in prompts(12)))
            assert Counter(worker for _, worker, _ in answers).keys() == {"two", "three"}
        await third.close()

    run(body())


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_processes_after_what_is_under_way(
    tmp_path: Path, end: signal.Signals
) -> None:
    async def body() -> None:
        engine = FakeEngine("one")
        engine.step = asyncio.Semaphore(0)
        async with running(tmp_path, engine) as here:
            asked = asyncio.create_task(here.ask(prompts(1)[0], stream=True, max_tokens=1))

            async def came() -> bool:
                return engine.running == 1

            await until(here, came, "the request")
            children = here.children()
            assert len(children) == 2
            here.process.send_signal(end)
            await asyncio.sleep(0)
            for _ in range(100):
                engine.step.release()
            assert (await asked)[0] == 200
            assert await asyncio.wait_for(here.process.wait(), PATIENCE_SECONDS) == 0
            assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]

    run(body())


def test_when_the_parent_is_killed_its_processes_end(tmp_path: Path) -> None:
    async def body() -> None:
        async with running(tmp_path, FakeEngine("one")) as here:
            children = here.children()
            here.process.kill()
            await here.process.wait()
            deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
            while any(_lives(pid) for pid in children):
                assert asyncio.get_running_loop().time() < deadline, "they live"
                await asyncio.sleep(0.02)

    run(body())


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return (Path(f"/proc/{pid}") / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class Heard:
    """Books of a process that does nothing but speak and listen."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told
        self.heard: list[Any] = []
        self.lost = 0

    def standing(self) -> list[Any]:
        return list(self.told)

    def hear(self, peer: int, message: Any) -> None:
        self.heard.append((peer, message))

    def lose(self, peer: int) -> None:
        self.lost += 1
        self.heard.clear()


def test_who_comes_later_is_told_everything_that_counts(tmp_path: Path) -> None:
    """And who comes again forgets what its predecessor was told."""

    async def body() -> None:
        standing = Standing(1.0, "Balanced", (), ())
        first, second = Heard([standing]), Heard([])
        one = Peers(tmp_path, 0, 2, first)
        await one.start()
        two = Peers(tmp_path, 1, 2, second)
        await two.start()
        began = Began("7", "w", 1, 2, None, ())
        while not one.reached:
            await asyncio.sleep(0.01)
        one.tell(began)
        while len(second.heard) < 2:
            await asyncio.sleep(0.01)
        assert second.heard == [(0, standing), (0, began)]
        await one.close()
        while second.heard:
            await asyncio.sleep(0.01)
        first.told = [began]
        again = Peers(tmp_path, 0, 2, first)
        await again.start()
        while not second.heard:
            await asyncio.sleep(0.01)
        assert second.heard == [(0, began)]
        await again.close()
        await two.close()

    run(body())
