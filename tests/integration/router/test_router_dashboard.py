"""The page over HTTP: its figures are what was done, and it says nothing that it must not."""

import asyncio
import json
import re
from importlib.resources import files
from typing import Any

import pytest
from fake_engine import BLOCK_TOKENS, DISK, FakeEngine
from router_world import World, eventually, run, world

PROMPT = list(range(321))  # twenty blocks and a token
OTHER = list(range(5_000, 5_161))
STATE = "/dashboard/state"
KEYS = {"security": {"api_key_env": "DATA", "admin_key_env": "ADMIN"}}
ENVIRON = {"DATA": "data-secret", "ADMIN": "admin-secret"}
PAGE = files("opal_connector.cluster.router") / "page"


async def state(made: World, **headers: str) -> dict[str, Any]:
    async with made.client.get(made.url + STATE, headers=headers) as answer:
        assert answer.status == 200
        return await answer.json()


async def measured(made: World) -> None:
    """Until all engines have said how they are."""
    workers = made.core.index.workers
    await eventually(lambda: all(one.system for one in workers.values()), "the heartbeats")


def instance(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["instances"] if one["name"] == name)


# ---- what it shows ----


def test_the_figures_are_those_of_the_requests_that_were_sent() -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two) as made:
            one.store_below(PROMPT)
            await made.knows(one, PROMPT)
            await measured(made)
            asked = []
            for prompt in (PROMPT, PROMPT, OTHER, PROMPT):
                asked.append((await made.ask(prompt))[1])
                await eventually(lambda: made.core.forwarder.under_way == 0)
                engine = next(engine for engine in (one, two) if engine.name == asked[-1])
                await made.knows(engine, prompt)
            found = await state(made)
            rows = list(reversed(found["decisions"]))
            assert [row["worker"] for row in rows] == asked
            assert [row["prompt_tokens"] for row in rows] == [321, 321, 161, 321]
            assert [row["number"] for row in rows] == [1, 2, 3, 4]
            assert all(row["status"] == 200 and row["is_over"] for row in rows)
            total, audit = found["since_start"], made.core.audit.workers.values()
            computed = one.prefilled_tokens + two.prefilled_tokens
            assert total["computed_tokens"] == computed
            cached = sum(row["cached_tokens"] for row in rows)
            assert cached == sum(worker.actual_tokens for worker in audit) > 0
            tiers = sum(total["tier_tokens"].values())
            assert total["device_tokens"] + tiers + total["unforeseen_tokens"] == cached
            assert computed + cached == 321 * 3 + 161
            assert total["requests"] == found["last_minute"]["requests"] == 4
            assert sum(point["period"]["requests"] for point in found["points"]) == 4
            times = sorted(row["first_byte_seconds"] for row in rows)
            assert total["first_byte_seconds"] == pytest.approx(
                [times[1], times[3], times[3]], rel=0.04
            )
            assert sum(found["counts"]["reasons"].values()) == 4
            for name in ("one", "two"):
                shown = instance(found, name)
                assert (shown["state"], shown["breaker"], shown["in_flight"]) == (
                    "live",
                    "closed",
                    0,
                )
                assert shown["prefill_tokens_per_second"] == 200_000
                assert (shown["running"], shown["waiting"]) == (0, 0)
            blocks = {(tier["name"], *tier["workers"]): tier["blocks"] for tier in found["tiers"]}
            assert blocks[DISK, "one"] == len(PROMPT) // BLOCK_TOKENS
            assert [source["state"] for source in found["sources"]] == ["live", "live"]

    run(body())


def test_every_candidate_of_a_decision_is_shown_with_what_it_would_have_cost() -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two) as made:
            one.store(PROMPT)
            await made.knows(one, PROMPT)
            await measured(made)
            await made.ask(PROMPT)
            (row,) = (await state(made))["decisions"]
            assert (row["worker"], row["reason"], row["expected_tokens"]) == (
                "one",
                "Balanced",
                320,
            )
            chosen, other = row["candidates"]
            assert (chosen["worker"], chosen["device_tokens"]) == ("one", 320)
            assert (other["worker"], other["device_tokens"]) == ("two", 0)
            assert chosen["compute_seconds"] == pytest.approx(1 / 200_000)
            assert other["compute_seconds"] == pytest.approx(321 / 200_000)
            assert chosen["weighted_seconds"] < other["weighted_seconds"]
            async with made.post({"prompt": PROMPT}, headers={"X-Opal-Policy": "roundrobin"}):
                pass
            row = (await state(made))["decisions"][0]
            assert row["reason"] == "RoundRobin"
            assert all(one["weighted_seconds"] is None for one in row["candidates"])

    run(body())


