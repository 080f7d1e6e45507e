"""Requests through the router to fake engines with real events, and their answers back."""

import asyncio
import json

import aiohttp
from fake_engine import BLOCK_TOKENS, FakeEngine
from router_world import eventually, run, world

PROMPT = list(range(320))


def test_a_prompt_goes_where_the_events_say_that_it_is() -> None:
    async def body() -> None:
        async with world(FakeEngine("one"), FakeEngine("two")) as made:
            for engine in reversed(made.engines):
                tokens = [*PROMPT, ord(engine.name[0])]
                engine.store(tokens)
                await made.knows(engine, tokens)
                status, worker, answer = await made.ask(tokens)
                assert (status, worker) == (200, engine.name)
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 320
            made.assert_nothing_is_counted()

    run(body())


def test_bodies_headers_and_queries_pass_as_they_came() -> None:
    """What an engine gets is what the client sent, whatever a JSON library would make of it."""
    raw = b'{ "prompt" :[1,2,3], "z":1e2,"a":"\\u00e9\xc3\xa9" , "dup":1,"dup":2 }\n'

    async def body() -> None:
        async with world(FakeEngine("one")) as made:
            headers = [
                ("X-Twice", "1"),
                ("X-Twice", "2"),
                ("X-Odd", "a  b"),
                ("Connection", "X-Hop"),
            ]
            headers += [
                ("X-Hop", "no"),
                ("TE", "trailers"),
                ("Authorization", "Bearer of-the-engine"),
            ]
            async with made.client.post(
                made.url + "/v1/completions?a=%2F&b", data=raw, headers=headers
            ) as answer:
                assert answer.status == 200
                assert answer.headers["X-Opal-Worker"] == "one"
                assert answer.headers["X-Opal-Expected-Tokens"] == "0"
            path, got, sent = made.engines[0].seen[-1]
            assert path == "/v1/completions"
            assert sent == raw
            plain = [(name, value) for name, value in got if name.lower().startswith(b"x-")]
            assert plain == [(b"X-Twice", b"1"), (b"X-Twice", b"2"), (b"X-Odd", b"a  b")]
            named = {name.lower(): value for name, value in got}
            assert named[b"authorization"] == b"Bearer of-the-engine"
            assert named[b"content-length"] == str(len(raw)).encode()
            assert named[b"host"] == made.engines[0].url.removeprefix("http://").encode()
            assert b"te" not in named

    run(body())


def test_an_answer_passes_as_it_came() -> None:
    async def body() -> None:
        async with world(FakeEngine("one")) as made:
            asked = {"prompt": PROMPT, "max_tokens": 3}
            direct = await made.client.post(made.engines[0].url + "/v1/completions", json=asked)
            through = await made.post(asked)
            assert json.loads(await direct.read())["choices"] == (await through.json())["choices"]
            own = {"X-Opal-Worker", "X-Opal-Expected-Tokens"}
            assert set(through.headers) - own == set(direct.headers)
            assert through.headers["Content-Type"] == direct.headers["Content-Type"]
            made.engines[0].fault = 500
            broken = await made.post(asked)
            assert (broken.status, await broken.json()) == (500, {"error": {"message": "no"}})

    run(body())


def test_a_stream_is_handed_on_as_it_is_made_and_is_the_same() -> None:
    """The first token is at the client long before the engine has made the second one."""

    async def body() -> None:
        engine = FakeEngine("one")
        async with world(engine) as made:
            asked = {"prompt": PROMPT, "max_tokens": 3, "stream": True}
            direct = await made.client.post(engine.url + "/v1/completions", json=asked)
            expected = await direct.read()
            engine.step = asyncio.Semaphore(1)
            async with made.post(asked) as answer:
                got = b""
                for number in range(3):
                    while f'"t{number}"'.encode() not in got:
                        got += await asyncio.wait_for(answer.content.readany(), 5)
                    assert f'"t{number + 1}"'.encode() not in got
                    engine.step.release()
                got += await answer.read()
            usage = b'"cached_tokens": %d' % (len(PROMPT) - BLOCK_TOKENS)
            assert got.replace(usage, b'"cached_tokens": 0') == expected
            made.assert_nothing_is_counted()

    run(body())


