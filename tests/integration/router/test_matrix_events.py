"""What may happen to an instance's events, and where requests go afterwards.

Each through a whole router: engines with a real channel, or with vLLM's own stream.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest
from channel_proxy import ChannelProxy
from engine_server import EngineServer
from fake_channel import DISK, HOST
from fake_engine import MODEL, FakeEngine
from router_world import World, eventually, run, world
from simulated_engine import BLOCK_TOKENS as STREAM_BLOCK_TOKENS
from simulated_engine import SimulatedEngine, parent_of, tokens_of

from opal_connector.cluster.ingest import SourceMetrics
from opal_connector.cluster.request import PrefixRequest
from opal_connector.events import DEVICE_TIER, Insert, ObjectFact
from opal_connector.events.channel import Contents, Replay
from opal_connector.keys import CHAIN_ROOT

PROMPT = list(range(320))
OTHER = list(range(5_000, 5_320))
NEWER = list(range(9_000, 9_320))
NOTHING_BUT_EVENTS = {"health": {"interval_seconds": 3_600.0}}


def credited(made: World, tokens: list[int], worker: str = "one") -> int:
    """The tokens that the index believes a worker to have."""
    match = made.core.index.match(PrefixRequest(token_ids=tokens)).get(worker)
    return 0 if match is None else match.total_tokens


def metrics_of(made: World) -> SourceMetrics:
    return next(iter(made.core.sources.feed.metrics().values()))


async def asked(made: World, tokens: list[int]) -> tuple[str, int]:
    """Who answers a prompt, and what was expected to be cached there."""
    async with made.post({"prompt": tokens}) as answer:
        assert answer.status == 200
        await answer.read()
        return answer.headers["X-Opal-Worker"], int(answer.headers["X-Opal-Expected-Tokens"])


# ---- the native channel ----


def test_a_restart_in_place_is_seen_by_its_events_alone() -> None:
    """The same addresses, another process: memory is forgotten, the disk is not, the new counts."""

    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two, **NOTHING_BUT_EVENTS) as made:
            one.store(PROMPT)
            one.store_below(OTHER, DISK)
            one.store_below(NEWER, HOST)
            for tokens in (PROMPT, OTHER, NEWER):
                await made.knows(one, tokens)
            await one.restart()
            await eventually(
                lambda: credited(made, PROMPT) == credited(made, NEWER) == 0, "the restart"
            )
            await made.knows(one, OTHER)
            assert made.core.index.workers["one"].block_counts == {(0, DISK): 20}
            assert made.core.deaths == 0
            assert (await asked(made, PROMPT))[1] == 0
            assert await asked(made, OTHER) == ("one", 320)
            one.store(NEWER)
            await made.knows(one, NEWER)
            assert await asked(made, NEWER) == ("one", 320)
            made.core.index.check()

    run(body())


@contextlib.asynccontextmanager
async def behind_a_bad_network(
    one: FakeEngine, losing: list[int]
) -> AsyncIterator[tuple[World, ChannelProxy]]:
    """A router that hears `one` through a network which loses the next `losing[0]` batches."""

    def copies(_: int) -> int:
        losing[0] -= 1
        return int(losing[0] < 0)

    two = FakeEngine("two")
    await one.start()
    await two.start()
    try:
        with ChannelProxy(one.events, one.stream, copies) as proxy:
            instances = [one.config(events=proxy.endpoint), two.config()]
            async with world(instances=instances) as made:
                yield made, proxy
    finally:
        await two.close()
        await one.close()


@pytest.mark.parametrize("replay_bytes", [64 << 20, 0])
def test_a_gap_is_closed_by_a_replay_or_where_there_is_none_by_the_contents(
    replay_bytes: int,
) -> None:
    async def body() -> None:
        one, losing = FakeEngine("one", replay_bytes=replay_bytes), [0]
        async with behind_a_bad_network(one, losing) as (made, proxy):
            one.store(PROMPT[:160])
            await made.knows(one, PROMPT[:160])
            before = proxy.answered.copy()
            losing[0] = 1
            one.store(PROMPT[:240])
            await eventually(lambda: proxy.lost_batches == 1, "a lost batch")
            one.store(PROMPT)
            await made.knows(one, PROMPT)
            assert metrics_of(made).gaps >= 1
            assert metrics_of(made).purges == 0
            answered = proxy.answered - before
            assert answered[Replay] >= 1
            assert (answered[Contents] > 0) == (replay_bytes == 0)
            assert await asked(made, PROMPT) == ("one", 320)

    run(body())


def test_a_lost_last_batch_is_found_though_nothing_follows_it() -> None:
    """No later number tells of it: a heartbeat does."""

    async def body() -> None:
        one, losing = FakeEngine("one"), [0]
        async with behind_a_bad_network(one, losing) as (made, proxy):
            losing[0] = 1_000
            one.store(PROMPT)
            await eventually(lambda: proxy.lost_batches > 0, "the loss")
            await made.knows(one, PROMPT)
            assert metrics_of(made).lost_tails >= 1
            assert await asked(made, PROMPT) == ("one", 320)

    run(body())


@pytest.mark.parametrize("is_too_much", [False, True])
def test_what_is_known_wrongly_is_found_by_the_digests_of_a_heartbeat(is_too_much: bool) -> None:
    """All numbers are right, and yet the books differ: only fingerprints show that."""

    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two) as made:
            one.store(PROMPT)
            await made.knows(one, PROMPT)
            if is_too_much:
                fact = ObjectFact(0, CHAIN_ROOT, b"".join(one.hashes(OTHER)))
                made.core.index.process_kvc_events("one", [Insert(fact, DEVICE_TIER)])
                assert credited(made, OTHER) == 320
            else:
                made.core.index.clear_tier("one", DEVICE_TIER)
                assert credited(made, PROMPT) == 0
            await eventually(
                lambda: (credited(made, PROMPT), credited(made, OTHER)) == (320, 0), "the repair"
            )
            assert made.core.sources.feed.metrics()[one.events].digest_mismatches >= 1
            assert await asked(made, PROMPT) == ("one", 320)
            made.core.index.check()

    run(body())


# ---- vLLM's own stream ----


def path_of(node: int) -> list[int]:
    """The prompt whose last block a node is, and one token more."""
    tokens: list[int] = []
    place: int | None = node
    while place is not None:
        tokens = tokens_of(place) + tokens
        place = parent_of(place)
    return [*tokens, 1]


@contextlib.asynccontextmanager
async def by_its_own_stream(
    *, has_replay: bool, with_opal: bool = False
) -> AsyncIterator[tuple[World, EngineServer]]:
    """A router in front of an engine without Opal, and of one that has it or tells nothing."""
    one, two = FakeEngine("one", has_events=False), FakeEngine("two", has_events=with_opal)
    await one.start()
    await two.start()
    try:
        with EngineServer(SimulatedEngine()) as stream:
            events = {"endpoint": stream.endpoint}
            if has_replay:
                events["replay_endpoint"] = stream.replay_endpoint
            instances = [one.config(vllm_events=events), two.config()]
            async with world(instances=instances, **NOTHING_BUT_EVENTS) as made:
                await eventually(lambda: metrics_of(made).connections > 0, "the stream")
                await made.settled()
                yield made, stream
    finally:
        await two.close()
        await one.close()


def say(stream: EngineServer, *nodes: int, lost: bool = False) -> None:
    """Blocks are stored, and one batch says so or is lost."""
    with stream.lock:
        for node in nodes:
            stream.engine.store(node)
    stream.to_lose = int(lost)
    stream.publish()


def test_a_gap_in_an_engines_stream_is_replayed() -> None:
    async def body() -> None:
        async with by_its_own_stream(has_replay=True) as (made, stream):
            say(stream, 0, 2)
            await eventually(lambda: credited(made, path_of(2)) == 2 * STREAM_BLOCK_TOKENS)
            say(stream, 6, lost=True)
            say(stream, 14)
            whole = 4 * STREAM_BLOCK_TOKENS
            await eventually(lambda: credited(made, path_of(14)) == whole, "the replay")
            assert (metrics_of(made).gaps, metrics_of(made).purges) == (1, 0)
            assert await asked(made, path_of(14)) == ("one", whole)

    run(body())


def test_a_gap_that_nothing_closes_costs_all_credit_and_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Better nothing than what may be wrong; what is stored from then on counts again."""

    async def body() -> None:
        async with by_its_own_stream(has_replay=False) as (made, stream):
            say(stream, 0, 2)
            await eventually(lambda: credited(made, path_of(2)) == 2 * STREAM_BLOCK_TOKENS)
            say(stream, 6, lost=True)
            say(stream, 14)
            await eventually(lambda: metrics_of(made).purges == 1, "the purge")
            assert credited(made, path_of(2)) == 0
            assert (await asked(made, path_of(14)))[1] == 0
            with stream.lock:
                for node in (14, 6, 2, 0):
                    stream.engine.remove(node)
            say(stream, 0)
            say(stream, 1, 3)
            await eventually(lambda: credited(made, path_of(3)) == 3 * STREAM_BLOCK_TOKENS)
            assert await asked(made, path_of(3)) == ("one", 3 * STREAM_BLOCK_TOKENS)

    with caplog.at_level(logging.WARNING):
        run(body())
    assert any("what one has is not known any more" in text for text in caplog.messages)


