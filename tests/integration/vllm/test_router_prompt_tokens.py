"""Tokens of prompts of every kind, as the router counts them and as a real engine does."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from router_engines import ADAPTER, PATIENT, RouterEngine
from router_thread import PATIENCE_SECONDS, RunningRouter, running_router

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
SYSTEM = {"role": "system", "content": "You answer in one word, and never in two. " * 4}
USER = {"role": "user", "content": "What is red?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": PARAMETERS, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
ANSWERED = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
BRIEF = {"model": "model", "temperature": 0}
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "What is"}]},
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "A colour.", "annotations": []}],
    },
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    {
        "type": "message",
        "role": "user",
        "content": [
            {"type": "input_text", "text": "And blue?"},
            {"type": "input_text", "text": "And green?"},
        ],
    },
]
KNOWN: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "Once upon a time " * 9}),
    (TEXT, {"prompt": "Once upon a time " * 9, "add_special_tokens": False}),
    (TEXT, {"prompt": ["Once upon a time " * 9], "model": ADAPTER}),
    (TEXT, {"prompt": list(range(100)), "echo": True}),
    (CHAT, {"messages": [SYSTEM, USER]}),
    (CHAT, {"messages": [SYSTEM, USER], "tools": [TOOL]}),
    (CHAT, {"messages": [SYSTEM, USER], "tools": [TOOL], "tool_choice": "none"}),
    (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, ANSWERED, USER]}),
    (CHAT, {"messages": [SYSTEM, USER], "reasoning_effort": "high"}),
    (CHAT, {"messages": [SYSTEM, USER], "documents": [{"title": "a", "text": "b"}]}),
    (CHAT, {"messages": [SYSTEM, USER], "add_generation_prompt": False}),
    (CHAT, {"messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    (RESPONSES, {"input": "What is red? " * 9}),
    (RESPONSES, {"input": "What is red?", "instructions": "You answer in one word. " * 5}),
    (RESPONSES, {"input": [SYSTEM, USER], "reasoning": {"effort": "low"}}),
    (RESPONSES, {"input": ITEMS, "instructions": "You answer in one word."}),
    (RESPONSES, {"input": ITEMS, "tools": [{"type": "function", **FUNCTION}]}),
]
UNKNOWN: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": ["two", "prompts"]}),
    (TEXT, {"prompt": "a " * 100, "truncate_prompt_tokens": 40}),
    (TEXT, {"prompt": "a " * 100, "prompt_logprobs": 1}),
    (TEXT, {"prompt": list(range(100)), "echo": True, "logprobs": 1}),
    (CHAT, {"messages": [SYSTEM, USER], "prompt_logprobs": 1}),
]


@pytest.fixture(scope="module", params=["engine", "local"])
def router(
    request: pytest.FixtureRequest, engines: dict[str, RouterEngine]
) -> Iterator[RunningRouter]:
    """In front of one engine, whose prompts it has split there or splits itself."""
    tokens: dict[str, Any] = {"timeout_seconds": 20.0}
    if request.param == "local":
        tokens |= {"tokenizers": {"model": str(engines["one"].model)}, "engine": False}
    given = {**PATIENT, "instances": [engines["one"].config], "tokens": tokens}
    with running_router(given) as running:
        running.until(lambda core: not core.local_tokens.unprobed, "the probes")
        yield running


@pytest.mark.parametrize(("path", "asked"), KNOWN, ids=range(len(KNOWN)))
def test_a_prompt_has_as_many_tokens_here_as_there_and_is_found_again(
    router: RunningRouter, path: str, asked: dict[str, Any]
) -> None:
    """What is expected at the second time is what was cached, to the token."""
    limit = {RESPONSES: "max_output_tokens", CHAT: "max_completion_tokens"}.get(path, "max_tokens")
    body = {**BRIEF, limit: 2, **asked}
    with httpx.Client(base_url=router.url, timeout=60, trust_env=False) as http:
        explained = http.post(f"/route?path={path}", json=body).json()
        assert explained["tokens_known"]
        _ask(http, path, body)
        expected = _until_announced(http, path, body)
        answer, cached = _ask(http, path, body)
    usage = answer["usage"]
    prompt_tokens = usage.get("input_tokens", usage.get("prompt_tokens"))
    assert explained["prompt_tokens"] == prompt_tokens
    assert expected == prompt_tokens // 32 * 32
    assert cached == (prompt_tokens - 1) // 32 * 32


def _ask(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    usage = found["usage"]
    details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details")
    return found, details["cached_tokens"]


def _until_announced(http: httpx.Client, path: str, body: dict[str, Any]) -> int:
    """The tokens that events say the engine has, once they say so."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        explained = http.post(f"/route?path={path}", json=body).json()
        if explained["expected_tokens"] and not explained["predicted_tokens"]:
            return int(explained["expected_tokens"])
        time.sleep(0.01)
    raise AssertionError("the prompt's blocks are never announced")


@pytest.mark.parametrize(("path", "asked"), UNKNOWN, ids=range(len(UNKNOWN)))
def test_a_prompt_that_the_engine_cuts_or_does_not_look_up_is_routed_by_load(
    router: RunningRouter, path: str, asked: dict[str, Any]
) -> None:
    """Nothing is expected of it, so nothing disappoints: it is counted as one that is unknown."""
    limit = "max_completion_tokens" if path == CHAT else "max_tokens"
    body = {**BRIEF, limit: 2, **asked}
    before = router.look(lambda core: core.forwarder.counts["tokens", "unknown"])
    with httpx.Client(base_url=router.url, timeout=60, trust_env=False) as http:
        for _ in range(2):
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert "X-Opal-Expected-Tokens" not in answer.headers
            details = answer.json()["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] == 0 or "truncate_prompt_tokens" in asked
    assert router.look(lambda core: core.forwarder.counts["tokens", "unknown"]) == before + 2
    trusts = router.look(lambda core: [one.trust for one in core.audit.workers.values()])
    assert all(trust > 0.99 for trust in trusts)
