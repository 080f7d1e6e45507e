"""A new instance reads the hottest prefixes from a shared tier before it takes requests."""

import json
import random
from typing import Any

import fake_engine
import msgspec
import pytest
from fake_channel import BLOCK_TOKENS, DISK, Source
from fake_engine import FakeEngine
from router_world import World, eventually, run, world

from opal_connector.cluster.router.config import instance_config
from opal_connector.cluster.router.prewarm import Prewarm
from opal_connector.events.channel import InstanceDescription, TierDescription

_RANDOM = random.Random(5)


def _prompt(blocks: int) -> list[int]:
    return [_RANDOM.randrange(1_000) for _ in range(blocks * BLOCK_TOKENS)]


HOT = _prompt(8)
WARM = _prompt(4)
UNSHARED = _prompt(6)


class SharedSource(Source):
    """An instance whose disk others mount, too."""

    def describe(self, instance_id: str, incarnation: int) -> InstanceDescription:
        described = super().describe(instance_id, incarnation)
        tiers = (TierDescription(DISK, is_persistent=True, shared_id="mounted everywhere"),)
        return msgspec.structs.replace(described, tiers=tiers)


@pytest.fixture
def _shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_engine, "Source", SharedSource)


async def _used(found: World, prewarm: Prewarm) -> None:
    """Requests that have prefixes in common, two of which lie in the tier below."""
    one = found.engines[0]
    for prefix, times in ((HOT, 4), (WARM, 3), (UNSHARED, 5)):
        for _ in range(times):
            assert (await found.ask([*prefix, *_prompt(2)]))[0] == 200
    assert len(prewarm.hot) == 12
    one.store_below(HOT)
    one.store_below(WARM)


async def _new(found: World, prewarm: Prewarm) -> tuple[FakeEngine, list[dict[str, Any]]]:
    """One more instance is warmed; what it was asked."""
    two = await FakeEngine("two").start()
    instance = await found.core.add(instance_config(two.config()), is_held=True)
    await found.settled()
    await prewarm.warm(instance)
    assert instance.is_draining
    return two, [json.loads(raw) for path, _, raw in two.seen if path == "/v1/completions"]


@pytest.mark.usefixtures("_shared")
def test_a_new_instance_is_asked_for_what_is_hot_and_lies_where_it_can_read_it() -> None:
    """One token is asked for after each; what no tier has is left to who needs it."""

    async def body() -> None:
        async with world(FakeEngine("one")) as found:
            prewarm = Prewarm(found.core, prefixes=8, seconds=5.0)
            await _used(found, prewarm)
            match = found.core.index.match
            await eventually(lambda: len(match(_request(WARM))) == 1)
            two, asked = await _new(found, prewarm)
            try:
                assert sorted(one["prompt"] for one in asked) == sorted([HOT, WARM])
                assert {one["max_tokens"] for one in asked} == {1}
                assert (prewarm.counts["prefixes"], prewarm.counts["failed"]) == (2, 0)
                assert len(found.core.router.loads) == 0
            finally:
                await two.close()

    run(body())


@pytest.mark.usefixtures("_shared")
def test_only_so_many_are_read() -> None:
    """The limit is kept."""

    async def body() -> None:
        async with world(FakeEngine("one")) as found:
            prewarm = Prewarm(found.core, prefixes=2, seconds=5.0)
            await _used(found, prewarm)
            two, asked = await _new(found, prewarm)
            try:  # the hottest two, of which one lies nowhere that it can read
                assert [one["prompt"] for one in asked] == [HOT]
            finally:
                await two.close()

    run(body())


@pytest.mark.usefixtures("_shared")
def test_an_engine_that_does_not_answer_is_not_waited_for() -> None:
    """It takes requests after the given seconds all the same."""

    async def body() -> None:
        async with world(FakeEngine("one")) as found:
            prewarm = Prewarm(found.core, prefixes=8, seconds=0.5)
            await _used(found, prewarm)
            two = await FakeEngine("two").start()
            two.fault = "hang"
            try:
                instance = await found.core.add(instance_config(two.config()), is_held=True)
                await prewarm.warm(instance)
                assert prewarm.counts == {"late": 1}
            finally:
                await two.close()

    run(body())


def test_what_lies_on_another_instances_own_disk_is_not_asked_for() -> None:
    """It cannot be read from there."""

    async def body() -> None:
        async with world(FakeEngine("one")) as found:
            prewarm = Prewarm(found.core, prefixes=8, seconds=5.0)
            await _used(found, prewarm)
            two, asked = await _new(found, prewarm)
            try:
                assert asked == []
                assert prewarm.counts == {}
            finally:
                await two.close()

    run(body())


def _request(token_ids: list[int]) -> Any:
    from opal_connector.cluster.request import PrefixRequest

    return PrefixRequest(token_ids=token_ids)
