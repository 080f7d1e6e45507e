"""The router in front of two real servers: their tokens, their events, their words, their end."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from live_server import Server, _wait_until_healthy, kill_group, start_server
from router_world import QUICK, eventually

from opal_connector.cli.models import ensure_smollm2, ensure_tiny_llama
from opal_connector.cli.server_process import free_port
from opal_connector.cluster.router.config import RouterConfig, router_config
from opal_connector.cluster.router.instances import Health
from opal_connector.cluster.router.server import RouterServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
RIGHT = {"path": str(ensure_smollm2(layers=4)), "chat_template": TEMPLATE}
WRONG = str(ensure_tiny_llama())
SYSTEM = "You are a careful assistant who answers in one word. " * 40


def _start(directory: Path, name: str) -> tuple[Server, str]:
    directory.mkdir()
    events = f"tcp://127.0.0.1:{free_port(2)}"
    extra = {
        "kvc_tiers": ["CPUMemory"],
        "CPUMemory": {"capacity_GB": "256MiB"},
        "instance_id": name,
        "events": {"endpoint": events, "heartbeat_seconds": 0.2},
    }
    config = {
        "kv_connector": "OpalConnector",
        "kv_connector_module_path": "opal_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return start_server(directory, "--chat-template", TEMPLATE, transfer_config=config), events


def _chat(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"model": "model", "messages": messages, "max_tokens": 6, "temperature": 0, **more}


def test_two_real_servers_behind_one_router(tmp_path: Path) -> None:
    """Chats go where their prefix is, are what the engine says, and survive the other's death."""
    servers = {name: _start(tmp_path / name, name) for name in ("one", "two")}

    async def body() -> None:
        instances = [
            {"url": str(server.http.base_url).rstrip("/"), "events": events, "name": name}
            for name, (server, events) in servers.items()
        ]
        await _a_wrong_tokenizer_is_given_up(instances)
        router = RouterServer(_configuration(instances, RIGHT), {})
        await router.start()
        try:
            async with aiohttp.ClientSession() as client:
                await _ask_all(router, client, {name: one for name, (one, _) in servers.items()})
        finally:
            await router.close()

    try:
        for server, _ in servers.values():
            _wait_until_healthy(server)
        asyncio.run(asyncio.wait_for(body(), 240))
    finally:
        for server, _ in servers.values():
            server.http.close()
            kill_group(server.process)


def _configuration(instances: list[dict[str, Any]], tokenizer: Any) -> RouterConfig:
    tokens = {"timeout_seconds": 20.0, "tokenizers": {"model": tokenizer}}
    return router_config({**QUICK, "tokens": tokens, "instances": instances})


async def _a_wrong_tokenizer_is_given_up(instances: list[dict[str, Any]]) -> None:
    """Before any client asks: the probes are enough."""
    router = RouterServer(_configuration(instances, WRONG), {})
    await router.start()
    try:
        tokens = router.core.local_tokens
        await eventually(lambda: not tokens.unprobed, "the probes")
        assert tokens.given_up == {
            ("model", "completions"),
            ("model", "chats"),
            ("model", "chats with tools"),
        }
    finally:
        await router.close()


async def _ask_all(
    router: RouterServer, client: aiohttp.ClientSession, servers: dict[str, Server]
) -> None:
    statuses = router.core.sources.feed.statuses
    await eventually(lambda: all(one.is_settled for one in statuses()), "the events")
    url = f"{router.url}/v1/chat/completions"
    async with client.post(url, json=_chat("What is red?")) as answer:
        owner = answer.headers["X-Opal-Worker"]
        said = await answer.json()
    direct = await asyncio.to_thread(
        servers[owner].post, "/v1/chat/completions", _chat("What is red?")
    )
    assert said["choices"] == direct["choices"]
    assert said["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]

    def known() -> bool:
        return owner in router.core.index.workers and router.core.index.entry_count > 8

    await eventually(known, "the first prompt's blocks")
    for question in ("What is blue?", "What is green?", "What is a tree?"):
        async with client.post(url, json=_chat(question)) as answer:
            assert answer.headers["X-Opal-Worker"] == owner
            expected = int(answer.headers["X-Opal-Expected-Tokens"])
            found = await answer.json()
        assert 0 < expected <= found["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert router.core.audit.workers[owner].trust > 0.99

    # The tokenizer was held against the engine, by probes and by these chats, and was right.
    assert not router.core.local_tokens.given_up
    assert router.core.local_tokens.agreed["model", "chats"] > 4
    assert router.core.event_check.workers[owner].matches

    killed = servers[owner]
    stream = _chat("Tell me all.", stream=True, max_tokens=1_500, ignore_eos=True)
    async with client.post(url, json=stream) as answer:
        assert answer.headers["X-Opal-Worker"] == owner
        await answer.content.readany()
        await asyncio.to_thread(kill_group, killed.process)
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    async with client.post(url, json=_chat("What is red?")) as answer:
        assert (answer.status, answer.headers["X-Opal-Worker"]) == (200, *({*servers} - {owner}))
        assert (await answer.json())["choices"] == said["choices"]
    instance = router.core.fleet.get(owner)
    assert instance is not None
    await eventually(lambda: instance.health is Health.DEAD, "its death to be seen")
    assert not router.core.index.workers[owner].block_counts
    await eventually(lambda: router.core.forwarder.under_way == 0)
    assert len(router.core.router.loads) == 0
