"""Which tokens a prompt has, asked of an engine that is slow, wrong or not there."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from opal_connector.cluster.request import PrefixRequest
from opal_connector.cluster.router.bodies import read_body
from opal_connector.cluster.router.config import TokensConfig
from opal_connector.cluster.router.prompt_tokens import CHAT, COMPLETIONS, BodyTokens, EngineTokens


class Engine:
    """Splits text into its bytes."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: bytes | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def tokenize(self, model: str | None, question: bytes) -> bytes | None:
        self.asked.append(msgspec.json.decode(question))
        await self.gate.wait()
        if self.answer is not None:
            return self.answer or None
        return msgspec.json.encode({"count": 1, "tokens": [len(self.asked)]})


def names(model: str | None) -> tuple[str | None, str | None]:
    return (None, model) if model == "adapter" else (model, None)


def tokens_of(engine: Engine, **changes: Any) -> EngineTokens:
    return EngineTokens(TokensConfig(**changes), names, engine.tokenize)


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 20))


def test_ids_in_the_body_need_nobody_and_carry_adapter_and_salt() -> None:
    async def body() -> None:
        raw = b'{"model": "adapter", "prompt": [1, 2], "cache_salt": "s"}'
        found = await BodyTokens(names).tokens(COMPLETIONS, read_body(raw))
        assert found == PrefixRequest(
            token_ids=[1, 2], model=None, lora_name="adapter", cache_salt="s"
        )
        assert await BodyTokens(names).tokens(CHAT, read_body(raw)) is None

    run(body())


def test_the_engine_is_asked_with_all_that_its_template_depends_on() -> None:
    async def body() -> None:
        engine = Engine()
        tokens = tokens_of(engine)
        chat = {
            "model": "m",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "tools": [{"type": "function"}],
            "add_generation_prompt": False,
            "chat_template_kwargs": {"a": 1},
            "temperature": 0.5,
        }
        assert await tokens.tokens(CHAT, read_body(msgspec.json.encode(chat))) is not None
        del chat["temperature"]
        assert engine.asked == [chat]
        text = b'{"prompt": "a", "add_special_tokens": false, "n": 2}'
        assert await tokens.tokens(COMPLETIONS, read_body(text)) is not None
        assert engine.asked[1] == {"prompt": "a", "add_special_tokens": False}

    run(body())


def test_what_was_asked_is_remembered_within_bounds() -> None:
    async def body() -> None:
        engine = Engine()
        tokens = tokens_of(engine, cached_prompts=2)
        for text in "abab":
            await tokens.tokens(COMPLETIONS, read_body(b'{"prompt": "%b"}' % text.encode()))
        assert len(engine.asked) == 2
        for text in "ca":
            await tokens.tokens(COMPLETIONS, read_body(b'{"prompt": "%b"}' % text.encode()))
        assert len(engine.asked) == 4

    run(body())


def test_equal_prompts_that_come_together_are_asked_once() -> None:
    async def body() -> None:
        engine = Engine()
        engine.gate.clear()
        tokens = tokens_of(engine)
        asked = [
            asyncio.ensure_future(tokens.tokens(COMPLETIONS, read_body(b'{"prompt": "a"}')))
            for _ in range(8)
        ]
        while not engine.asked:
            await asyncio.wait(asked, timeout=0)
        asked[0].cancel()  # the others still want to know
        engine.gate.set()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert len(engine.asked) == 1
        assert {
            found.token_ids[0] for found in answers[1:] if isinstance(found, PrefixRequest)
        } == {1}

    run(body())


def test_an_engine_that_fails_again_and_again_is_left_alone_for_a_while() -> None:
    async def body() -> None:
        engine = Engine()
        engine.answer = b'{"error": "no such path"}'
        tokens = tokens_of(engine)
        for number in range(6):
            raw = b'{"prompt": "%d"}' % number
            assert await tokens.tokens(COMPLETIONS, read_body(raw)) is None
        assert len(engine.asked) == 3
        assert tokens.counts["paused"] == 3

    run(body())


def test_what_cannot_be_known_is_not_asked() -> None:
    async def body() -> None:
        engine = Engine()
        tokens = tokens_of(engine)
        picture = b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}'
        for path, raw in (
            (CHAT, picture),
            (CHAT, b'{"messages": "a"}'),
            (CHAT, b"{}"),
            (COMPLETIONS, b"{"),
            (COMPLETIONS, b'{"prompt": ["a", "b"]}'),
            ("/v1/embeddings", b'{"input": "a"}'),
        ):
            assert await tokens.tokens(path, read_body(raw)) is None
        assert not engine.asked

    run(body())