def test_every_path_is_forwarded_and_others_are_not() -> None:
    async def body() -> None:
        async with world(FakeEngine("one")) as made:
            chat = {"messages": [{"role": "user", "content": "hello"}]}
            for path, asked in (
                ("/v1/chat/completions", chat),
                ("/v1/responses", {"input": "hello"}),
                ("/v1/embeddings", {"input": "hello"}),
                ("/tokenize", {"prompt": "hello"}),
                ("/detokenize", {"tokens": [1]}),
            ):
                async with made.post(asked, path) as answer:
                    assert (answer.status, made.engines[0].seen[-1][0]) == (200, path)
            for path in ("/v1/completions/", "/admin", "/reset_prefix_cache"):
                async with made.post({}, path) as answer:
                    assert answer.status == 404
                    assert (await answer.json())["error"]["code"] == 404
            async with made.client.get(made.url + "/v1/completions") as answer:
                assert (answer.status, answer.headers["Allow"]) == (405, "POST")
            for path in ("/health", "/ready"):
                async with made.client.get(made.url + path) as answer:
                    assert answer.status == 200

    run(body())


def test_models_are_the_union_and_decide_who_is_asked() -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two", model="other")
        async with world(one, two) as made:
            async with made.client.get(made.url + "/v1/models") as answer:
                found = await answer.json()
            assert [model["id"] for model in found["data"]] == [one.model, "other"]
            for engine in (one, two):
                for _ in range(4):
                    assert (await made.ask(PROMPT, model=engine.model))[1] == engine.name
            assert (await made.ask(PROMPT, model="unheard-of"))[0] == 200  # an engine's to judge

    run(body())


def test_a_header_overrides_the_policy_and_a_wrong_one_is_refused() -> None:
    async def body() -> None:
        async with world(FakeEngine("one"), FakeEngine("two")) as made:
            made.engines[0].store(PROMPT)
            await made.knows(made.engines[0], PROMPT)
            workers = []
            for _ in range(4):
                async with made.post(
                    {"prompt": PROMPT}, headers={"X-Opal-Policy": "roundrobin"}
                ) as answer:
                    workers.append(answer.headers["X-Opal-Worker"])
            assert workers == ["one", "two", "one", "two"]
            async with made.post({"prompt": PROMPT}, headers={"X-Opal-Policy": "best"}) as answer:
                assert answer.status == 400
                assert "RoundRobin" in (await answer.json())["error"]["message"]
            made.assert_nothing_is_counted()

    run(body())


def test_a_session_stays_whether_a_header_or_the_body_names_it() -> None:
    async def body() -> None:
        engines = FakeEngine("one"), FakeEngine("two"), FakeEngine("three")
        async with world(*engines, policy="Random", affinity={"mode": "hard"}) as made:
            by_header = set()
            for number in range(8):
                async with made.post(
                    {"prompt": [number] * 40}, headers={"X-Session-ID": "a"}
                ) as answer:
                    by_header.add(answer.headers["X-Opal-Worker"])
            by_user = {(await made.ask([number] * 40, user="b"))[1] for number in range(8)}
            free = {(await made.ask([number] * 40))[1] for number in range(40)}
            assert (len(by_header), len(by_user)) == (1, 1)
            assert len(free) > 1

    run(body())


def test_a_data_parallel_rank_is_told_to_the_engine() -> None:
    """One server, two channels: the ranks are workers of their own behind one address."""

    async def body() -> None:
        zero, first = FakeEngine("dp"), FakeEngine("dp/dp1")
        await first.start()
        try:
            async with world(zero, instances=[]) as made:
                from opal_connector.cluster.router.config import instance_config

                both = zero.config(events=[zero.events, first.events])
                instance = await made.core.add(instance_config(both))
                await eventually(lambda: instance.worker_ids == ("dp", "dp/dp1"))
                await eventually(lambda: set(made.core.index.workers) == {"dp", "dp/dp1"})
                first.store(PROMPT)
                await made.knows(first, PROMPT)
                assert (await made.ask(PROMPT))[1] == "dp/dp1"
                headers = dict(zero.seen[-1][1])
                assert headers[b"X-data-parallel-rank"] == b"1"
                zero.store(list(range(1000, 1400)))
                await made.knows(zero, list(range(1000, 1400)))
                assert (await made.ask(list(range(1000, 1400))))[1] == "dp"
                assert dict(zero.seen[-1][1])[b"X-data-parallel-rank"] == b"0"
        finally:
            await first.close()

    run(body())