def test_a_request_is_shown_while_it_is_under_way_and_when_its_client_has_left() -> None:
    async def body() -> None:
        one = FakeEngine("one")
        async with world(one) as made:
            one.fault = "hang"
            asking = asyncio.ensure_future(made.ask(PROMPT))
            await eventually(lambda: one.running == 1)
            found = await state(made)
            (row,) = found["decisions"]
            assert (row["status"], row["is_over"], row["cached_tokens"]) == (0, False, None)
            shown = instance(found, "one")
            assert (found["under_way"], shown["in_flight"], shown["queued_tokens"]) == (1, 1, 321)
            asking.cancel()
            await eventually(lambda: made.core.forwarder.under_way == 0)
            found = await state(made)
            (row,) = found["decisions"]
            assert (row["failure"], row["is_over"]) == ("cancelled", True)
            assert found["since_start"]["faults"] == 0

    run(body())


def test_attempts_that_failed_are_shown_beside_the_one_that_did_not() -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two) as made:
            one.store(PROMPT)
            await made.knows(one, PROMPT)
            one.fault, one.fault_count = (
                "reset",
                2,
            )  # on a connection that was kept, and on a fresh one
            assert (await made.ask(PROMPT))[:2] == (200, "two")
            found = await state(made)
            last, first = found["decisions"]
            assert (first["worker"], first["failure"], first["attempt"]) == ("one", "reset", 1)
            assert (last["worker"], last["failure"], last["attempt"]) == ("two", None, 2)
            assert found["counts"]["retries"] == {"502": 1}
            assert found["counts"]["broken"] == {"reset": 1}
            assert found["since_start"]["faults"] == 1

    run(body())


def test_instances_that_drain_or_are_dead_or_held_back_by_their_breaker_are_shown_so() -> None:
    async def body() -> None:
        engines = [FakeEngine(name) for name in ("drains", "dies", "fails")]
        breaker = {"failures": 2, "open_seconds": 30.0}
        async with world(*engines, breaker=breaker) as made:
            drains = made.core.fleet.get("drains")
            assert drains is not None
            await made.core.drain(drains)
            await engines[1].stop_listening()
            engines[2].fault = "reset"
            for _ in range(2):
                await made.ask(PROMPT)
            dies = made.core.fleet.get("dies")
            assert dies is not None
            await eventually(lambda: dies.health.value == "dead")
            found = await state(made)
            assert instance(found, "drains")["state"] == "draining"
            assert instance(found, "dies")["state"] == "dead"
            assert instance(found, "dies")["prefill_tokens_per_second"] is None
            assert instance(found, "fails")["state"] in ("live", "failing")
            assert instance(found, "fails")["breaker"] == "open"
            assert not any(one["takes_requests"] for one in found["instances"])
            assert found["deaths"] == 1

    run(body())


def test_requests_whose_tokens_are_not_known_are_shown_without_an_expectation() -> None:
    async def body() -> None:
        one = FakeEngine("one", has_events=False, says_cached=False)
        async with world(one, tokens={"engine": False}) as made:
            async with made.post({"prompt": "a text", "max_tokens": 1}) as answer:
                assert answer.status == 200
            found = await state(made)
            (row,) = found["decisions"]
            assert (row["expected_tokens"], row["cached_tokens"]) == (None, None)
            assert found["since_start"]["uncounted"] == 1
            assert (found["tiers"], found["sources"]) == ([], [])
            shown = instance(found, "one")
            assert (shown["running"], shown["device_usage"], shown["trust"]) == (None, None, None)

    run(body())


