"""OpenAI's own client through the router to real servers; their answers, direct and through it."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openai")

import httpx
import openai
from router_engines import ADAPTER, PATIENT, RouterEngine
from router_thread import RunningRouter, running_router

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

KEY = "a-key-of-the-router"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You answer in one word, and never in two. " * 4},
    {"role": "user", "content": "What is red?"},
]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
CHAT = {"model": "model", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
CALL = {**CHAT, "max_tokens": 200, "tools": [TOOL], "tool_choice": NAMED}
RESPONSE = {
    "model": "model",
    "input": "What is red?",
    "instructions": "You answer in one word.",
    "max_output_tokens": 8,
    "temperature": 0,
}
TEXT = {"model": "model", "prompt": "Once upon a time " * 5, "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def router(engines: dict[str, RouterEngine]) -> Iterator[RunningRouter]:
    """In front of the two servers with Opal; clients need a key."""
    given = {
        **PATIENT,
        "instances": [engines["one"].config, engines["two"].config],
        "security": {"api_key_env": "DATA"},
        "tokens": {"timeout_seconds": 20.0},
    }
    with running_router(given, {"DATA": KEY}) as running:
        yield running


@pytest.fixture(scope="module")
def client(router: RunningRouter) -> Iterator[openai.OpenAI]:
    """As its users make it; failures are seen at once."""
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(
        base_url=f"{router.url}/v1", api_key=KEY, max_retries=0, http_client=http
    ) as made:
        yield made


# ---- the same answers ----

# What differs between two equal requests to one engine: names, times, and where its cache had it.
_OWN = re.compile(
    r'"(?:id|item_id|response_id|call_id|created|created_at|completed_at)":\s*(?:"[^"]*"|[0-9.]+)'
    r'|"(?:created_cache_tokens|cache_write_tokens|stored_tokens)":\s*(?:[0-9]+|null)'
    r'|"(?:hit_tokens|kv_transfer_params)":\s*\{[^{}]*\}'
)


def _plain(text: str) -> str:
    previous = ""
    while text != previous:
        previous, text = text, _OWN.sub('"own": 0', text)
    return text


def _told(text: str) -> list[Any]:
    """What a stream says, whatever tokens an engine that is busy puts into one event."""
    lines = [line for line in text.splitlines() if line]
    events = [json.loads(line[5:]) for line in lines if line.startswith("data: {")]
    said, kinds = "", []
    for event in events:
        said += "".join(
            re.findall(
                r'"(?:content|text|arguments|delta)": "((?:[^"\\]|\\.)*)"', json.dumps(event)
            )
        )
        kind = event.get("type", event.get("object"))
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    return [said, kinds, events[-1].get("usage"), lines[-1] == "data: [DONE]"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        (
            "/v1/chat/completions",
            {**CHAT, "stream": True, "stream_options": {"include_usage": True}},
        ),
        ("/v1/chat/completions", CALL),
        ("/v1/chat/completions", {**CALL, "stream": True}),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "auto"}),
        ("/v1/chat/completions", {**CHAT, "n": 2, "temperature": 1, "seed": 5}),
        ("/v1/completions", TEXT),
        ("/v1/completions", {**TEXT, "stream": True}),
        ("/v1/completions", {**TEXT, "prompt": list(range(32, 120)), "echo": True}),
        ("/v1/completions", {**TEXT, "prompt": ["first", "second"]}),
        ("/v1/completions", {**TEXT, "model": ADAPTER}),
        ("/v1/responses", RESPONSE),
        ("/v1/responses", {**RESPONSE, "stream": True}),
        ("/v1/responses", {**RESPONSE, "input": MESSAGES}),
        ("/tokenize", {"model": "model", "messages": MESSAGES}),
        ("/detokenize", {"model": "model", "tokens": [72, 105]}),
        # what is wrong is the engine's to say
        ("/v1/chat/completions", {**CHAT, "model": "unheard-of"}),
        ("/v1/chat/completions", {"model": "model"}),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 1 << 20}),
        ("/v1/chat/completions", {**CHAT, "temperature": "hot"}),
        ("/v1/completions", {**TEXT, "prompt": [1 << 20]}),
        ("/v1/completions", {**TEXT, "prompt": []}),
        ("/v1/responses", {**RESPONSE, "previous_response_id": "resp_unheard_of"}),
        ("/v1/embeddings", {"model": "model", "input": "hello"}),
        ("/v1/completions", b'{"model": "model", "prompt": '),
    ],
    ids=range(27),
)
def test_an_answer_through_the_router_is_the_engines_own(
    engines: dict[str, RouterEngine], router: RunningRouter, path: str, body: Any
) -> None:
    """Status, kind and everything that does not name the one request are equal."""
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for engine in engines.values():  # all have it in their caches then
        engine.server.http.post(path, **given)
    with httpx.Client(trust_env=False, timeout=60) as http:
        through = http.post(router.url + path, headers=headers, **given)
    asked = engines[through.headers["X-Opal-Worker"]]
    direct = asked.server.http.post(path, headers=headers, **given)
    assert through.status_code == direct.status_code
    assert through.headers["Content-Type"] == direct.headers["Content-Type"]
    if through.headers["Content-Type"].startswith("text/event-stream"):
        assert _told(_plain(through.text)) == _told(_plain(direct.text))
    else:
        assert _plain(through.text) == _plain(direct.text)


def test_models_are_those_of_the_engines(
    engines: dict[str, RouterEngine], client: openai.OpenAI
) -> None:
    direct = engines["one"].server.http.get("/v1/models").json()
    assert [model.id for model in client.models.list()] == [one["id"] for one in direct["data"]]
    of_router = client.models.list().data[0].model_dump(exclude_unset=True)
    assert of_router.keys() == direct["data"][0].keys()
    assert of_router["max_model_len"] == direct["data"][0]["max_model_len"]


# ---- the client ----


def test_a_chat_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
    text = whole.choices[0].message.content
    assert whole.usage.prompt_tokens > 100
    assert text
    pieces = client.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}
    )  # type: ignore[call-overload]
    chunks = list(pieces)
    said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len(said) > 2
    assert "".join(said) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_tool_is_called_whole_and_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CALL)  # type: ignore[call-overload]
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in {"Rome", "Oslo"}
    with client.chat.completions.stream(**CALL) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or ()
    assert streamed.function.name == "weather"
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)
    answered = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    after = client.chat.completions.create(
        **{**CALL, "messages": answered, "tool_choice": "none", "max_tokens": 4}
    )
    assert after.choices[0].finish_reason == "length"


def test_completions_and_responses(client: openai.OpenAI) -> None:
    whole = client.completions.create(**TEXT)  # type: ignore[call-overload]
    pieces = client.completions.create(**TEXT, stream=True)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in pieces) == whole.choices[0].text
    answer = client.responses.create(**RESPONSE)  # type: ignore[call-overload]
    assert answer.output_text
    events = list(client.responses.create(**RESPONSE, stream=True))  # type: ignore[call-overload]
    said = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    assert said == answer.output_text


def test_errors_are_those_that_the_client_knows(
    client: openai.OpenAI, router: RunningRouter
) -> None:
    with pytest.raises(openai.NotFoundError, match="unheard-of"):
        client.chat.completions.create(**{**CHAT, "model": "unheard-of"})
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.chat.completions.create(**{**CHAT, "max_tokens": 1 << 20})
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="model", input="hello")
    for key in ("a-wrong-key", "sk-" + KEY):
        with pytest.raises(openai.AuthenticationError) as caught:
            client.with_options(api_key=key).chat.completions.create(**CHAT)  # type: ignore[call-overload]
        assert caught.value.body["type"] == "authentication_error"  # type: ignore[index, call-overload]
        assert key not in str(caught.value)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    router.idle()


def test_a_client_that_closes_a_stream_ends_the_work(
    engines: dict[str, RouterEngine], client: openai.OpenAI, router: RunningRouter
) -> None:
    """The engine stops long before it would have made all tokens."""
    asked = {**CHAT, "max_tokens": 1_800, "stream": True, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.with_raw_response.create(**asked)  # type: ignore[call-overload]
    owner = engines[answer.headers["X-Opal-Worker"]].server
    stream = answer.parse()
    next(iter(stream))
    assert _running(owner) == 1
    before = _generated(owner)
    stream.close()
    router.idle()
    router.until(lambda _: not _running(owner), "the engine to stop")
    assert _generated(owner) - before < 1_500


def _running(server: Any) -> float:
    return float(server.metrics().total("vllm:num_requests_running"))


def _generated(server: Any) -> float:
    return float(server.metrics().total("vllm:generation_tokens_total"))


def test_the_asynchronous_client_does_the_same_at_once(router: RunningRouter) -> None:
    async def body() -> None:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{router.url}/v1", api_key=KEY, max_retries=0, http_client=http
        ) as client:
            whole, text, response, call, stream = await asyncio.gather(
                client.chat.completions.create(**CHAT),  # type: ignore[call-overload]
                client.completions.create(**TEXT),  # type: ignore[call-overload]
                client.responses.create(**RESPONSE),  # type: ignore[call-overload]
                client.chat.completions.create(**CALL),  # type: ignore[call-overload]
                client.chat.completions.create(**CHAT, stream=True),  # type: ignore[call-overload]
            )
            said = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(said) == whole.choices[0].message.content
            assert text.choices[0].text
            assert response.output_text
            assert call.choices[0].message.tool_calls[0].function.name == "weather"
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(**{**CHAT, "model": "unheard-of"})
            assert ADAPTER in [model.id async for model in client.models.list()]

    asyncio.run(asyncio.wait_for(body(), 120))
    router.idle()
