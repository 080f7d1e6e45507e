"""Tokens at the router: those of the whole text, remembered by turn, None where it cannot tell."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from opal_connector.cluster.router.local_tokens import LocalTokens
from opal_connector.cluster.router.segments_cache import SegmentedTokenizer

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
def local(model_directory: Path) -> Iterator[LocalTokens]:
    tokens = LocalTokens(model_directory, adapters=("poet",))
    yield tokens
    tokens.close()


def ask(local: LocalTokens, path: str, body: dict[str, Any]) -> Any:
    return asyncio.run(local.tokens(path, body))


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


def test_a_chat_is_rendered_with_the_models_template(local: LocalTokens) -> None:
    tokenizer = make_tokenizer()
    body = {"model": "m", "messages": [{"role": "user", "content": "the fox"}]}
    request = ask(local, CHAT, body)
    text = "<|start|>user\nthe fox<|end|><|start|>assistant\n"
    assert request.token_ids == tokenizer(text, add_special_tokens=False).input_ids
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]
    split = ask(local, CHAT, {"messages": [{"role": "user", "content": parts}]})
    joined = ask(local, CHAT, {"messages": [{"role": "user", "content": "the\nfox"}]})
    assert split.token_ids == joined.token_ids


def test_tools_calls_and_template_arguments_reach_the_template(local: LocalTokens) -> None:
    tokenizer = make_tokenizer()
    call = {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    body = {
        "messages": [{"role": "assistant", "content": "", "tool_calls": [call]}],
        "tools": [{"type": "function", "function": {"name": "weather"}}],
        "add_generation_prompt": False,
        "chat_template_kwargs": {"tokenize": True, "unused": 1},
    }
    text = "<|start|>assistant\nRome<|end|>1 tools"
    assert ask(local, CHAT, body).token_ids == tokenizer(text, add_special_tokens=False).input_ids


def test_a_completion_has_the_models_first_token_and_token_ids_are_taken_as_they_are(
    local: LocalTokens,
) -> None:
    tokenizer = make_tokenizer()
    whole = ask(local, TEXT, {"prompt": "the fox " * 2_000, "cache_salt": "s"})
    assert whole.token_ids == tokenizer("the fox " * 2_000).input_ids
    assert whole.cache_salt == "s"
    assert ask(local, TEXT, {"prompt": [5, 6, 7]}).token_ids == [5, 6, 7]
    assert ask(local, TEXT, {"prompt": [[5, 6], [7]]}).token_ids == [5, 6]
    assert ask(local, TEXT, {"prompt": ["the", "fox"]}).token_ids == tokenizer("the").input_ids


def test_a_model_name_that_is_an_adapter_names_it(local: LocalTokens) -> None:
    assert ask(local, TEXT, {"prompt": "the", "model": "poet"}).lora_name == "poet"
    assert ask(local, TEXT, {"prompt": "the", "model": "base"}).lora_name is None


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
        ("/v1/embeddings", {"input": "the"}),
    ],
)
def test_what_cannot_be_told_here_has_no_tokens(
    local: LocalTokens, path: str, body: dict[str, Any]
) -> None:
    assert ask(local, path, body) is None
