"""The server module as others see it: through the channel, the KVBM's ingest, `opal kvbm`."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")

from l2_world import until
from lmcache.v1.distributed.api import AttnWindowDesc
from module_world import CHUNK_TOKENS, LAYOUT, MODEL, World, prompts, server
from test_lmcache_bench import SHAPE, bench_server, environment, plugin, run, status
from test_lmcache_bench import server as server_process

from opal_connector.cli.kvbm_following import Following, follow
from opal_connector.cli.kvbm_sources import SourceOptions
from opal_connector.cli.kvbm_verify import await_quiet, verify
from opal_connector.cli.server_process import free_port
from opal_connector.cluster.request import PrefixRequest

PROMPT = list(range(100, 100 + 5 * CHUNK_TOKENS))


def following(endpoint: str, look: Callable[[Following], Awaitable[None]]) -> None:
    """Follow one instance, as `opal kvbm` does, until it is quiet; then look."""

    async def run() -> None:
        async with follow(SourceOptions(instances=(endpoint,))) as one:
            await await_quiet(one, 20)
            await look(one)

    asyncio.run(run())


def endpoint_of(world: World) -> str:
    """Where the channel is asked, once it is open."""
    until(lambda: world.module.publisher.endpoint is not None, "the channel is open")
    assert world.module.publisher.endpoint is not None
    return world.module.publisher.endpoint.announced


def test_the_kvbm_finds_a_prompt_that_lmcache_holds() -> None:
    """Tokens in, matched part out, by Opal's own hashes; and tenants do not see each other."""
    with server(instance_id="lmcache-1", served_model_name="served") as world:
        world.store(PROMPT)
        world.store(PROMPT, salt="tenant")
        world.drain()

        async def look(one: Following) -> None:
            tokens = tuple(PROMPT[:12] + [7] * 8)
            for salt, score in ((None, 0.6), ("tenant", 0.6), ("other", None)):
                request = PrefixRequest(model="served", token_ids=tokens, cache_salt=salt)
                assert one.kvbm.scorer(request).get("lmcache-1") == score
            report = await verify(one, 0)
            assert (report.differences, report.not_compared) == (0, 0)

        following(endpoint_of(world), look)


def test_a_model_with_windows_is_matched_by_what_each_group_needs() -> None:
    """The groups become known when an engine registers, long after the channel has opened."""
    with server(instance_id="one", model=MODEL) as world:

        async def look(one: Following) -> None:
            assert one.kvbm.workers["one"].description.groups[0].kind == "full_attention"
            windows = AttnWindowDesc([-1, 2])
            world.context.layout_desc_registry.register(MODEL, 1, LAYOUT, windows)
            world.tell_tokens(PROMPT)
            world.write(world.keys(PROMPT, group=0))
            world.write(world.keys(PROMPT, group=1)[2:4])
            world.drain()
            request = PrefixRequest(model=MODEL, token_ids=tuple(PROMPT))
            async with asyncio.timeout(30):
                while one.kvbm.scorer(request).get("one") != 0.8:
                    await asyncio.sleep(0.02)
            await await_quiet(one, 20)
            report = await verify(one, 0)
            assert (report.differences, report.not_compared) == (0, 0)

        following(endpoint_of(world), look)


def test_the_kvbm_stays_right_through_lost_events() -> None:
    """Drops on LMCache's bus are made good by events: the incarnation goes on."""
    with server(queue_size=6) as world:
        world.store(PROMPT)
        world.drain()

        async def look(one: Following) -> None:
            incarnation = next(iter(one.kvbm.workers.values())).description.incarnation
            for prompt in prompts(1, 6):
                world.store(prompt)
            world.drain()
            for prompt in prompts(1, 6):
                world.tell_tokens(prompt)
                world.drain()
            await await_quiet(one, 20)
            report = await verify(one, 0)
            assert (report.differences, report.not_compared) == (0, 0)
            state = next(iter(one.kvbm.workers.values()))
            assert state.description.incarnation == incarnation
            assert state.block_counts == {(0, "CPUMemory"): len(world.held()[0, "CPUMemory"])}

        following(endpoint_of(world), look)