def test_text_and_chats_are_routed_by_the_engines_own_tokens() -> None:
    async def body() -> None:
        async with world(FakeEngine("one"), FakeEngine("two")) as made:
            text = "a long prompt " * 30
            messages = [{"role": "user", "content": text}]
            chat_tokens = list(f"user:{text}\n".encode())
            two = made.engines[1]
            for tokens in (list(text.encode()), chat_tokens):
                two.store(tokens)
                await made.knows(two, tokens)
            for _ in range(3):
                for path, asked in (
                    ("/v1/completions", {"prompt": text}),
                    ("/v1/chat/completions", {"messages": messages}),
                ):
                    async with made.post(asked, path) as answer:
                        assert answer.headers["X-Opal-Worker"] == "two"
                        assert int(answer.headers["X-Opal-Expected-Tokens"]) > 300
            asked_count = sum(
                path == "/tokenize" for engine in made.engines for path, _, _ in engine.seen
            )
            assert asked_count == 2  # the others were remembered

    run(body())


def test_an_engine_that_does_not_split_prompts_in_time_costs_tokens_only() -> None:
    async def body() -> None:
        engine = FakeEngine("one")
        async with world(engine, tokens={"timeout_seconds": 0.05}) as made:
            engine.tokenize_seconds = 30.0
            async with made.post({"prompt": "text"}) as answer:
                assert answer.status == 200
                assert "X-Opal-Expected-Tokens" not in answer.headers
            assert made.core.engine_tokens.counts["timeout"] == 1
            assert made.core.forwarder.counts["tokens", "unknown"] == 1

    run(body())


def test_pictures_are_routed_by_load_because_tokens_do_not_tell_them_apart() -> None:
    async def body() -> None:
        async with world(FakeEngine("one")) as made:
            picture = {"type": "image_url", "image_url": {"url": "data:,"}}
            asked = {"messages": [{"role": "user", "content": [picture]}]}
            async with made.post(asked, "/v1/chat/completions") as answer:
                assert answer.status == 200
            assert all(path != "/tokenize" for path, _, _ in made.engines[0].seen)

    run(body())


def test_figures_are_text_for_prometheus() -> None:
    async def body() -> None:
        async with world(FakeEngine("one")) as made:
            for _ in range(2):
                await made.ask(PROMPT)
            async with made.client.get(made.url + "/metrics") as answer:
                text = await answer.text()
            assert 'opal_router_answers_total{status="200"} 2.0' in text
            assert 'opal_router_decisions_total{reason="Balanced",worker="one"} 2.0' in text
            assert 'opal_router_audit_requests_total{worker="one"} 2.0' in text
            assert 'opal_router_first_byte_seconds_bucket{le="+Inf"} 2.0' in text
            assert 'opal_router_source_state{source="' in text

    run(body())


def test_a_client_that_asks_before_it_sends_a_body_may() -> None:
    async def body() -> None:
        async with (
            world(FakeEngine("one")) as made,
            made.client.post(
                made.url + "/v1/completions", json={"prompt": PROMPT}, expect100=True
            ) as answer,
        ):
            assert answer.status == 200

    run(body())


def test_a_chunked_request_and_a_kept_connection_work() -> None:
    async def chunks() -> "aiohttp.typedefs.AsyncIterable[bytes]":  # type: ignore[name-defined]
        yield b'{"prompt": [1, 2'
        yield b", 3]}"

    async def body() -> None:
        async with world(FakeEngine("one")) as made:
            for _ in range(3):
                async with made.client.post(made.url + "/v1/completions", data=chunks()) as answer:
                    assert answer.status == 200
            assert made.engines[0].seen[-1][2] == b'{"prompt": [1, 2, 3]}'

    run(body())
