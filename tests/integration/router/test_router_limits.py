"""What is too much, what is odd, and what must not be said."""

import asyncio
import gzip
import json
import logging

import pytest
from fake_engine import FakeEngine
from router_world import run, world

PROMPT = list(range(320))


def test_a_body_that_is_too_large_is_refused_and_a_large_one_passes() -> None:
    async def body() -> None:
        one = FakeEngine("one")
        async with world(one, limits={"max_body": "1MiB"}) as made:
            for data in (b" " * (1 << 20) + b"{}", _chunks()):
                async with made.client.post(made.url + "/v1/completions", data=data) as answer:
                    assert answer.status == 413
            assert not one.seen
            large = json.dumps({"prompt": [7] * 100_000, "x": "y" * 500_000}).encode()
            async with made.post(large) as answer:
                assert answer.status == 200
            assert one.seen[-1][2] == large
            made.assert_nothing_is_counted()

    run(body())


async def _chunks():  # type: ignore[no-untyped-def]
    for _ in range(64):
        yield b" " * 32_768


def test_headers_that_are_too_large_are_refused() -> None:
    async def body() -> None:
        async with world(FakeEngine("one"), limits={"max_header": "16KiB"}) as made:
            for size, status in ((8_000, 200), (100_000, 400)):
                async with made.post({"prompt": PROMPT}, headers={"X-A": "a" * size}) as answer:
                    assert answer.status == status

    run(body())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1, 2]",
        b'"text"',
        b"[" * 200_000,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x": ' + b'{"a":' * 100_000,
        b'{"prompt": [1, "a"], "model": 7, "user": [], "cache_salt": {}}',
        b'{"prompt": [-1, 99999999999999999999]}',
        b'{"prompt": [[1], [2]]}',
        b'{"messages": 7}',
    ],
    ids=range(12),
)
def test_what_is_no_request_is_the_engines_to_judge(raw: bytes) -> None:
    """It is passed on untouched and routed by load; nothing of the router breaks."""

    async def body() -> None:
        one = FakeEngine("one")
        one.is_judge = True
        async with world(one) as made:
            for path in ("/v1/completions", "/v1/chat/completions"):
                async with made.post(raw, path) as answer:
                    assert answer.status == 400
                    assert (await answer.json())["error"]["message"] == "bad request"
                assert one.seen[-1][::2] == (path, raw)
            made.assert_nothing_is_counted()

    run(body())


def test_neither_keys_nor_prompts_nor_sessions_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At the level of DEBUG, whatever goes wrong with a request or its tokens."""

    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        keys = {"security": {"api_key_env": "DATA", "admin_key_env": "ADMIN"}}
        environ = {"DATA": "data-secret", "ADMIN": "admin-secret"}
        async with world(one, two, environ=environ, **keys) as made:
            headers = {"Authorization": "Bearer data-secret", "X-Opal-Admin-Key": "admin-secret"}
            headers["X-Session-ID"] = "private-session"
            words = "my private words"
            asked = {"prompt": words, "user": "private person", "cache_salt": "private salt"}
            chat = {"messages": [{"role": "user", "content": words}], "tools": [{"private": 1}]}
            response = {"input": words, "instructions": words, "reasoning": {"effort": words}}
            for fault in (None, "reset", "garbage", 500, 503):
                one.fault = two.fault = fault
                for path, raw in (
                    ("/v1/completions", json.dumps(asked).encode()),
                    ("/v1/completions", b"{my private words"),
                    ("/v1/chat/completions", json.dumps(chat).encode()),
                    ("/v1/responses", json.dumps(response).encode()),
                    ("/v1/embeddings", json.dumps({"input": words}).encode()),
                    ("/route", json.dumps(asked).encode()),
                ):
                    async with made.post(raw, path, headers=headers) as answer:
                        await answer.read()
            for line in (
                b"Authorization: Bearer data-secret\x00\r\n",
                b"Authorization: " + b"data-secret " * 10_000 + b"\r\n",
                b"Authorization data-secret\r\n",
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", made.server.port)
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + line + b"\r\n")
                assert b"400" in await reader.readline()
                writer.close()
            await one.stop_listening()
            await two.stop_listening()
            async with made.post(b'{"prompt": "my private words"}', headers=headers) as answer:
                assert answer.status >= 400
            async with made.post(b"{}", headers={"Authorization": "Bearer wrong-secret"}) as answer:
                assert answer.status == 401
                assert "secret" not in await answer.text()

    with caplog.at_level(logging.DEBUG):
        run(body())
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "failed a request" in said
    assert "no HTTP" in said
    assert "secret" not in said
    assert "private" not in said


def test_a_client_that_sends_no_whole_body_leaves_nothing_behind() -> None:
    async def body() -> None:
        async with world(FakeEngine("one")) as made:
            for raw in (
                b"POST /v1/comp",
                b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",
            ):
                _, writer = await asyncio.open_connection("127.0.0.1", made.server.port)
                writer.write(raw)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
            assert (await made.ask(PROMPT))[0] == 200
            made.assert_nothing_is_counted()

    run(body())


def test_a_body_that_never_comes_is_not_waited_for() -> None:
    async def body() -> None:
        async with world(FakeEngine("one"), limits={"body_timeout_seconds": 0.1}) as made:
            reader, writer = await asyncio.open_connection("127.0.0.1", made.server.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
            assert b"408" in await reader.readline()
            writer.close()
            made.assert_nothing_is_counted()

    run(body())


def test_a_compressed_body_is_passed_on_compressed() -> None:
    async def body() -> None:
        one = FakeEngine("one")
        one.is_judge = True
        async with world(one) as made:
            raw = gzip.compress(b'{"prompt": [1, 2, 3]}')
            headers = {"Content-Encoding": "gzip"}
            async with made.post(raw, headers=headers) as answer:
                assert answer.status == 400
            got = {name.lower(): value for name, value in one.seen[-1][1]}
            assert got[b"content-encoding"] == b"gzip"
            assert int(got[b"content-length"]) == len(raw)

    run(body())
