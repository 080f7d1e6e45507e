"""A model's own tokenizer and chat template, as the engine would use them."""

import asyncio
import json
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from opal_connector.cluster.router.config import TokenizerConfig, TokensConfig
from opal_connector.cluster.router.prompt_tokens import CHAT, COMPLETIONS
from opal_connector.cluster.router.segments_cache import SegmentedTokenizer
from opal_connector.config import ConfigError
from opal_connector.reports import RateLimitedWarnings

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)

_AT_ONCE_CHARACTERS: Final = 4_096  # more is tokenized in a thread, so that others are not held up
_TEXT_PARTS: Final = frozenset({"text", "input_text"})


class LocalTokenizer:
    """Tokens of completions and chats, by a model's own tokenizer and chat template.

    What it does not know how to render as the engine does (images, a template that fails) has no
    tokens here. Texts are tokenized in one thread when they are long. Mutable state: the
    tokenizer's cache, used by one thread at a time, which `_lock` sees to.

    Args:
        directory: The model's directory, with tokenizer files.
        chat_template: In place of the model's own.

    Raises:
        ImportError: `transformers` is not installed.
        OSError: The directory has no tokenizer.
    """

    def __init__(self, directory: Path, chat_template: str | None = None) -> None:
        # Not at the top: it takes seconds, and only this way of getting tokens needs it.
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
        self._tokenizer.model_max_length = 1 << 62  # the engine judges lengths
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
        self._segmented = SegmentedTokenizer(self._tokenizer)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="opal-tokens")
        self._lock = asyncio.Lock()

    async def token_ids(self, path: str, fields: Mapping[str, Any]) -> list[int] | None:
        """The tokens of a request's prompt, None where they cannot be told here."""
        try:
            if path == CHAT:
                text = self._chat_text(fields)
                framed = bool(fields.get("add_special_tokens", False))
            elif path == COMPLETIONS:
                text = _only_text(fields.get("prompt"))
                framed = bool(fields.get("add_special_tokens", True))
            else:
                return None
            return None if text is None else await self._encoded(text, framed=framed)
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

    def _chat_text(self, fields: Mapping[str, Any]) -> str | None:
        messages = _plain_messages(fields.get("messages"))
        if messages is None:
            return None
        template = fields.get("chat_template")
        rendered = self._tokenizer.apply_chat_template(
            messages,
            tools=_tools(fields.get("tools")),
            documents=fields.get("documents") or None,
            chat_template=template if isinstance(template, str) else None,
            add_generation_prompt=bool(fields.get("add_generation_prompt", True)),
            continue_final_message=bool(fields.get("continue_final_message", False)),
            tokenize=False,
            **_template_arguments(fields.get("chat_template_kwargs")),
        )
        return rendered if isinstance(rendered, str) else None


def load_tokenizers(config: TokensConfig) -> dict[str, LocalTokenizer]:
    """The tokenizers of a configuration, by model. Blocks for seconds where there are any.

    Raises:
        ConfigError: One of them cannot be loaded.
    """
    return {
        model: _load(
            f"tokens.tokenizers.{model}",
            TokenizerConfig(path=given) if isinstance(given, str) else given,
        )
        for model, given in config.tokenizers.items()
    }


def _load(field: str, config: TokenizerConfig) -> LocalTokenizer:
    template = _template(f"{field}.chat_template", config.chat_template)
    try:
        return LocalTokenizer(Path(config.path).expanduser(), template)
    except ImportError:
        raise ConfigError(
            f"{field}: needs the package transformers, which is not installed"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{field}: found {config.path!r}, "
            f"which has no tokenizer that can be loaded ({type(error).__name__})"
        ) from None


def _template(field: str, given: str | None) -> str | None:
    """The template itself, of which vLLM too takes the text or a file."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{field}: found {given!r}, which is neither a template "
            f"nor a file that can be read ({type(error).__name__})"
        ) from None


def _only_text(prompt: Any) -> str | None:
    """The prompt of a completion, where it is one text."""
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else None


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
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        # vLLM's order: a template may write the whole of it.
        ordered = {"arguments": arguments, "name": function.get("name"), **function}
        parsed.append({**call, "function": {**ordered, "arguments": arguments}})
    return {**message, "tool_calls": parsed}


def _tools(given: Any) -> list[dict[str, Any]] | None:
    """Tools as vLLM gives them to a template: its own fields, in its order, null where left out."""
    tools = []
    for tool in given or ():
        function = tool["function"]
        written = {name: function.get(name) for name in ("name", "description", "parameters")}
        later = {name: function.get(name) for name in ("strict", "defer_loading")}
        written |= {name: value for name, value in later.items() if value is not None}
        tools.append({"type": "function", "function": written})
    return tools or None


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _TEXT_PARTS


def _template_arguments(given: Any) -> dict[str, Any]:
    own = {"tokenize", "tools", "documents", "chat_template", "conversation"}
    return (
        {name: value for name, value in given.items() if name not in own}
        if isinstance(given, dict)
        else {}
    )
