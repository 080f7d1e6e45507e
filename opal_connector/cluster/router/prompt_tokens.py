"""The tokens of a prompt, from the request itself or from an engine's `/tokenize`."""

import asyncio
import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec

from opal_connector.cluster.request import PrefixRequest
from opal_connector.cluster.router.bodies import RequestBody
from opal_connector.cluster.router.config import TokensConfig

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
_CHAT_OPTIONS: Final = (
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)
_FAILURES: Final = 3  # in a row, after which nobody is asked for a while
_PAUSE_SECONDS: Final = 5.0

Tokenize = Callable[[str | None, bytes], Awaitable[bytes | None]]
NamesOf = Callable[[str | None], tuple[str | None, str | None]]


class PromptTokens(Protocol):
    """Finds the tokens of a prompt."""

    async def tokens(self, path: str, body: RequestBody) -> PrefixRequest | None:
        """What the prompt is to the index, None where its tokens cannot be known."""


class BodyTokens:
    """Prompts that are token ids already. `names_of` tells a model from an adapter."""

    def __init__(self, names_of: NamesOf) -> None:
        self._names_of = names_of

    async def tokens(self, path: str, body: RequestBody) -> PrefixRequest | None:
        """The ids in the body."""
        token_ids = body.token_ids if path == COMPLETIONS else None
        return None if token_ids is None else prefix_request(body, token_ids, self._names_of)


class EngineTokens:
    """Asks an engine, and remembers what it said.

    Mutable state: the tokens by what was asked, the least recently used first; what is being asked;
    counters; and until when nobody is asked because it failed. The loop's thread alone uses it.
    """

    def __init__(self, config: TokensConfig, names_of: NamesOf, tokenize: Tokenize) -> None:
        self._config = config
        self._names_of = names_of
        self._tokenize = tokenize
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._known_tokens = 0
        self._asked: dict[bytes, asyncio.Task[array[int] | None]] = {}
        self._failures = 0
        self._paused_until = float("-inf")
        self.counts: Counter[str] = Counter()

    async def tokens(self, path: str, body: RequestBody) -> PrefixRequest | None:
        """The prompt as the engine splits it."""
        question = _question(path, body)
        if question is None:
            return None
        digest = hashlib.blake2b(question, digest_size=16).digest()
        found = self._known.get(digest)
        if found is not None:
            self._known.move_to_end(digest)
            self.counts["cached"] += 1
        else:
            found = await self._ask(digest, body.model, question)
        return None if found is None else prefix_request(body, found.tolist(), self._names_of)

    async def _ask(self, digest: bytes, model: str | None, question: bytes) -> "array[int] | None":
        task = self._asked.get(digest)
        if task is None:
            if asyncio.get_running_loop().time() < self._paused_until:
                self.counts["paused"] += 1
                return None
            task = asyncio.create_task(self._answer(digest, model, question))
            self._asked[digest] = task
            task.add_done_callback(lambda _: self._asked.pop(digest, None))
        return await asyncio.shield(task)  # others may wait for it as well

    async def _answer(
        self, digest: bytes, model: str | None, question: bytes
    ) -> "array[int] | None":
        answer: bytes | None = None
        try:
            async with asyncio.timeout(self._config.timeout_seconds):
                answer = await self._tokenize(model, question)
        except TimeoutError:
            self.counts["timeout"] += 1
        else:
            self.counts["asked" if answer is not None else "failed"] += 1
        tokens = _tokens(answer) if answer is not None else None
        if tokens is not None:
            self._failures = 0
            self._remember(digest, tokens)
            return tokens
        self._failures += 1
        if self._failures >= _FAILURES:
            self._failures = 0
            self._paused_until = asyncio.get_running_loop().time() + _PAUSE_SECONDS
        return None

    def _remember(self, digest: bytes, tokens: "array[int]") -> None:
        self._known[digest] = tokens
        self._known_tokens += len(tokens)
        while (
            len(self._known) > self._config.cached_prompts
            or self._known_tokens > self._config.cached_tokens
        ):
            _, oldest = self._known.popitem(last=False)
            self._known_tokens -= len(oldest)


def prefix_request(body: RequestBody, token_ids: list[int], names_of: NamesOf) -> PrefixRequest:
    """What a prompt is to the index."""
    model, adapter = names_of(body.model)
    return PrefixRequest(
        token_ids=token_ids, model=model, lora_name=adapter, cache_salt=body.cache_salt
    )


def _question(path: str, body: RequestBody) -> bytes | None:
    """What to ask `/tokenize`, None where it would not tell what the prompt's cache depends on."""
    fields = body.fields
    if fields is None:
        return None
    question: dict[str, Any] = {"model": body.model} if body.model is not None else {}
    if path == COMPLETIONS:
        text = body.text
        if text is None:
            return None
        question["prompt"] = text
        if fields.add_special_tokens is not None:
            question["add_special_tokens"] = fields.add_special_tokens
        return msgspec.json.encode(question)
    if path != CHAT or not bytes(fields.messages) or not _is_text_only(bytes(fields.messages)):
        return None
    question["messages"] = fields.messages
    if bytes(fields.tools):
        question["tools"] = fields.tools
    for name in _CHAT_OPTIONS:
        value = getattr(fields, name)
        if value is not None:
            question[name] = value
    return msgspec.json.encode(question)


class _Part(msgspec.Struct):
    type: Any = "text"


class _Message(msgspec.Struct):
    content: str | list[_Part | str] | None = None


_messages = msgspec.json.Decoder(list[_Message])


def _is_text_only(raw: bytes) -> bool:
    """Whether no image, sound or the like is in it: tokens do not tell two of them apart."""
    try:
        messages = _messages.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return all(
        part if isinstance(part, str) else part.type in ("text", "input_text", "refusal")
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
    )


class _Answer(msgspec.Struct):
    tokens: list[int]


_answer = msgspec.json.Decoder(_Answer)


def _tokens(answer: bytes) -> "array[int] | None":
    try:
        return array("I", _answer.decode(answer).tokens)
    except (msgspec.DecodeError, OverflowError, RecursionError):
        return None
