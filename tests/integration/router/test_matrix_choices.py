"""Where requests go, by what instances hold, measure and are asked for; and who reads slowly.

Each through a whole router, in front of engines whose channel is real.
"""

import asyncio
from collections import Counter
from typing import Any

import pytest
from fake_channel import BLOCK_BYTES, BLOCK_TOKENS, HOST
from fake_engine import FakeEngine
from router_world import World, eventually, run, world

from opal_connector.cluster.policies import POLICY_NAMES
from opal_connector.cluster.request import PrefixRequest

PROMPT = list(range(321))  # twenty blocks and a token


async def would_go(made: World, asked: dict[str, Any]) -> dict[str, Any]:
    """The router's explanation of where a request would go."""
    async with made.post(asked, "/route") as answer:
        assert answer.status == 200
        found: dict[str, Any] = await answer.json()
        return found


# ---- nobody has anything ----


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_at_idle_requests_that_hit_nothing_are_spread_evenly(policy: str) -> None:
    """One after the other, each when all are idle: nobody is the first choice for being first."""

    async def body() -> None:
        engines = [FakeEngine(name) for name in ("a", "b", "c")]
        async with world(*engines, policy=policy) as made:
            made.core.router._seed = 11
            made.core.router._policies.clear()  # made anew, with that seed
            counts: Counter[str | None] = Counter()
            for number in range(120):
                status, worker, _ = await made.ask([number] * 40)
                assert status == 200
                counts[worker] += 1
            fair = 120 / len(engines)
            distance = sum((counts[engine.name] - fair) ** 2 / fair for engine in engines)
            assert distance < 13.8, counts  # chi squared of two degrees, one in a thousand
            made.assert_nothing_is_counted()

    run(body())


# ---- who has it where ----

TOKENS_PER_SECOND = 1_000.0
BLOCKS = 4
ON_HOST = list(range(BLOCKS * BLOCK_TOKENS))
ASKED = [*ON_HOST, 7]


def per_byte(seconds_per_token: float) -> float:
    return seconds_per_token * BLOCK_TOKENS / BLOCK_BYTES


@pytest.mark.parametrize(
    ("seconds_per_token", "winner"),
    [
        pytest.param(1e-5, "host", id="much faster than computing"),
        pytest.param(2e-4, "host", id="faster than the block that the device lacks"),
        pytest.param(5e-4, "device", id="slower than that block"),
        pytest.param(2e-3, "device", id="slower than computing"),
    ],
)
def test_four_blocks_on_the_host_against_three_on_the_device_is_a_matter_of_measured_speeds(
    seconds_per_token: float, winner: str
) -> None:
    async def body() -> None:
        device = FakeEngine("device", prefill_tokens_per_second=TOKENS_PER_SECOND)
        host = FakeEngine("host", prefill_tokens_per_second=TOKENS_PER_SECOND)
        async with world(device, host) as made:
            device.store(ON_HOST[: 3 * BLOCK_TOKENS])
            host.store_below(ON_HOST, HOST)
            await made.knows(device, ON_HOST[: 3 * BLOCK_TOKENS])
            await made.knows(host, ON_HOST)
            host.load_seconds_per_byte = per_byte(seconds_per_token)

            def is_measured() -> bool:
                system = made.core.index.workers["host"].system
                return system is not None and any(
                    tier.load_seconds_per_byte == host.load_seconds_per_byte
                    for tier in system.tiers
                )

            await eventually(is_measured, "the speed")
            explained = await would_go(made, {"prompt": ASKED})
            assert explained["choice"] == winner
            matches = {name: facts["match"] for name, facts in explained["workers"].items()}
            assert matches["device"]["device_tokens"] == 48
            assert matches["host"]["tier_tokens"] == {HOST: 64}
            cost = explained["workers"]["host"]["cost"]
            is_fetched = seconds_per_token < 1 / TOKENS_PER_SECOND
            assert cost["fetch_seconds"] == pytest.approx(64 * seconds_per_token * is_fetched)
            assert cost["compute_seconds"] == pytest.approx((1 if is_fetched else 65) / 1_000)
            assert (await made.ask(ASKED))[:2] == (200, winner)

    run(body())