def test_looking_changes_no_figure_that_is_looked_at() -> None:
    async def body() -> None:
        async with world(FakeEngine("one")) as made:
            await made.ask(PROMPT)
            before = await state(made)
            for _ in range(5):
                await state(made)
            after = await state(made)
            assert after["counts"] == before["counts"] != {}
            assert after["since_start"]["requests"] == 1

    run(body())


# ---- who may see it ----


def test_with_a_key_only_who_has_the_admins_sees_the_state_and_everybody_the_empty_page() -> None:
    async def body() -> None:
        async with world(FakeEngine("named-instance"), environ=ENVIRON, **KEYS) as made:
            for headers in (
                {},
                {"X-Opal-Admin-Key": "wrong"},
                {"X-Opal-Admin-Key": "data-secret"},
                {"Authorization": "Bearer admin-secret"},
            ):
                async with made.client.get(made.url + STATE, headers=headers) as answer:
                    assert answer.status == 401
                    assert "named-instance" not in await answer.text()
            found = await state(made, **{"X-Opal-Admin-Key": "admin-secret"})
            assert found["instances"][0]["name"] == "named-instance"
            for path in ("/dashboard", "/dashboard/app.js", "/dashboard/style.css"):
                async with made.client.get(made.url + path) as answer:
                    assert answer.status == 200
                    assert "named-instance" not in await answer.text()

    run(body())


def test_without_a_key_this_machine_sees_it_and_no_page_of_another_origin() -> None:
    async def body() -> None:
        async with world(FakeEngine("one")) as made:
            await state(made)
            for headers in (
                {"Origin": "http://elsewhere.example"},
                {"Host": "elsewhere.example"},
                {"X-Forwarded-For": "10.0.0.1"},
            ):
                async with made.client.get(made.url + STATE, headers=headers) as answer:
                    assert answer.status == 403

    run(body())


def test_neither_a_prompt_nor_an_answer_nor_a_key_is_in_the_state() -> None:
    async def body() -> None:
        one = FakeEngine("one")
        security = {"security": {**KEYS["security"]}}
        async with world(one, environ=ENVIRON, **security) as made:
            headers = {"Authorization": "Bearer data-secret", "X-Session-ID": "session-of-somebody"}
            token = 987_654_321
            for prompt in ("a most private text", [token] * 40):
                asked = {"prompt": prompt, "user": "a-user", "max_tokens": 3}
                async with made.post(asked, headers=headers) as answer:
                    assert answer.status == 200
            async with made.client.get(
                made.url + STATE, headers={"X-Opal-Admin-Key": "admin-secret"}
            ) as answer:
                text = await answer.text()
            assert len(json.loads(text)["decisions"]) == 2
            for secret in ("private", str(token), "secret", "session-of", "a-user", "xxx"):
                assert secret not in text

    run(body())


# ---- what a browser is given ----


def test_the_page_is_whole_and_lets_nothing_in_from_elsewhere() -> None:
    async def body() -> None:
        async with world(FakeEngine("one")) as made:
            for file in PAGE.iterdir():
                path = "/dashboard" if file.name == "index.html" else f"/dashboard/{file.name}"
                async with made.client.get(made.url + path) as answer:
                    assert answer.status == 200, path
                    assert await answer.read() == file.read_bytes()
                    policy = answer.headers["Content-Security-Policy"]
                    assert "default-src 'none'" in policy
                    assert "script-src 'self'" in policy
                    assert "unsafe" not in policy
                    assert answer.headers["X-Content-Type-Options"] == "nosniff"
            async with made.client.post(made.url + "/dashboard") as answer:
                assert answer.status == 405
            async with made.client.get(made.url + "/dashboard/secrets.txt") as answer:
                assert answer.status == 404

    run(body())


def test_the_page_names_no_other_host_and_never_turns_a_text_into_markup() -> None:
    allowed = {"http://www.w3.org/2000/svg"}
    for file in PAGE.iterdir():
        text = file.read_text()
        assert set(re.findall(r"\bhttps?://[^\s\"'`)]+", text)) <= allowed, file.name
        for danger in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write"):
            assert danger not in text, (file.name, danger)
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=", text), file.name
