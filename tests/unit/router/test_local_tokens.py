"""Tokens at the router: those of the whole text, remembered by turn, None where it cannot tell."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from opal_connector.cluster.request import PrefixRequest
from opal_connector.cluster.router.bodies import RequestBody, read_body
from opal_connector.cluster.router.config import TokenizerConfig, TokensConfig
from opal_connector.cluster.router.local_tokenizer import LocalTokenizer, load_tokenizers
from opal_connector.cluster.router.local_tokens import LocalTokens
from opal_connector.cluster.router.segments_cache import SegmentedTokenizer
from opal_connector.config import ConfigError

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.city }}{% endif %}<|end|>"
    "{% endfor %}{% if tools %}{{ tools | length }} tools{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def make_tokenizer(**special: Any) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    core.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|begin|>", **special)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def local(model_directory: Path) -> Iterator[LocalTokenizer]:
    tokenizer = LocalTokenizer(model_directory)
    yield tokenizer
    tokenizer.close()


def ask(local: LocalTokenizer, path: str, body: dict[str, Any]) -> list[int] | None:
    return asyncio.run(local.token_ids(path, body))


def random_text(rng: random.Random) -> str:
    pieces = ["the ", "fox", "\n\n", "  ", "<|start|>", "<|end|>", "ü✓", "lazy dog", "<|", "1234"]
    return "".join(rng.choice(pieces) for _ in range(rng.randint(0, 60)))


def test_tokens_in_segments_are_those_of_the_whole_text() -> None:
    tokenizer = make_tokenizer()
    segmented = SegmentedTokenizer(tokenizer, cache_characters=300)
    assert segmented.is_segmented
    rng = random.Random(4)
    for _ in range(500):
        text, framed = random_text(rng), rng.random() < 0.5
        whole = tokenizer(text, add_special_tokens=framed).input_ids
        assert segmented.encode(text, add_special_tokens=framed) == whole


def test_of_the_next_turn_only_the_turn_is_tokenized() -> None:
    segmented = SegmentedTokenizer(make_tokenizer())
    first = "<|start|>" + "the quick fox " * 100 + "<|end|>"
    segmented.encode(first, add_special_tokens=False)
    assert segmented.costs_characters(first + "<|start|>jumps") == len("jumps")


def test_a_tokenizer_whose_special_tokens_do_not_part_texts_is_asked_for_whole_texts() -> None:
    tokenizer = make_tokenizer()
    core = tokenizer.backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    segmented = SegmentedTokenizer(tokenizer)
    text = "<|start|>the fox<|end|> jumps"
    assert segmented.encode(text, add_special_tokens=True) == tokenizer(text).input_ids


def test_a_chat_is_rendered_with_the_models_template(local: LocalTokenizer) -> None:
    tokenizer = make_tokenizer()
    body = {"model": "m", "messages": [{"role": "user", "content": "the fox"}]}
    ids = ask(local, CHAT, body)
    text = "<|start|>user\nthe fox<|end|><|start|>assistant\n"
    assert ids == tokenizer(text, add_special_tokens=False).input_ids
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]
    split = ask(local, CHAT, {"messages": [{"role": "user", "content": parts}]})
    joined = ask(local, CHAT, {"messages": [{"role": "user", "content": "the\nfox"}]})
    assert split == joined


def test_tools_calls_and_template_arguments_reach_the_template(local: LocalTokenizer) -> None:
    tokenizer = make_tokenizer()
    call = {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    body = {
        "messages": [{"role": "assistant", "content": "", "tool_calls": [call]}],
        "tools": [{"type": "function", "function": {"name": "weather"}}],
        "add_generation_prompt": False,
        "chat_template_kwargs": {"tokenize": True, "unused": 1},
    }
    text = "<|start|>assistant\nRome<|end|>1 tools"
    assert ask(local, CHAT, body) == tokenizer(text, add_special_tokens=False).input_ids


def test_tools_and_calls_reach_the_template_as_the_engine_writes_them(
    local: LocalTokenizer,
) -> None:
    """What was left out is null, what vLLM does not know is gone, and its order is kept."""
    tokenizer = make_tokenizer()
    call = {"id": "1", "function": {"name": "fox", "arguments": "{}", "extra": 1}}
    tools = [
        {"function": {"parameters": {"z": 1, "a": 2}, "name": "fox", "strict": None, "x": 1}},
        {"type": "function", "function": {"name": "dog", "strict": True}},
    ]
    body = {
        "messages": [{"role": "assistant", "content": "", "tool_calls": [call]}],
        "tools": tools,
        "chat_template": "{{ tools | tojson }}{{ messages[0].tool_calls[0].function | tojson }}",
    }
    text = (
        '[{"type": "function", "function": {"name": "fox", "description": null, '
        '"parameters": {"z": 1, "a": 2}}}, {"type": "function", "function": {"name": "dog", '
        '"description": null, "parameters": null, "strict": true}}]'
        '{"arguments": {}, "name": "fox", "extra": 1}'
    )
    assert ask(local, CHAT, body) == tokenizer(text, add_special_tokens=False).input_ids


def test_a_completion_has_the_models_first_token(local: LocalTokenizer) -> None:
    tokenizer = make_tokenizer()
    long = "the fox " * 2_000
    assert ask(local, TEXT, {"prompt": long}) == tokenizer(long).input_ids
    assert ask(local, TEXT, {"prompt": ["the"]}) == tokenizer("the").input_ids


class Engine:
    """Says what it is told to say."""

    def __init__(self, answer: list[int] | None) -> None:
        self.answer = answer
        self.asked = 0

    async def tokens(self, path: str, body: RequestBody) -> PrefixRequest | None:
        self.asked += 1
        return None if self.answer is None else PrefixRequest(token_ids=self.answer)


def names(model: str | None) -> tuple[str | None, str | None]:
    return ("m", model) if model == "poet" else (model, None)


def route(tokens: LocalTokens, times: int, **fields: Any) -> list[PrefixRequest | None]:
    raw = json.dumps({"model": "m", "prompt": "the fox"} | fields).encode()

    async def asked() -> list[PrefixRequest | None]:
        return [await tokens.tokens(TEXT, read_body(raw)) for _ in range(times)]

    return asyncio.run(asked())


@pytest.mark.parametrize(
    "more", [b'"\xff"', b"1" * 5_000], ids=["no UTF-8", "a number of 5000 digits"]
)
def test_a_body_that_cannot_be_read_whole_has_no_tokens_here(
    local: LocalTokenizer, more: bytes
) -> None:
    """It is the engine that judges a body: what no route depends on must not be an error here."""
    body = read_body(b'{"model": "m", "prompt": "the fox", "metadata": %b}' % more)
    assert body.text == "the fox"
    tokens = LocalTokens({"m": local}, names, Engine(None))
    assert asyncio.run(tokens.tokens(TEXT, body)) is None


def test_a_tokenizer_is_compared_with_the_engine_at_first_and_then_believed(
    local: LocalTokenizer,
) -> None:
    ids = make_tokenizer()("the fox").input_ids
    request = PrefixRequest(token_ids=ids, model="m", lora_name="poet", cache_salt="s")
    engine = Engine(ids)
    found = route(LocalTokens({"m": local}, names, engine), 20, cache_salt="s", model="poet")
    assert [one and one.token_ids for one in found] == [ids] * 20
    assert found[-1] == request
    assert engine.asked == 8


def test_one_difference_and_the_tokenizer_is_given_up_loudly(
    local: LocalTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine([1, 2, 3])
    tokens = LocalTokens({"m": local}, names, engine)
    first, *others = route(tokens, 3)
    assert first == PrefixRequest(token_ids=[1, 2, 3])
    assert others == [None, None]
    assert "given for m does not split completions as the engine does" in caplog.text


def test_what_users_ask_is_not_asked_of_an_engine_that_is_not_to_be_asked(
    local: LocalTokenizer,
) -> None:
    engine = Engine([1, 2, 3])
    (found,) = route(LocalTokens({"m": local}, names, engine, asks_engine=False), 1)
    assert found is not None
    assert engine.asked == 0


class Rendering:
    """An engine with a tokenizer and template of its own; `silent` says nothing."""

    def __init__(self, local: LocalTokenizer, *, silent: bool = False) -> None:
        self._local = local
        self.silent = silent

    async def tokens(self, path: str, body: RequestBody) -> PrefixRequest | None:
        ids = await self._local.token_ids(path, json.loads(body.raw))
        return None if ids is None or self.silent else PrefixRequest(token_ids=ids)


def test_a_probe_finds_a_tokenizer_right_before_anybody_asks(local: LocalTokenizer) -> None:
    tokens = LocalTokens({"m": local}, names, Rendering(local))
    assert asyncio.run(tokens.probe("m"))
    assert not tokens.given_up
    assert not tokens.unprobed
    assert tokens.agreed == {
        ("m", "completions"): 1,
        ("m", "chats"): 2,
        ("m", "chats with tools"): 1,
    }


def test_a_probe_finds_another_chat_template_and_leaves_completions_alone(
    local: LocalTokenizer, model_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine was started with `--chat-template`: its chats are others, its texts the same."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    other = LocalTokenizer(model_directory, template)
    tokens = LocalTokens({"m": local}, names, Rendering(other))
    assert asyncio.run(tokens.probe("m"))
    assert tokens.given_up == {("m", "chats"), ("m", "chats with tools")}
    assert "given for m does not split chats as the engine does" in caplog.text
    (found,) = route(tokens, 1)
    assert found is not None
    other.close()


def test_with_the_engines_template_chats_are_right(
    local: LocalTokenizer, model_directory: Path, tmp_path: Path
) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (tmp_path / "template.jinja").write_text(template)
    engine = Rendering(LocalTokenizer(model_directory, template))
    for given in (template, str(tmp_path / "template.jinja")):
        config = TokenizerConfig(path=str(model_directory), chat_template=given)
        loaded = load_tokenizers(TokensConfig(tokenizers={"m": config}))
        tokens = LocalTokens(loaded, names, engine)
        assert asyncio.run(tokens.probe("m"))
        assert not tokens.given_up
        tokens.close()


def test_a_template_that_cannot_be_read_is_one_sentence(model_directory: Path) -> None:
    config = TokenizerConfig(path=str(model_directory), chat_template="nowhere.jinja")
    with pytest.raises(ConfigError, match=r"tokens\.tokenizers\.m\.chat_template: found 'nowhere"):
        load_tokenizers(TokensConfig(tokenizers={"m": config}))


def test_an_engine_that_says_nothing_leaves_the_tokenizer_believed_and_to_be_probed_again(
    local: LocalTokenizer,
) -> None:
    (found,) = route(LocalTokens({"m": local}, names, Engine(None)), 1)
    assert found is not None
    tokens = LocalTokens({"m": local}, names, Rendering(local, silent=True))
    assert not asyncio.run(tokens.probe("m"))
    assert tokens.unprobed == {"m"}


def test_of_a_model_without_a_tokenizer_nothing_is_known_here(local: LocalTokenizer) -> None:
    assert route(LocalTokens({"m": local}, names, Engine(None)), 1, model="other") == [None]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {}),
        (CHAT, {"messages": "hello"}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (CHAT, {"messages": [{"role": "user", "tool_calls": [{}]}]}),
        (CHAT, {"messages": ["hello"]}),
        (TEXT, {}),
        (TEXT, {"prompt": []}),
        (TEXT, {"prompt": 5}),
        (TEXT, {"prompt": ["the", "fox"]}),
        ("/v1/embeddings", {"input": "the"}),
    ],
)
def test_what_cannot_be_told_here_has_no_tokens(
    local: LocalTokenizer, path: str, body: dict[str, Any]
) -> None:
    assert ask(local, path, body) is None


def test_a_directory_without_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    config = TokensConfig(tokenizers={"m": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"tokens\.tokenizers\.m: found .*, which has no tok"):
        load_tokenizers(config)


def test_configured_tokenizers_are_loaded_by_model(model_directory: Path) -> None:
    loaded = load_tokenizers(TokensConfig(tokenizers={"m": str(model_directory)}))
    assert ask(loaded["m"], TEXT, {"prompt": "the"}) == make_tokenizer()("the").input_ids
    loaded["m"].close()