def test_more_than_ten_holders_of_one_prefix_are_all_known_and_all_used() -> None:
    """Twelve have it, none is forgotten for another, and work is spread over all of them."""

    async def body() -> None:
        engines = [FakeEngine(f"e{number:02}") for number in range(11)]
        engines.append(FakeEngine("small", cache_blocks=20))
        async with world(*engines) as made:
            for engine in engines:
                engine.store(PROMPT)
            for engine in engines:
                await made.knows(engine, PROMPT)
            explained = await would_go(made, {"prompt": PROMPT})
            found = {
                name: facts["match"]["device_tokens"]
                for name, facts in explained["workers"].items()
            }
            assert found == {engine.name: 320 for engine in engines}
            used: Counter[str | None] = Counter()
            for _ in range(48):
                _, worker, answer = await made.ask(PROMPT)
                used[worker] += 1
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 320
            assert used.keys() == {engine.name for engine in engines}
            engines[-1].store(list(range(2_000, 2_320)))  # evicts the other one
            await made.knows(engines[-1], list(range(2_000, 2_320)))
            small = PrefixRequest(token_ids=PROMPT)
            await eventually(lambda: "small" not in made.core.index.match(small), "the eviction")
            assert len(made.core.index.match(small)) == 11

    run(body())


# ---- who may share ----

IDENTITIES: list[dict[str, str]] = [
    {},
    {"cache_salt": "one tenant"},
    {"cache_salt": "another tenant"},
    {"model": "poet"},
    {"model": "bard"},
    {"model": "poet", "cache_salt": "one tenant"},
    {"model": "bard", "cache_salt": "one tenant"},
]


def test_adapters_and_salts_share_nothing_and_each_finds_its_own() -> None:
    """The same tokens under seven identities: cold seven times, then warm where each was."""

    async def body() -> None:
        engines = [FakeEngine(name, adapters=("poet", "bard")) for name in ("one", "two")]
        async with world(*engines, affinity={"mode": "off"}) as made:
            owners = []
            for identity in IDENTITIES:
                async with made.post({"prompt": PROMPT, **identity}) as answer:
                    cold = await answer.json()
                    owners.append(answer.headers["X-Opal-Worker"])
                    assert answer.headers["X-Opal-Expected-Tokens"] == "0"
                assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
                await _is_known(made, identity, owners[-1])
            assert set(owners) == {"one", "two"}
            for identity, owner in zip(IDENTITIES, owners, strict=True):
                async with made.post({"prompt": PROMPT, **identity}) as answer:
                    warm = await answer.json()
                    assert answer.headers["X-Opal-Worker"] == owner
                    assert answer.headers["X-Opal-Expected-Tokens"] == "320"
                assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 320
            assert all(found.trust == 1.0 for found in made.core.audit.workers.values())

    run(body())


async def _is_known(made: World, identity: dict[str, str], worker: str) -> None:
    asked = PrefixRequest(
        token_ids=PROMPT,
        lora_name=identity.get("model"),
        cache_salt=identity.get("cache_salt"),
    )
    await eventually(lambda: worker in made.core.index.match(asked), "its blocks")


# ---- who reads slowly ----

PADDING = "x" * 4_000
EVENTS = 20_000  # 80 MB
KEPT_BYTES = 24 << 20  # by two pairs of sockets and the router together


def test_a_client_that_reads_nothing_for_a_while_stops_the_engine_and_then_gets_everything() -> (
    None
):
    """The router keeps little for it, others are answered meanwhile, and no byte is missing."""

    async def body() -> None:
        one = FakeEngine("one")
        one.padding = PADDING
        async with world(one) as made:
            asked = {"prompt": PROMPT, "stream": True, "max_tokens": EVENTS}
            async with made.post(asked) as answer:
                await _stalls(one)
                assert one.streamed_events * len(PADDING) < KEPT_BYTES
                assert (await made.ask([1, 2, 3]))[0] == 200
                assert one.streamed_events < EVENTS
                got = await answer.read()
            assert got.count(PADDING.encode()) == EVENTS
            assert b"[DONE]" in got
            await eventually(lambda: made.core.forwarder.under_way == 0)
            made.assert_nothing_is_counted()

    run(body())


async def _stalls(engine: FakeEngine) -> None:
    """Until it has streamed something, and nothing more for half a second."""
    before, same = -1, 0
    while same < 10:
        await asyncio.sleep(0.05)
        same = same + 1 if engine.streamed_events == before > 0 else 0
        before = engine.streamed_events
