"""Which completion or chat has the prompt of a request, and whose prompt is not to be known."""

import json
from typing import Any

import pytest

from opal_connector.cluster.router.bodies import read_body
from opal_connector.cluster.router.prompt_forms import EMBEDDINGS, RESPONSES, prompt_form
from opal_connector.cluster.router.prompt_tokens import CHAT, COMPLETIONS

USER = {"role": "user", "content": "What is red?"}


def form(path: str, **given: Any) -> tuple[str, dict[str, Any]] | None:
    found = prompt_form(path, read_body(json.dumps(given).encode()))
    return None if found is None else (found[0], json.loads(found[1].raw))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_a_prompt_already_is_passed_as_it_came(path: str) -> None:
    body = read_body(b'{ "prompt": [1], "messages": [], "logprobs": 1 }')
    assert prompt_form(path, body) == (path, body)


def test_an_embeddings_input_is_the_prompt_of_a_completion() -> None:
    for given in ("text", [1, 2], ["text"], [[1, 2]]):
        asked = {"input": given, "model": "m", "cache_salt": "s", "encoding_format": "base64"}
        assert form(EMBEDDINGS, **asked) == (
            COMPLETIONS,
            {"prompt": given, "model": "m", "cache_salt": "s"},
        )
    assert form(EMBEDDINGS, input="a", add_special_tokens=False) == (
        COMPLETIONS,
        {"prompt": "a", "add_special_tokens": False},
    )


def test_an_embedding_of_messages_is_a_chat_that_nobody_is_to_answer() -> None:
    assert form(EMBEDDINGS, messages=[USER]) == (
        CHAT,
        {"messages": [USER], "add_generation_prompt": False},
    )


def test_a_response_is_a_chat_of_its_instructions_and_its_input() -> None:
    asked = {"model": "m", "cache_salt": "s", "instructions": "Be brief.", "input": "What is red?"}
    system = {"role": "system", "content": "Be brief."}
    assert form(RESPONSES, **asked, max_output_tokens=5, store=False) == (
        CHAT,
        {"model": "m", "cache_salt": "s", "messages": [system, USER]},
    )


def test_a_conversation_of_responses_is_one_of_messages() -> None:
    said = {"type": "output_text", "text": "A colour.", "annotations": []}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Red?"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [said],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call", "call_id": "c3", "name": "weather", "arguments": "{}"},
        {"role": "user", "content": "And blue?"},
    ]

    def call(name: str) -> dict[str, Any]:
        function = {"name": "weather", "arguments": "{}"}
        return {"id": name, "type": "function", "function": function}

    found = form(RESPONSES, input=items)
    assert found is not None
    assert found[1]["messages"] == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Red?"}]},
        {"role": "assistant", "content": "A colour.", "tool_calls": [call("c1"), call("c2")]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "assistant", "tool_calls": [call("c3")]},
        {"role": "user", "content": "And blue?"},
    ]


def test_a_responses_tools_are_those_of_a_chat() -> None:
    tool = {"type": "function", "name": "weather", "parameters": {"a": 1}, "strict": True}
    found = form(RESPONSES, input="a", tools=[tool])
    assert found is not None
    (given,) = found[1]["tools"]
    assert given == {
        "type": "function",
        "function": {"name": "weather", "parameters": {"a": 1}, "strict": True},
    }


def test_how_much_is_to_be_reasoned_is_an_argument_of_the_template() -> None:
    for path, asked in (
        (CHAT, {"messages": [USER], "reasoning_effort": "high"}),
        (RESPONSES, {"input": "What is red?", "reasoning": {"effort": "high"}}),
    ):
        found = form(path, **asked, chat_template_kwargs={"a": 1})
        assert found is not None
        assert found[1]["messages"] == [USER]
        assert found[1]["chat_template_kwargs"] == {
            "a": 1,
            "reasoning_effort": "high",
            "enable_thinking": True,
        }
    documents = form(CHAT, messages=[USER], documents=[{"text": "a"}])
    assert documents is not None
    assert documents[1]["chat_template_kwargs"] == {"documents": [{"text": "a"}]}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 5}),
        (CHAT, {"messages": [USER], "truncate_prompt_tokens": -1}),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 5}),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 0}),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 0}),
        (CHAT, {"messages": [USER], "echo": True, "logprobs": True, "top_logprobs": 1}),
        (COMPLETIONS, {"prompt": "a", "prompt_embeds": "base64"}),
        (CHAT, {"messages": [USER], "reasoning_effort": "low", "chat_template_kwargs": 7}),
        (EMBEDDINGS, {}),
        (RESPONSES, {}),
        (RESPONSES, {"input": []}),
        (RESPONSES, {"input": ["a"]}),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}),
        (RESPONSES, {"input": "a", "prompt": {"id": "1"}}),
        (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}),
        (RESPONSES, {"input": "a", "tools": 7}),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": []}]}),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "1"}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}),
        (RESPONSES, {"input": [{"role": "assistant", "content": "a", "status": "incomplete"}]}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
def test_what_is_not_in_the_request_or_not_looked_up_has_no_form(
    path: str, asked: dict[str, Any]
) -> None:
    assert form(path, **asked) is None


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'{"input": ' + b"[" * 50_000])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES])
def test_what_is_no_request_has_no_form(path: str, raw: bytes) -> None:
    assert prompt_form(path, read_body(raw)) is None
