"""Many clients, a small tier, and a router that listens: answers and events stay true."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_process import BLOCK_TOKENS, opal
from event_consumer import EventConsumer, held_blocks
from live_server import Server, running_server
from prompts import greedy, random_tokens
from reference import Reference

from opal_connector.cli.server_process import free_port
from opal_connector.keys import OpalTokenDatabase

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROW_BYTES = 196608  # 32 tokens of the model with four layers
TIER_ROWS = 60


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    first = free_port(2)
    return first, first + 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, ports: tuple[int, int]) -> Iterator[Server]:
    """A tier of seven and a half chunks, and a stream of events."""
    events = (
        '{"enable_kv_cache_events": true, "publisher": "zmq", '
        f'"endpoint": "tcp://*:{ports[0]}", '
        f'"replay_endpoint": "tcp://*:{ports[1]}"}}'
    )
    with running_server(
        tmp_path_factory.mktemp("server"),
        *("--kv-events-config", events),
        transfer_config=opal({"CPUMemory": {"capacity_GB": f"{TIER_ROWS * ROW_BYTES}B"}}),
    ) as running:
        yield running


def prefix_blocks(tokens: list[int], held: set[int]) -> int:
    """Blocks at a prompt's start that a consumer of the events would expect to hit."""
    chain = OpalTokenDatabase(block_tokens=BLOCK_TOKENS, chunk_blocks=8).chain()
    chain.extend(tokens)
    names = [int.from_bytes(digest[-8:], "big") for digest in chain.hashes]
    count = 0
    while count < (len(tokens) - 1) // BLOCK_TOKENS and names[count] in held:
        count += 1
    return count


def test_eight_clients_and_a_listener(
    server: Server, ports: tuple[int, int], reference: Reference
) -> None:
    """Shared prefixes from eight clients at once; afterwards the events foretell every hit."""
    prefixes = [random_tokens(280 + 90 * one, seed=600 + one) for one in range(3)]
    prompts = [
        prefixes[one % 3] + random_tokens(30 + 23 * one, seed=610 + one) for one in range(10)
    ]
    jobs = prompts * 4
    random.Random(2).shuffle(jobs)
    expected = {
        str(tokens): reference.answer(tokens, sampling=greedy(8))["tokens"] for tokens in prompts
    }
    with EventConsumer(port=ports[0], replay_port=ports[1]) as consumer:
        time.sleep(0.5)  # a subscription takes a moment
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(server.complete, jobs))
        for tokens, answer in zip(jobs, answers, strict=True):
            assert answer["choices"][0]["token_ids"] == expected[str(tokens)]

        server.reset_device()
        live = consumer.live_events()
        assert consumer.replayed_events() == live
        held = held_blocks(live)
        assert {event["type"] for event in live} == {"BlockStored", "BlockRemoved"}
        assert 0 < len(held) <= TIER_ROWS

        foretold = 0
        for tokens in prompts:
            held = held_blocks(consumer.live_events(quiet_seconds=0.3))
            blocks = prefix_blocks(tokens, held)
            answer = server.complete(tokens)
            details = answer["usage"]["prompt_tokens_details"] or {}
            assert (details.get("cached_tokens") or 0) == blocks * BLOCK_TOKENS
            foretold += blocks
            server.reset_device()
        assert foretold > 0

        metrics = server.metrics()
        assert metrics.total("vllm:opal_evictions_total", tier="CPUMemory") > 0
        assert metrics.total("vllm:opal_capacity_bytes") == TIER_ROWS * ROW_BYTES
        assert metrics.total("vllm:opal_used_bytes") <= TIER_ROWS * ROW_BYTES
        assert metrics.total("vllm:opal_failures_total") == 0

        server.reset_device(external=True)
        assert held_blocks(consumer.live_events()) == set()
