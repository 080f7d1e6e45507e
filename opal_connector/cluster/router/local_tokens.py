"""Local tokenizers, held against the engines before and while they are believed."""

import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from opal_connector.cluster.request import PrefixRequest
from opal_connector.cluster.router.bodies import RequestBody, read_body
from opal_connector.cluster.router.local_tokenizer import LocalTokenizer
from opal_connector.cluster.router.prompt_tokens import (
    CHAT,
    COMPLETIONS,
    NamesOf,
    PromptTokens,
    prefix_request,
)

logger = logging.getLogger(__name__)

Kind = tuple[
    str, str
]  # a model, and what is asked of it: "completions", "chats", "chats with tools"

_COMPARED_PROMPTS: Final = 8
_PROBE: Final = "The quick brown fox, 1234567 naïve façades; 東京 🦊\n\tdef f(x):  return x**2 "


class LocalTokens:
    """Prompts by local tokenizers, which are held against the engine before they are believed.

    Probes are asked of the engine when it is well, and then the first prompts of every kind. One
    difference, and the tokenizer is given up for that kind, loudly: what it says would be routed to
    the wrong place in silence. Mutable state: how many prompts agreed, by kind, which models were
    probed and what was given up; the loop's thread alone uses it.

    Args:
        tokenizers: By the name that the model is served by.
        names_of: Tells a model from an adapter.
        engine: Whom to compare with.
        asks_engine: Whether prompts of users may be asked of the engine, beside the probes.
    """

    def __init__(
        self,
        tokenizers: Mapping[str, LocalTokenizer],
        names_of: NamesOf,
        engine: PromptTokens,
        *,
        asks_engine: bool = True,
    ) -> None:
        self._tokenizers = dict(tokenizers)
        self._names_of = names_of
        self._engine = engine
        self._asks_engine = asks_engine
        self.agreed: Counter[Kind] = Counter()
        self.given_up: set[Kind] = set()
        self.unprobed = set(self._tokenizers)

    async def tokens(self, path: str, body: RequestBody) -> PrefixRequest | None:
        """The prompt as the model's tokenizer splits it, None where that is not known."""
        if body.fields is None or path not in (CHAT, COMPLETIONS):
            return None
        model = self._model(body.model)
        if model is None:
            return None
        kind = (model, _use(path, body))
        if kind in self.given_up:
            return None
        fields = _all_fields(body.raw)
        if fields is None:
            return None
        ids = await self._tokenizers[model].token_ids(path, fields)
        if ids is None:
            return None
        if not self._asks_engine or self.agreed[kind] >= _COMPARED_PROMPTS:
            return prefix_request(body, ids, self._names_of)
        return await self._compared(kind, path, body, ids)

    async def probe(self, model: str) -> bool:
        """Compare what is asked of no user; returns whether the engine told."""
        for path, fields in _probes(model):
            body = read_body(msgspec.json.encode(fields))
            ids = await self._tokenizers[model].token_ids(path, fields)
            if ids is None:
                continue
            agreed = self.agreed.total()
            told = await self._compared((model, _use(path, body)), path, body, ids)
            if told.token_ids == ids and self.agreed.total() == agreed:
                return False
        self.unprobed.discard(model)
        return True

    def close(self) -> None:
        """End the tokenizers' threads."""
        for tokenizer in self._tokenizers.values():
            tokenizer.close()

    async def _compared(
        self, kind: Kind, path: str, body: RequestBody, ids: list[int]
    ) -> PrefixRequest:
        """What the engine says, if it says anything; else what was found here."""
        told = await self._engine.tokens(path, body)
        if told is None:
            return prefix_request(body, ids, self._names_of)
        if told.token_ids == ids:
            self.agreed[kind] += 1
            return told
        if kind not in self.given_up:
            self.given_up.add(kind)
            logger.error(
                "the tokenizer given for %s does not split %s as the engine does: "
                "it is not used for them any more",
                *kind,
            )
        return told

    def _model(self, name: str | None) -> str | None:
        """The model whose tokenizer counts: an adapter has that of its model."""
        served, _ = self._names_of(name)
        if served is None and len(self._tokenizers) == 1:
            served = next(iter(self._tokenizers))
        return served if served in self._tokenizers else None


def _all_fields(raw: bytes) -> dict[str, Any] | None:
    """All of a body; None where what nobody looked at so far, such as a number, cannot be read."""
    try:
        found: dict[str, Any] = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found


def _use(path: str, body: RequestBody) -> str:
    if path == COMPLETIONS:
        return "completions"
    tools = bytes(body.fields.tools) if body.fields is not None else b""
    return "chats" if tools in (b"", b"null", b"[]") else "chats with tools"


def _probes(model: str) -> list[tuple[str, dict[str, Any]]]:
    """What templates and tokenizers differ in: specials, roles, spaces, other scripts, tools."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "weather", "description": "Tells it.", "parameters": parameters}
    messages = [
        {"role": "system", "content": _PROBE},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": " two "},
        {"role": "user", "content": _PROBE},
    ]
    tools = [{"type": "function", "function": function}]
    return [
        (COMPLETIONS, {"model": model, "prompt": _PROBE}),
        (CHAT, {"model": model, "messages": messages[1:2]}),
        (CHAT, {"model": model, "messages": messages}),
        (CHAT, {"model": model, "messages": messages, "tools": tools}),
    ]
