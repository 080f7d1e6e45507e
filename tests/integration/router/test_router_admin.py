"""What an administrator sees and changes, and who that is."""

import asyncio
from typing import Any

import pytest
from fake_engine import FakeEngine
from router_world import World, eventually, run, world

PROMPT = list(range(320))
KEYS = {"security": {"api_key_env": "DATA", "admin_key_env": "ADMIN"}}
ENVIRON = {"DATA": "data-secret", "ADMIN": "admin-secret", "ENGINE": "engine-secret"}
ADMIN = {"X-Opal-Admin-Key": "admin-secret"}
PATHS = [
    ("GET", "/admin/instances"),
    ("POST", "/admin/instances"),
    ("DELETE", "/admin/instances?name=one"),
    ("POST", "/admin/instances/drain"),
    ("POST", "/admin/policy"),
    ("GET", "/admin/state"),
    ("POST", "/route"),
]


async def call(
    made: World, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    async with made.client.request(
        method, made.url + path, json=body, headers=headers or None
    ) as answer:
        return answer.status, await answer.json()


def test_instances_come_and_go_while_it_runs() -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        await two.start()
        try:
            async with world(one) as made:
                status, facts = await call(made, "POST", "/admin/instances", two.config())
                assert (status, facts["name"], facts["health"]) == (201, "two", "up")
                two.store(PROMPT)
                await made.knows(two, PROMPT)
                assert (await made.ask(PROMPT))[:2] == (200, "two")
                status, facts = await call(made, "POST", "/admin/instances", two.config())
                assert status == 409
                status, facts = await call(made, "DELETE", "/admin/instances?name=two")
                assert (status, facts) == (200, {"removed": "two", "all_ended": True})
                assert "two" not in made.core.index.workers
                assert (await made.ask(PROMPT))[:2] == (200, "one")
                assert (await call(made, "DELETE", "/admin/instances?name=two"))[0] == 404
                status, facts = await call(made, "GET", "/admin/instances")
                assert [found["name"] for found in facts["instances"]] == ["one"]
                made.assert_nothing_is_counted()
        finally:
            await two.close()

    run(body())


def test_an_instance_that_is_wrong_is_refused_with_a_sentence() -> None:
    async def body() -> None:
        async with world(FakeEngine("one")) as made:
            for given, text in (
                ({"url": "ftp://a"}, "url: found 'ftp://a'"),
                ({"url": "http://a:1", "evnts": "x"}, "evnts: unknown field"),
                ({"url": "http://a:1", "events": "tcp://*:1"}, "events: found 'tcp://*:1'"),
                ({"url": "http://a:1", "api_key_env": "NOT_SET"}, "NOT_SET"),
                ([], "JSON object"),
            ):
                status, answer = await call(made, "POST", "/admin/instances", given)
                assert status == 400
                assert text in answer["error"]["message"]
            assert len(made.core.fleet) == 1

    run(body())


def test_an_instance_drains_while_its_requests_end() -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two) as made:
            one.store(PROMPT)
            await made.knows(one, PROMPT)
            one.step = asyncio.Semaphore(0)

            async def stream() -> str:
                async with made.post({"prompt": PROMPT, "stream": True}) as answer:
                    await answer.read()
                    return answer.headers["X-Opal-Worker"]

            under_way = asyncio.ensure_future(stream())
            await eventually(lambda: one.running == 1)
            draining = asyncio.ensure_future(
                call(made, "POST", "/admin/instances/drain", {"name": "one"})
            )
            instance = made.core.fleet.get("one")
            assert instance is not None
            await eventually(lambda: instance.is_draining)
            assert (await made.ask(PROMPT))[:2] == (200, "two")
            for _ in range(10):
                one.step.release()
            assert await under_way == "one"
            assert (await draining)[1]["all_ended"]
            await call(made, "POST", "/admin/instances/resume", {"name": "one"})
            one.step = None
            assert (await made.ask(PROMPT))[0] == 200
            made.assert_nothing_is_counted()

    run(body())


def test_a_removed_instance_leaves_nothing_behind_even_with_requests_under_way() -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two) as made:
            one.store(PROMPT)
            await made.knows(one, PROMPT)
            one.fault = "hang"
            waiting = asyncio.ensure_future(made.ask(PROMPT))
            await eventually(lambda: one.running == 1)
            assert (await call(made, "DELETE", "/admin/instances?name=one&now=true"))[0] == 200
            assert len(made.core.router.loads) == 0
            waiting.cancel()
            await eventually(lambda: made.core.forwarder.under_way == 0)
            made.assert_nothing_is_counted()
            made.core.index.check()

    run(body())


def test_the_policy_can_be_changed_and_only_to_one_that_exists() -> None:
    async def body() -> None:
        async with world(FakeEngine("one"), FakeEngine("two")) as made:
            assert (await call(made, "POST", "/admin/policy", {"policy": "RoundRobin"}))[0] == 200
            assert [(await made.ask(PROMPT, user=str(n)))[1] for n in range(4)] == [
                "one",
                "two",
            ] * 2
            for wrong in ("Best", None, 7):
                assert (await call(made, "POST", "/admin/policy", {"policy": wrong}))[0] == 400
            assert made.core.router.policy_name == "RoundRobin"

    run(body())


