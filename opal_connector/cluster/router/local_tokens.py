"""Prompts to tokens in the router itself, as the engine would: tokenizer and chat template."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from opal_connector.cluster.request import PrefixRequest
from opal_connector.cluster.router.segments_cache import SegmentedTokenizer
from opal_connector.reports import RateLimitedWarnings

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)

_AT_ONCE_CHARACTERS: Final = 4_096  # more is tokenized in a thread, so that others are not held up
_TEXT_PARTS: Final = frozenset({"text", "input_text"})


class LocalTokens:
    """Tokens of completions and chats, by the served model's own tokenizer and chat template.

    What it does not know how to render as the engine does (images, tools of an unknown form, a
    template that fails) has no tokens here: None. Texts are tokenized in one thread when they are
    long. Mutable state: the tokenizer's cache, used by one thread at a time, which the single
    thread of the pool and the lock of the event loop's task guard.

    Args:
        directory: The model's directory, with tokenizer files.
        adapters: Model names that stand for an adapter of the served model.

    Raises:
        ImportError: `transformers` is not installed.
        OSError: The directory has no tokenizer.
    """

    def __init__(self, directory: Path, adapters: Sequence[str] = ()) -> None:
        # Not at the top: it takes seconds, and only this way of getting tokens needs it.
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
        self._tokenizer.model_max_length = 1 << 62  # the engine judges lengths
        self._segmented = SegmentedTokenizer(self._tokenizer)
        self._adapters = frozenset(adapters)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="opal-tokens")
        self._lock = asyncio.Lock()

    async def tokens(self, path: str, body: Mapping[str, Any]) -> PrefixRequest | None:
        """What a request's prefix is, None where it cannot be told here."""
        try:
            if path.endswith("/chat/completions"):
                text = self._chat_text(body)
                framed = bool(body.get("add_special_tokens", False))
            elif path.endswith("/completions"):
                prompt = _first_prompt(body.get("prompt"))
                if not isinstance(prompt, str):
                    return None if prompt is None else self._request(body, prompt)
                text, framed = prompt, bool(body.get("add_special_tokens", True))
            else:
                return None
            if text is None:
                return None
            return self._request(body, await self._encoded(text, framed=framed))
        except Exception as error:  # noqa: BLE001 - the engine answers what cannot be rendered here
            warnings.warn("render", "a prompt could not be rendered here: %s", type(error).__name__)
            return None

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _encoded(self, text: str, *, framed: bool) -> list[int]:
        async with self._lock:
            if self._segmented.costs_characters(text) <= _AT_ONCE_CHARACTERS:
                return self._segmented.encode(text, add_special_tokens=framed)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._pool, lambda: self._segmented.encode(text, add_special_tokens=framed)
            )

    def _chat_text(self, body: Mapping[str, Any]) -> str | None:
        messages = _plain_messages(body.get("messages"))
        if messages is None:
            return None
        template = body.get("chat_template")
        continues = bool(body.get("continue_final_message", False))
        rendered = self._tokenizer.apply_chat_template(
            messages,
            tools=body.get("tools") or None,
            documents=body.get("documents") or None,
            chat_template=template if isinstance(template, str) else None,
            add_generation_prompt=bool(body.get("add_generation_prompt", True)),
            continue_final_message=continues,
            tokenize=False,
            **_template_arguments(body.get("chat_template_kwargs")),
        )
        return rendered if isinstance(rendered, str) else None

    def _request(self, body: Mapping[str, Any], token_ids: list[int]) -> PrefixRequest:
        model, salt = body.get("model"), body.get("cache_salt")
        return PrefixRequest(
            token_ids=token_ids,
            lora_name=model if isinstance(model, str) and model in self._adapters else None,
            cache_salt=salt if isinstance(salt, str) and salt else None,
        )


def _first_prompt(prompt: Any) -> str | list[int] | None:
    """The prompt of a completion, the first of several: that one decides where they go."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt:
        if all(isinstance(token, int) for token in prompt):
            return prompt
        return _first_prompt(prompt[0]) if isinstance(prompt[0], str | list) else None
    return None


def _plain_messages(messages: Any) -> list[dict[str, Any]] | None:
    """Messages with contents of text alone, as a template wants them; None for any other."""
    if not isinstance(messages, list) or not messages:
        return None
    plain: list[dict[str, Any]] = []
    for message in messages:
        if not isinstance(message, dict):
            return None
        content = message.get("content")
        if isinstance(content, list):
            texts = [part.get("text") for part in content if _is_text(part)]
            if len(texts) != len(content):
                return None
            message = {**message, "content": "\n".join(map(str, texts))}
        plain.append(_with_parsed_calls(message))
    return plain


def _with_parsed_calls(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls as objects: templates get them like that."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    parsed = []
    for call in calls:
        function = call["function"]
        if isinstance(function.get("arguments"), str):
            function = {**function, "arguments": json.loads(function["arguments"] or "{}")}
        parsed.append({**call, "function": function})
    return {**message, "tool_calls": parsed}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _TEXT_PARTS


def _template_arguments(given: Any) -> dict[str, Any]:
    own = {"tokenize", "tools", "documents", "chat_template", "conversation"}
    return (
        {name: value for name, value in given.items() if name not in own}
        if isinstance(given, dict)
        else {}
    )
