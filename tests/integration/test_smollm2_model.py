"""The converted SmolLM2: its files say what the original's say."""

import json
from pathlib import Path

import pytest

from opal_connector.cli.models import ensure_smollm2

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
    "def f(x):\n    return x ** 2  # <|not special|>",
]


@pytest.fixture(scope="module")
def directory() -> Path:
    """The whole model, downloaded once and kept in the user's cache."""
    return ensure_smollm2()


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> "tokenizers.Tokenizer":
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


def read_json(path: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return content


def test_configuration_describes_smollm2(directory: Path) -> None:
    """The numbers of the published model, read from the GGUF and not from this test."""
    config = read_json(directory / "config.json")
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }

    assert {name: config[name] for name in expected} == expected
    assert read_json(directory / "generation_config.json")["eos_token_id"] == [2, 0]


def test_cut_model_is_a_prefix_of_the_whole(directory: Path) -> None:
    """`--layers 4` keeps the first four layers and everything around them, bit for bit."""
    cut = ensure_smollm2(layers=4)
    with (
        safetensors.safe_open(directory / "model.safetensors", "numpy") as whole,
        safetensors.safe_open(cut / "model.safetensors", "numpy") as part,
    ):
        names = list(part.keys())
        assert (len(list(whole.keys())), len(names)) == (2 + 30 * 9, 2 + 4 * 9)
        for name in names:
            assert part.get_tensor(name).tobytes() == whole.get_tensor(name).tobytes()

    assert read_json(cut / "config.json")["num_hidden_layers"] == 4


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_tokenizer(text: str, tokenizer: "tokenizers.Tokenizer") -> None:
    """Decoding gives back every byte."""
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokens_are_those_of_the_original(tokenizer: "tokenizers.Tokenizer") -> None:
    """Digits are single tokens, words carry their space, and control tokens are special."""
    assert tokenizer.encode("In 2024").tokens == ["In", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.encode("The capital of France is").ids == [504, 3575, 282, 4649, 314]
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items()}
    assert special == set(range(17))
    assert tokenizer.decode(tokenizer.encode("<|im_start|>a<|im_end|>").ids) == "a"


def test_transformers_renders_the_chat_template(directory: Path) -> None:
    """The tokenizer that engines load keeps the digit splitting and knows the chat format."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add 12."}]

    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nAdd 12.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(chat[1:], tokenize=False).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    )
    assert tokenizer.tokenize("Add 12.") == ["Add", "Ġ", "1", "2", "."]
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, len(tokenizer)) == (2, 1, 49152)
    assert tokenizer.decode(tokenizer(TEXTS[3])["input_ids"]) == TEXTS[3]