def test_a_restart_is_a_new_incarnation_and_what_was_in_memory_is_forgotten() -> None:
    """Nobody is sent to a server for what it had before it was restarted."""
    options = {"instance_id": "one", "events": {"endpoint": f"tcp://127.0.0.1:{free_port()}"}}

    async def run() -> None:
        endpoint = options["events"]["endpoint"]  # type: ignore[index]
        async with follow(SourceOptions(instances=(endpoint,))) as one:
            incarnations = []
            for prompt in prompts(5, 2):
                with server(**options, model=MODEL) as world:  # type: ignore[arg-type]
                    world.store(prompt)
                    world.drain()
                    expected = world.announced()[0, "CPUMemory"]

                    def known() -> set[bytes]:
                        if "one" not in one.kvbm.workers:
                            return set()
                        return {digest for _, digest in one.kvbm.contents("one", 0, "CPUMemory")}

                    async with asyncio.timeout(30):
                        while known() != expected:
                            await asyncio.sleep(0.02)
                    incarnations.append(one.kvbm.workers["one"].description.incarnation)
            assert incarnations[0] < incarnations[1]

    asyncio.run(run())


def test_a_closed_module_hears_no_more_and_says_so() -> None:
    """LMCache's bus cannot be left; what it still brings does no harm."""
    with server() as world:
        world.store(PROMPT)
        world.drain()
        endpoint_of(world)
        assert world.module.report_status()["opal_events"]["is_publishing"]
        world.module.close()
        count = len(world.events)
        world.store(prompts(1, 1)[0])
        world.drain()
        assert len(world.events) == count
        assert not world.module.report_status()["opal_events"]["is_publishing"]


def kvbm_verify(endpoint: str) -> dict[str, int]:
    """What `opal kvbm verify` finds by tier; it must find no difference."""
    command = [
        sys.executable, "-c", "from opal_connector.cli.main import main; main()",
        "kvbm", "verify", "--instance", endpoint, "--seconds", "1", "--json",
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["differences"], report["not_compared"]) == (0, 0)
    return {place["tier"]: place["blocks"] for place in report["instances"][0]["places"]}


@pytest.mark.slow
def test_a_real_server_is_seen_by_opal_kvbm_and_verified_also_after_a_restart(
    tmp_path: Path,
) -> None:
    """LMCache's own benchmark stores and loads; `opal kvbm verify` finds no difference.

    After the restart all hits come from Opal's disk, and their tokens from the lookups.
    """
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    module = {
        "module_path": "opal_connector.integrations.lmcache.server_module",
        "config": {"instance_id": "lmcache-1", "events": {"endpoint": endpoint}},
    }
    arguments = ("--eviction-policy", "LRU", "--server-module", json.dumps(module))
    for is_restarted in (False, True):
        log, adapter = tmp_path / "server.log", plugin(tmp_path / "nvme")
        with server_process(log, adapter, *arguments) as ports:
            output = bench_server(*ports)
            assert ("[seq 0/cold] LOOKUP: 4/4 chunks hit" in output) == is_restarted
            found = status(ports[1])["opal_events"]
            assert found["is_publishing"]
            assert (found["chunks_without_tokens"], found["failures"]) == (0, 0)
            tiers = kvbm_verify(endpoint)
            assert tiers["CPUMemory"] == tiers["LocalNVMe"] == 8


@pytest.mark.slow
def test_a_transfer_that_tells_no_tokens_is_announced_by_its_lookups(tmp_path: Path) -> None:
    """Engine-driven transfers, the default on a CPU, publish no bindings."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    module = {
        "module_path": "opal_connector.integrations.lmcache.server_module",
        "config": {"events": {"endpoint": endpoint}},
    }
    arguments = ("--supported-transfer-mode", "auto", "--server-module", json.dumps(module))
    arguments += ("--eviction-policy", "LRU")
    log, adapter = tmp_path / "server.log", plugin(tmp_path / "nvme")
    with server_process(log, adapter, *arguments) as ports:
        run(
            "bench", "server", "--mode", "cpu", "--transfer-mode", "engine_driven",
            "--rpc-url", f"tcp://127.0.0.1:{ports[0]}", "--url", f"http://127.0.0.1:{ports[1]}",
            "--end", "2", "--interval", "0.1", "--kvcache-shape-spec", SHAPE, "--num-blocks", "64",
        )  # fmt: skip
        assert kvbm_verify(endpoint) == {"CPUMemory": 8, "LocalNVMe": 8}
