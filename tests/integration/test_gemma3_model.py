"""The converted Gemma 3 270M: its files say what the original's say."""

import json
from pathlib import Path

import pytest

from opal_connector.cli.model_library import ensure_download

pytest.importorskip("gguf")
pytest.importorskip("filelock")
safetensors = pytest.importorskip("safetensors")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.slow

TEXTS = [
    "The capital of France is Paris.",
    "In 2024 there were 1234567 of them, or 12.5 %.",
    "  two spaces,\ttabs\n\n\nand newlines  ",
    "naïve café 漢字 🙂 don't",
    "<table><td>def f(x):\n    return x ** 2</td>",
]


@pytest.fixture(scope="module")
def directory() -> Path:
    """The whole model, downloaded once and kept in the user's cache."""
    return ensure_download("gemma3-270m")


def read_json(path: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return content


def test_configuration_describes_gemma3(directory: Path) -> None:
    """The numbers of the published model; every sixth of its layers sees everything."""
    config = read_json(directory / "config.json")
    expected = {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "tie_word_embeddings": True,
    }

    assert {name: config[name] for name in expected} == expected
    assert read_json(directory / "generation_config.json")["eos_token_id"] == [1, 106]
    assert (directory / "GEMMA_TERMS.html").is_file()


def test_every_layer_is_whole(directory: Path) -> None:
    """Seven matrices and six norms a layer, the embeddings that also write, and the last norm."""
    with safetensors.safe_open(directory / "model.safetensors", "numpy") as weights:
        names = list(weights.keys())

    assert len(names) == 2 + 18 * 13
    assert "lm_head.weight" not in names


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_tokenizer(text: str, directory: Path) -> None:
    """Decoding gives back every byte."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))

    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_transformers_loads_the_tokenizer(directory: Path) -> None:
    """The numbers are Gemma's; a text begins with <bos>, and so does a chat, once."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]

    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    assert tokenizer("The capital of France is").input_ids == [2, 818, 5279, 529, 7001, 563]
    assert tokenizer("Hello  world").input_ids == [2, 9259, 138, 12392]
    assert text == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (2, 1, 262144)