def test_a_dry_run_explains_and_changes_nothing() -> None:
    async def body() -> None:
        async with world(FakeEngine("one"), FakeEngine("two")) as made:
            made.engines[1].store(PROMPT)
            await made.knows(made.engines[1], PROMPT)
            asked = {"prompt": PROMPT}
            status, answer = await call(made, "POST", "/route?path=/v1/completions", asked)
            assert status == 200
            assert (answer["choice"], answer["reason"]) == ("two", "Balanced")
            assert (answer["prompt_tokens"], answer["expected_tokens"]) == (320, 320)
            assert answer["workers"]["two"]["match"]["device_tokens"] == 320
            one, two = (answer["workers"][name]["cost"] for name in ("one", "two"))
            assert one["compute_seconds"] > two["compute_seconds"]
            assert one["weighted_seconds"] > two["weighted_seconds"]
            for _ in range(3):
                headers = {"X-Opal-Policy": "RoundRobin"}
                _, answer = await call(made, "POST", "/route", asked, **headers)
                assert (answer["choice"], answer["policy"]) == ("one", "RoundRobin")
            assert not any(path == "/v1/completions" for path, _, _ in made.engines[1].seen)
            made.engines[0].health_status = 500
            await eventually(lambda: len(_taking(made)) == 1)
            _, answer = await call(made, "POST", "/route", asked)
            assert [found["name"] for found in answer["not_taking"]] == ["one"]
            made.assert_nothing_is_counted()

    run(body())


def _taking(made: World) -> list[str]:
    import time

    return [one.name for one in made.core.fleet if one.is_well(time.monotonic())]


def test_the_state_names_everything_and_no_secret() -> None:
    async def body() -> None:
        one = FakeEngine("one")
        await one.start()
        try:
            instances = [one.config(api_key_env="ENGINE")]
            async with world(environ=ENVIRON, instances=instances, **KEYS) as made:
                await made.settled()
                await made.client.post(
                    made.url + "/v1/completions",
                    json={"prompt": PROMPT},
                    headers={"Authorization": "Bearer data-secret"},
                )
                await eventually(lambda: made.core.index.workers["one"].system is not None)
                status, state = await call(made, "GET", "/admin/state", **ADMIN)
                assert status == 200
                assert state["workers"]["one"]["system"]["prefill_tokens_per_second"] == 200_000.0
                assert state["audit"]["one"]["requests"] == 1
                assert state["sources"][0]["state"] == "live"
                assert "secret" not in str(state)
                got = dict(one.seen[-1][1])
                assert got[b"Authorization"] == b"Bearer engine-secret"
        finally:
            await one.close()

    run(body())


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_the_admins_paths_need_the_admins_key_and_no_other(method: str, path: str) -> None:
    async def body() -> None:
        async with world(FakeEngine("one"), environ=ENVIRON, **KEYS) as made:
            for headers in (
                {},
                {"X-Opal-Admin-Key": "wrong"},
                {"X-Opal-Admin-Key": "data-secret"},
                {"Authorization": "Bearer admin-secret"},
                {"X-Opal-Admin-Key": "\u00e4"},
            ):
                status, answer = await call(made, method, path, {}, **headers)
                assert (status, answer["error"]["type"]) == (401, "authentication_error")
            assert len(made.core.fleet) == 1

    run(body())


def test_without_an_admins_key_only_this_machine_may_and_no_page_in_its_browser() -> None:
    async def body() -> None:
        async with world(FakeEngine("one")) as made:
            assert (await call(made, "GET", "/admin/state"))[0] == 200
            for headers in (
                {"Origin": "http://evil.example"},
                {"X-Forwarded-For": "10.0.0.1"},
                {"Host": "evil.example"},
                {"Host": "[::1"},
            ):
                assert (await call(made, "GET", "/admin/state", **headers))[0] == 403

    run(body())


def test_without_an_admins_key_a_router_that_others_reach_has_no_admin() -> None:
    async def body() -> None:
        async with world(FakeEngine("one"), host="0.0.0.0") as made:
            assert (await call(made, "GET", "/admin/state"))[0] == 403
            assert (await made.ask(PROMPT))[0] == 200

    run(body())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_clients_need_the_clients_key_and_engines_never_see_it(path: str) -> None:
    async def body() -> None:
        async with world(FakeEngine("one"), environ=ENVIRON, **KEYS) as made:
            for header in (
                None,
                "data-secret",
                "Basic data-secret",
                "Bearer admin-secret",
                "Bearer ",
            ):
                headers = {} if header is None else {"Authorization": header}
                assert (await call(made, "POST", path, {"prompt": PROMPT}, **headers))[0] == 401
            assert (await call(made, "GET", "/v1/models"))[0] == 401
            assert not made.engines[0].seen
            for header in ("Bearer data-secret", "bearer data-secret"):
                async with made.post(
                    {"prompt": PROMPT}, path, headers={"Authorization": header}
                ) as a:
                    assert a.status == 200
            assert all(
                name.lower() != b"authorization"
                for _, headers, _ in made.engines[0].seen
                for name, _ in headers
            )

    run(body())
