"""The page in a real browser: live, inert to what others wrote, and plain about what it lacks."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from browser import Browser, browser
from fake_engine import FakeEngine
from router_world import QUICK, World, world

from opal_connector.cluster.router.config import router_config
from opal_connector.cluster.router.server import RouterServer

PROMPT = list(range(321))
HOSTILE_NAME = "<style>*{display:none}<base><b>bold"
HOSTILE_MODEL = '</td><img src="x" onerror="window.hacked=1"><script>window.hacked=1</script>'
MARKED = "return window.mark === 'the same page'"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as made:
        yield made


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 120))


async def sees(chromium: Browser, condition: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(chromium.until, condition, what)


async def opens(chromium: Browser, made: World) -> None:
    """The page is there, and marked: after a reload the mark would be gone."""
    await asyncio.to_thread(chromium.open, f"{made.url}/dashboard")
    await sees(chromium, lambda: "Live" in chromium.text("#connection"), "that it is live")
    chromium.run("window.mark = 'the same page'")


def names_and_states(chromium: Browser) -> dict[str, str]:
    rows = chromium.rows("#instances")
    return {row[0].split("\n")[0]: row[1].split()[-1] for row in rows}


def test_requests_and_deaths_show_up_without_a_reload_and_nothing_is_asked_elsewhere(
    chromium: Browser,
) -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two) as made:
            await opens(chromium, made)
            assert names_and_states(chromium) == {"one": "live", "two": "live"}
            assert "0" in chromium.rows("#times")[0]
            one.store(PROMPT)
            await made.knows(one, PROMPT)
            for _ in range(3):
                assert (await made.ask(PROMPT))[1] == "one"

            def decisions() -> list[list[str]]:
                return chromium.rows("#decisions > tbody")

            await sees(chromium, lambda: len(decisions()) == 6, "three decisions, and their costs")
            assert decisions()[0][2:7] == ["one", "Balanced", "321", "320", "320"]
            hits = {row[0]: row[1] for row in chromium.rows("#hits")}
            assert hits == {"device": "960", "computed": "3"}
            assert chromium.rows("#times")[0] == ["Ended", "3", "3"]
            await two.stop_listening()
            dead = {"one": "live", "two": "dead"}
            await sees(chromium, lambda: names_and_states(chromium) == dead, "the dead instance")
            assert chromium.run(MARKED)
            assert chromium.complaints() == []
            assert await asyncio.to_thread(chromium.origins) == {made.url}

    run(body())


def test_the_costs_of_a_decision_unfold_and_stay_so_while_others_come(chromium: Browser) -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two) as made:
            await made.ask(PROMPT)
            await opens(chromium, made)
            chromium.run("document.querySelector('.unfold').click()")

            def costs() -> list[list[str]]:
                return chromium.rows("#decisions .detail:not([hidden]) tbody")

            assert len(costs()) == 2
            assert "(chosen)" in costs()[0][0]
            await made.ask(PROMPT)
            shown = "return document.querySelectorAll('.unfold').length"
            await sees(chromium, lambda: chromium.run(shown) == 2, "a second decision")
            assert len(costs()) == 2
            opened = (
                "return [...document.querySelectorAll('.unfold')].map((one) => one.ariaExpanded)"
            )
            assert chromium.run(opened) == ["false", "true"]
            assert chromium.complaints() == []

    run(body())


def test_names_that_are_markup_are_shown_as_the_text_that_they_are(chromium: Browser) -> None:
    async def body() -> None:
        one = FakeEngine(HOSTILE_NAME)
        one.models = [{"id": HOSTILE_MODEL, "object": "model", "parent": None}]
        async with world(one) as made:
            assert (await made.ask(PROMPT))[0] == 200
            await opens(chromium, made)
            (row,) = chromium.rows("#instances")
            assert row[0].split("\n")[0] == HOSTILE_NAME
            assert HOSTILE_MODEL in row[0]
            chromium.run("document.querySelector('.unfold').click()")
            assert chromium.rows("#decisions > tbody")[0][2] == HOSTILE_NAME
            assert HOSTILE_NAME in chromium.text("#decisions .detail")
            assert any(HOSTILE_NAME in cell for row in chromium.rows("#tiers") for cell in row)
            made_of_it = "main img, main style, main script, main base, main b:not(.legend b)"
            assert chromium.run(f"return document.querySelectorAll('{made_of_it}').length") == 0
            assert chromium.run("return window.hacked === undefined")
            assert chromium.complaints() == []

    run(body())


def test_a_router_that_is_gone_is_said_to_be_and_shown_again_when_it_is_back(
    chromium: Browser,
) -> None:
    async def body() -> None:
        one = FakeEngine("one")
        async with world(one) as made:
            await opens(chromium, made)
            await made.server.close()
            await sees(chromium, lambda: "lost" in chromium.text("#connection"), "the loss")
            assert "cannot be reached" in chromium.text("#notice")
            assert "The figures are those of" in chromium.text("#notice")
            assert chromium.run("return document.body.classList.contains('lost')")
            assert names_and_states(chromium) == {"one": "live"}
            again = RouterServer(
                router_config({**QUICK, "port": made.server.port, "instances": [one.config()]}), {}
            )
            await again.start()
            try:
                await sees(chromium, lambda: "Live" in chromium.text("#connection"), "its return")
                assert chromium.text("#notice") == ""
                assert chromium.run(MARKED)
            finally:
                await again.close()

    run(body())


def test_a_key_is_asked_for_sent_as_a_header_and_kept_in_this_tab_only(chromium: Browser) -> None:
    async def body() -> None:
        keys = {"security": {"admin_key_env": "ADMIN"}}
        async with world(FakeEngine("one"), environ={"ADMIN": "admin-secret"}, **keys) as made:
            await asyncio.to_thread(chromium.open, f"{made.url}/dashboard")
            await sees(chromium, lambda: "Admin key" in chromium.text("#key-form"), "the question")
            assert chromium.text("main") == ""

            def give(key: str) -> None:
                field = chromium.chrome.find_element("id", "key")
                field.send_keys(key)
                field.submit()

            await asyncio.to_thread(give, "wrong")
            await sees(chromium, lambda: "not take" in chromium.text("#notice"), "the refusal")
            await asyncio.to_thread(give, "admin-secret")
            await sees(chromium, lambda: names_and_states(chromium) == {"one": "live"}, "it all")
            assert chromium.text("#notice") == chromium.text("#key-form") == ""
            assert chromium.run("return location.href + document.cookie") == f"{made.url}/dashboard"
            assert chromium.run("return localStorage.length") == 0
            assert "admin-secret" not in chromium.run("return document.documentElement.outerHTML")
            await asyncio.to_thread(chromium.chrome.refresh)
            await sees(chromium, lambda: names_and_states(chromium) == {"one": "live"}, "it again")

    run(body())


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_but_wide_tables_needs_scrolling_sideways(chromium: Browser, width: int) -> None:
    async def body() -> None:
        engines = [FakeEngine(name) for name in ("one", "n" * 100)]
        async with world(*engines) as made:
            await made.ask(PROMPT)
            size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            chromium.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            try:
                await opens(chromium, made)
                assert chromium.run("return document.documentElement.scrollWidth") <= width
                assert chromium.run("return document.querySelector('svg').clientWidth") > 200
            finally:
                chromium.chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    run(body())
