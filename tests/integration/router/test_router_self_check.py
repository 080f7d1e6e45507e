"""Events that are not of the prompts that were sent: found out, said, and not routed by."""

import random
from typing import Any

import pytest
from fake_engine import BLOCK_TOKENS, FakeEngine
from router_world import World, eventually, run, world

from opal_connector.cluster.router import self_check
from opal_connector.keys import RequestIdentity, TokenChain

pytestmark = pytest.mark.usefixtures("_soon")


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_ANNOUNCED_SECONDS", 0.3)


class OtherHashes(FakeEngine):
    """Whose blocks have hashes of their own, as with another seed or tokenizer."""

    hashes_alike = False

    def hashes(self, token_ids: list[int], identity: Any = None) -> list[bytes]:
        if self.hashes_alike:
            return super().hashes(token_ids, *([identity] if identity is not None else []))
        chain = TokenChain(RequestIdentity(cache_salt="another"), BLOCK_TOKENS)
        chain.extend(token_ids)
        return chain.hashes


def prompts(count: int) -> list[list[int]]:
    chosen = random.Random(11)
    return [[chosen.randrange(1_000) for _ in range(4 * BLOCK_TOKENS)] for _ in range(count)]


def said(here: World, worker: str) -> bool | None:
    check = here.core.event_check.workers.get(worker)
    return check.matches if check is not None else None


async def exposed(here: World) -> str:
    async with here.client.get(f"{here.url}/metrics") as answer:
        return await answer.text()


def test_events_of_the_prompts_that_were_sent_are_believed() -> None:
    async def body() -> None:
        async with world(FakeEngine()) as here:
            await here.ask(prompts(1)[0])
            await eventually(lambda: said(here, "one") is True, "the first events")
            assert 'opal_router_events_match{worker="one"} 1.0' in await exposed(here)

    run(body())


def test_events_with_other_hashes_are_said_loudly_and_leave_the_load_to_decide(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        async with world(OtherHashes()) as here:
            for tokens in prompts(6):
                await here.ask(tokens)
            await eventually(lambda: said(here, "one") is False, "the difference to be seen")
            assert here.core.router.disbelieved == {"one"}
            assert "one announces blocks, but none of the prompts that it answered" in caplog.text
            assert 'opal_router_events_match{worker="one"} 0.0' in await exposed(here)

    run(body())


def test_a_worker_whose_hashes_come_right_is_believed_again() -> None:
    async def body() -> None:
        engine = OtherHashes()
        async with world(engine) as here:
            for tokens in prompts(6):
                await here.ask(tokens)
            await eventually(lambda: said(here, "one") is False, "the difference to be seen")
            engine.hashes_alike = True
            await here.ask(prompts(7)[-1])
            await eventually(lambda: said(here, "one") is True, "its blocks")
            assert not here.core.router.disbelieved

    run(body())


def test_a_worker_that_announces_nothing_is_said_to(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with world(FakeEngine(is_cache_on=False)) as here:
            for tokens in prompts(6):
                await here.ask(tokens)
            await eventually(lambda: said(here, "one") is False, "the silence to be seen")
            assert "one announces no blocks" in caplog.text

    run(body())


def test_prompts_of_less_than_a_block_prove_nothing() -> None:
    async def body() -> None:
        async with world(FakeEngine()) as here:
            for _ in range(6):
                await here.ask([1, 2, 3])
            assert said(here, "one") is None
            assert not here.core.event_check.workers

    run(body())


def test_who_is_not_believed_gets_no_request_for_what_it_says_that_it_holds() -> None:
    """Its matches count for nothing, whatever the policy."""

    async def body() -> None:
        async with world(FakeEngine("one"), FakeEngine("two"), policy="MaxPrefix") as here:
            tokens = prompts(1)[0]
            here.engines[0].store(tokens)
            await here.knows(here.engines[0], tokens)
            assert (await here.ask(tokens))[1] == "one"
            await eventually(lambda: said(here, "one"), "the check to be over")
            here.core.router.believe("one", is_believed=False)
            here.engines[1].store(tokens)
            await here.knows(here.engines[1], tokens)
            assert {(await here.ask(tokens))[1] for _ in range(20)} == {"two"}

    run(body())