@pytest.mark.parametrize("has_replay", [True, False])
def test_an_engine_that_starts_again_in_place_is_known_anew(has_replay: bool) -> None:
    """Its numbers begin at 0 again: old prefixes are not credited, and new ones are at once."""

    async def body() -> None:
        async with by_its_own_stream(has_replay=has_replay) as (made, stream):
            for node in (0, 2, 6):
                say(stream, node)
            await eventually(lambda: credited(made, path_of(6)) == 3 * STREAM_BLOCK_TOKENS)
            with stream.lock:
                stream.engine.restart()
            say(stream, 0, 1)
            await eventually(lambda: credited(made, path_of(1)) == 2 * STREAM_BLOCK_TOKENS)
            assert credited(made, path_of(6)) == STREAM_BLOCK_TOKENS  # the root is new
            assert metrics_of(made).restarts == 1
            assert (await asked(made, path_of(6)))[1] == STREAM_BLOCK_TOKENS
            assert await asked(made, path_of(1)) == ("one", 2 * STREAM_BLOCK_TOKENS)

    run(body())


def test_an_engine_without_opal_counts_as_well_beside_one_that_has_it() -> None:
    """Its stream names no model: a request that names one is meant for it all the same."""

    async def body() -> None:
        async with by_its_own_stream(has_replay=True, with_opal=True) as (made, stream):
            await eventually(lambda: "two" in made.core.index.workers)
            say(stream, 0, 2)
            await eventually(lambda: credited(made, path_of(2)) == 2 * STREAM_BLOCK_TOKENS)
            for _ in range(4):
                async with made.post({"prompt": path_of(2), "model": MODEL}) as answer:
                    assert answer.headers["X-Opal-Worker"] == "one"
                    assert answer.headers["X-Opal-Expected-Tokens"] == str(2 * STREAM_BLOCK_TOKENS)

    run(body())


def test_events_that_nobody_can_read_disturb_no_request() -> None:
    async def body() -> None:
        async with by_its_own_stream(has_replay=True) as (made, stream):
            say(stream, 0, 2)
            await eventually(lambda: credited(made, path_of(2)) == 2 * STREAM_BLOCK_TOKENS)
            for number in range(20):
                stream.send_raw([b"", b"short", b"\xc1" * number])
            answers = await asyncio.gather(*(asked(made, path_of(2)) for _ in range(4)))
            assert {worker for worker, _ in answers} == {"one"}
            await eventually(lambda: metrics_of(made).malformed == 20)

    run(body())
