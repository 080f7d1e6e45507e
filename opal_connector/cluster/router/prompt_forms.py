"""Requests of every kind as the completion or the chat that has the same prompt."""

from typing import Any, Final

import msgspec

from opal_connector.cluster.router.bodies import RequestBody, read_body
from opal_connector.cluster.router.prompt_tokens import CHAT, COMPLETIONS

EMBEDDINGS: Final = "/v1/embeddings"
RESPONSES: Final = "/v1/responses"
_ROUTED: Final = ("model", "cache_salt")
_OF_EMBEDDINGS: Final = (
    *("add_special_tokens", "continue_final_message"),
    *("chat_template", "chat_template_kwargs"),
)
# What a response may build on that is not in its body, or is not told here.
_ELSEWHERE: Final = ("previous_response_id", "previous_input_messages", "prompt")
_TEXTS: Final = frozenset({"text", "input_text", "output_text"})


class _Unknown(Exception):
    """Which tokens a prompt has cannot be told from its request."""


def prompt_form(path: str, body: RequestBody) -> tuple[str, RequestBody] | None:
    """A path and a body whose prompt, model and salt are those of a request.

    None where its tokens are not to be known: it builds on something that is elsewhere, the engine
    cuts it, or it will not look into its cache, because the prompt itself is to be judged.
    """
    fields = body.fields
    if fields is None or fields.truncate_prompt_tokens is not None or fields.wants_prompt_logprobs:
        return None
    if path == COMPLETIONS:
        return None if fields.prompt_embeds is not None else (path, body)
    try:
        if path == CHAT:
            is_plain = fields.documents is None and fields.reasoning_effort is None
            return path, body if is_plain else _rebuilt(_chat(_decoded(body)))
        if path == EMBEDDINGS:
            return _embedding(_decoded(body))
        if path == RESPONSES:
            return CHAT, _rebuilt(_response(_decoded(body)))
    except (_Unknown, msgspec.DecodeError, RecursionError):
        return None
    return None


def _decoded(body: RequestBody) -> dict[str, Any]:
    found = msgspec.json.decode(body.raw)
    if not isinstance(found, dict):
        raise _Unknown
    return found


def _rebuilt(given: dict[str, Any]) -> RequestBody:
    return read_body(msgspec.json.encode(given))


def _kept(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: given[name] for name in (*_ROUTED, *names) if given.get(name) is not None}


# ---- chats ----


def _chat(given: dict[str, Any]) -> dict[str, Any]:
    """A chat whose template's arguments are all in `chat_template_kwargs`."""
    arguments = _arguments(given, given.get("reasoning_effort"))
    if given.get("documents") is not None:
        arguments["documents"] = given["documents"]
    return {**given, "chat_template_kwargs": arguments}


def _arguments(given: dict[str, Any], reasoning_effort: Any) -> dict[str, Any]:
    """The arguments of a template, with how much is to be reasoned, as vLLM names it there."""
    found = given.get("chat_template_kwargs")
    if found is not None and not isinstance(found, dict):
        raise _Unknown
    arguments = dict(found or {})
    if reasoning_effort is not None:
        arguments.setdefault("enable_thinking", reasoning_effort != "none")
        arguments["reasoning_effort"] = reasoning_effort
    return arguments


# ---- embeddings ----


def _embedding(given: dict[str, Any]) -> tuple[str, RequestBody]:
    kept = _kept(given, *_OF_EMBEDDINGS)
    if given.get("messages") is not None:
        is_answered = bool(given.get("add_generation_prompt", False))
        chat = {**kept, "messages": given["messages"], "add_generation_prompt": is_answered}
        return CHAT, _rebuilt(chat)
    if given.get("input") is None:
        raise _Unknown
    return COMPLETIONS, _rebuilt({**kept, "prompt": given["input"]})


# ---- responses ----


def _response(given: dict[str, Any]) -> dict[str, Any]:
    """The chat that vLLM makes of a response's instructions and input."""
    if any(given.get(name) is not None for name in _ELSEWHERE):
        raise _Unknown
    messages: list[dict[str, Any]] = []
    if given.get("instructions"):
        messages.append({"role": "system", "content": given["instructions"]})
    asked = given.get("input")
    if isinstance(asked, str):
        messages.append({"role": "user", "content": asked})
    elif isinstance(asked, list) and asked and not _goes_on(asked[-1]):
        for item in asked:
            _append(messages, item)
    else:
        raise _Unknown
    chat = {**_kept(given), "messages": messages}
    reasoning = given.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    if arguments := _arguments(given, effort):
        chat["chat_template_kwargs"] = arguments
    if given.get("tools"):
        chat["tools"] = [_tool(tool) for tool in _list(given["tools"])]
    return chat


def _goes_on(item: Any) -> bool:
    """Whether the answer is to continue the last message, not to follow it."""
    return isinstance(item, dict) and item.get("status") in ("in_progress", "incomplete")


def _append(messages: list[dict[str, Any]], item: Any) -> None:
    """Add one item of the input, which may belong to the message before it."""
    if not isinstance(item, dict):
        raise _Unknown
    kind = item.get("type") or "message"
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "message":
        message = {"role": item.get("role"), "content": _content(item)}
        if message["role"] == "assistant" and last is not None and "content" not in last:
            last["content"] = message["content"]
        else:
            messages.append(message)
    elif kind == "function_call" and not item.get("namespace"):
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if last is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output" and isinstance(item.get("output"), str):
        call_id = item.get("call_id")
        messages.append({"role": "tool", "content": item["output"], "tool_call_id": call_id})
    else:
        raise _Unknown


def _content(item: dict[str, Any]) -> str | list[dict[str, Any]]:
    """A message's text; of an assistant's, the first part alone counts."""
    content = item.get("content")
    if isinstance(content, str):
        return content
    texts = []
    for part in _list(content):
        if not isinstance(part, dict) or part.get("type") not in _TEXTS:
            raise _Unknown
        texts.append(part.get("text"))
    if not texts or not all(isinstance(text, str) for text in texts):
        raise _Unknown
    if item.get("role") == "assistant":
        return str(texts[0])
    return [{"type": "text", "text": text} for text in texts]


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise _Unknown
    return {
        "type": "function",
        "function": {name: value for name, value in tool.items() if name != "type"},
    }


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _Unknown
    return value
