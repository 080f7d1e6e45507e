"""`opal models`: what a person sees, and that a model directory is whole or absent."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from fakes import heed_interrupts

from opal_connector.cli import model_store, tiny_models
from opal_connector.cli.errors import CommandError
from opal_connector.cli.main import opal
from opal_connector.cli.models import ensure_smollm2, ensure_tiny_llama
from opal_connector.cli.tiny_models import TinyLlama, byte_tokenizer

filelock = pytest.importorskip("filelock")
pytest.importorskip("tokenizers")
safetensors_numpy = pytest.importorskip("safetensors.numpy")

OPAL = [sys.executable, "-m", "opal_connector.cli.main"]
MAKE = [*OPAL, "models", "make", "tiny-llama"]
LEFTOVER = ".tiny-llama.0123456789abcdef.tmp"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for this test and for the processes it starts."""
    monkeypatch.setenv("OPAL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(opal, ["models", *arguments])


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )


def names(directory: Path) -> set[str]:
    """What lies in a directory, except locks."""
    return {path.name for path in directory.iterdir() if path.suffix != ".lock"}


# What a person sees.


def test_last_line_of_standard_output_is_the_directory(cache: Path) -> None:
    """Scripts read the directory from standard output; status lines must not get in the way."""
    built, ready = (
        subprocess.run(MAKE, check=True, capture_output=True, text=True) for _ in range(2)
    )

    expected = f"{cache / 'models' / 'tiny-llama'}\n"
    assert (built.stdout, ready.stdout) == (expected, expected)
    assert "built" in built.stderr
    assert "ready" in ready.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["get", "smollm3"], "There is no model 'smollm3' to get; there are smollm2-135m and g"),
        (["get", "tiny-llama"], "opal models make tiny-llama"),
        (["get", "smollm2-135m", "--layers", "0"], "layers 1 to 30; cannot keep 0."),
        (["get", "smollm2-135m", "--layers", "31"], "layers 1 to 30; cannot keep 31."),
        (["get", "gemma3-270m", "--layers", "19"], "layers 1 to 18; cannot keep 19."),
        (["get", "tiny-gemma3"], "opal models make tiny-gemma3"),
        (["make", "gemma3-270m"], "opal models get gemma3-270m"),
        (["make", "tiny-gemma3", "--kv-heads", "2"], "--kv-heads: only tiny-llama has a shape"),
        (["make", "tiny-gemma3", "--seed", "-1"], "The seed starts at 0, not at -1."),
        (["make", "smollm2-135m"], "opal models get smollm2-135m"),
        (["make", "large-llama"], "There is no model 'large-llama' to make"),
        (["make", "tiny-llama", "--heads", "3"], "must be a multiple"),
        (["make", "tiny-llama", "--head-dim", "33"], "must be even"),
        (["make", "tiny-llama", "--layers", "0"], "start at 1"),
    ],
)
def test_mistake_gets_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, cache: Path
) -> None:
    """A user's mistake is answered in one line that helps, and changes nothing on disk."""
    result = run(*arguments)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert not cache.exists()


def test_unwritable_place_gets_one_sentence(tmp_path: Path) -> None:
    """What the system refuses is reported without a traceback, as a failure and not a mistake."""
    (tmp_path / "file").write_text("")

    result = run("make", "tiny-llama", "--output", str(tmp_path / "file" / "model"))

    assert result.exit_code == 1
    assert f"The system refused: File exists ({tmp_path}/file)" in result.stderr
    assert result.stderr.count("\n") == 1


def test_list_shows_what_is_ready_and_how_to_make_the_rest() -> None:
    """The list tells ready, damaged and absent models apart."""
    damaged = ensure_tiny_llama(TinyLlama(seed=3))
    (damaged / "config.json").unlink()
    ensure_tiny_llama()

    lines = [line.split() for line in run("list").stdout.splitlines()]

    assert ["tiny-llama", "ready", "0.5", "MB"] in lines
    assert ["gemma3-270m", "absent", "opal", "models", "get", "gemma3-270m"] in lines
    assert ["tiny-lfm2", "absent", "opal", "models", "make", "tiny-lfm2"] in lines
    assert ["smollm2-135m", "absent", "opal", "models", "get", "smollm2-135m"] in lines
    assert ["tiny-llama-seed3", "damaged:", "config.json", "is", "missing"] in [
        line[:5] for line in lines
    ]


def test_help_and_version_import_no_subcommand() -> None:
    """`opal --help` stays fast: subcommands are imported when they are run."""
    script = (
        "import sys; from click.testing import CliRunner; from opal_connector.cli.main import opal;"
        "results = [CliRunner().invoke(opal, [flag]) for flag in ('--help', '--version')];"
        "assert [result.exit_code for result in results] == [0, 0], results;"
        "assert 'models' in results[0].stdout and results[1].stdout.startswith('opal ');"
        "assert not {'opal_connector.cli.models', 'numpy', 'vllm', 'torch'} & sys.modules.keys()"
    )

    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"OPAL_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/opal_connector"),
        ({"HOME": "/c"}, "/c/.cache/opal_connector"),
    ],
)
def test_cache_is_where_the_user_says(
    environment: dict[str, str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product's own variable comes first, then the desktop standard's, then the home."""
    for name in ("OPAL_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert model_store.cache_directory() == Path(place)


# Whole or absent.


def test_interrupt_leaves_nothing_behind(cache: Path) -> None:
    """Ctrl-C in the middle of a build removes what was begun, and prints no traceback."""
    process = start([sys.executable, "-c", PATCHED.format(action="print(flush=True), sleep(60)")])
    assert process.stdout is not None
    process.stdout.readline()
    (staged,) = names(cache / "models")
    assert staged != "tiny-llama"

    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)

    assert process.returncode == 1
    assert "Traceback" not in errors
    assert names(cache / "models") == set()


def test_killed_build_is_absent_and_its_leftovers_go(cache: Path) -> None:
    """A process killed while it builds leaves no model, and the next one cleans up after it."""
    killed = start([sys.executable, "-c", PATCHED.format(action="os.kill(os.getpid(), 9)")])
    killed.communicate(timeout=30)
    assert killed.returncode == -signal.SIGKILL
    (leftover,) = names(cache / "models")
    assert leftover.endswith(".tmp")

    directory = ensure_tiny_llama()

    assert names(cache / "models") == {"tiny-llama"}
    assert fault(directory) is None


def test_processes_at_once_build_once(cache: Path) -> None:
    """Of two processes one builds; both wait for a living one, whose work they do not touch."""
    living = cache / "models" / LEFTOVER
    living.mkdir(parents=True)
    with filelock.FileLock(cache / "models" / ".tiny-llama.lock"):
        processes = [start(MAKE) for _ in range(2)]
        for process in processes:
            assert process.stderr is not None
            assert "waiting" in process.stderr.readline()
        assert living.is_dir()
    endings = [process.communicate(timeout=60) for process in processes]

    assert [process.returncode for process in processes] == [0, 0]
    assert endings[0][0] == endings[1][0] == f"{cache / 'models' / 'tiny-llama'}\n"
    told = sorted(errors.strip() for _, errors in endings)
    assert told == ["tiny-llama: built", "tiny-llama: ready, made by another process"]
    assert names(cache / "models") == {"tiny-llama"}


def test_leftover_of_a_similar_name_is_kept(cache: Path) -> None:
    """The lock of one model says nothing about another whose name begins the same."""
    other = cache / "models" / ".tiny-llama.v2.0123456789abcdef.tmp"
    other.mkdir(parents=True)

    ensure_tiny_llama()

    assert other.is_dir()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", model_store.MANIFEST_NAME])
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_damaged_model_is_rebuilt(name: str, damage: str) -> None:
    """A ready directory is compared with its manifest at every call."""
    directory = ensure_tiny_llama()
    original = (directory / name).read_bytes()
    (directory / name).unlink()
    if damage == "short":
        (directory / name).write_bytes(original[:-10])

    assert ensure_tiny_llama() == directory
    assert (directory / name).read_bytes() == original


def test_changed_byte_is_found_when_verifying() -> None:
    """Sizes are compared always, contents on request."""
    directory = ensure_tiny_llama()
    weights = directory / "model.safetensors"
    original = weights.read_bytes()
    weights.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))

    ensure_tiny_llama()
    assert weights.read_bytes() != original
    ensure_tiny_llama(verify=True)
    assert weights.read_bytes() == original


def test_new_revision_is_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that an older version of the code made is not taken for today's."""
    directory = ensure_tiny_llama()
    monkeypatch.setattr(tiny_models, "REVISION", tiny_models.REVISION + 1)

    ensure_tiny_llama()

    manifest = model_store.read_manifest(directory)
    assert manifest is not None
    assert manifest.revision == tiny_models.REVISION


# A place that the user chose.


def test_output_takes_a_new_or_an_empty_directory(tmp_path: Path) -> None:
    """The model lies in the named directory itself, complete and usable at a second call."""
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "new" / "model", tmp_path / "empty"):
        assert ensure_tiny_llama(output=target) == target
        assert fault(target) is None
        (target / "config.json").unlink()
        ensure_tiny_llama(output=target)
        assert fault(target) is None


def test_output_never_destroys_what_is_not_ours(tmp_path: Path) -> None:
    """A directory with other files, or with another model, is refused and left as it was."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("one")
    ensure_tiny_llama(TinyLlama(seed=1), tmp_path / "other")
    mixed = ensure_tiny_llama(output=tmp_path / "mixed")
    (mixed / "notes").write_text("two")
    (mixed / "config.json").unlink()

    for name, sentence in (
        ("thesis", "holds other files"),
        ("other", "holds another model (tiny-llama-seed1)"),
        ("mixed", "also holds notes"),
        ("thesis/chapter", "is a file"),
    ):
        with pytest.raises(CommandError) as error:
            ensure_tiny_llama(output=tmp_path / name)
        assert sentence in error.value.message

    assert (tmp_path / "thesis" / "chapter").read_text() == "one"
    assert (mixed / "notes").read_text() == "two"
    assert fault(tmp_path / "other") is None


# The model itself.


def test_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    """Tests on two machines compare answers of the same model."""
    first, again, other = (
        ensure_tiny_llama(TinyLlama(seed=seed), tmp_path / name)
        for name, seed in (("first", 7), ("again", 7), ("other", 8))
    )
    name = "model.safetensors"

    assert (first / name).read_bytes() == (again / name).read_bytes()
    assert (first / name).read_bytes() != (other / name).read_bytes()


def test_tiny_llama_is_the_one_it_always_was() -> None:
    """Figures and traces of earlier versions were made with this very model."""
    digest = model_store.file_sha256(ensure_tiny_llama() / "model.safetensors")

    assert digest == "42e62e04b728a6d4b9c6b4f433124f581c48b6614a44fc48504fdfdbeecbb806"


def test_shapes_follow_the_options() -> None:
    """The configuration and the tensors describe the same model."""
    result = run("make", "tiny-llama", "--layers", "3", "--heads", "4", "--head-dim", "64")
    directory = Path(result.stdout.splitlines()[-1])
    config = json.loads((directory / "config.json").read_text())
    tensors = safetensors_numpy.load_file(directory / "model.safetensors")

    assert directory.name == "tiny-llama-layers3-heads4-headdim64"
    assert (config["num_hidden_layers"], config["hidden_size"]) == (3, 256)
    assert tensors["model.layers.2.self_attn.q_proj.weight"].shape == (256, 256)
    assert tensors["model.layers.2.self_attn.k_proj.weight"].shape == (128, 256)
    assert len(tensors) == 3 + 3 * 9
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float32)}


def test_byte_tokens_are_bytes() -> None:
    """Token ids are the text's bytes, so tests can write prompts as either."""
    tokenizer = byte_tokenizer()
    text = bytes(range(128)).decode() + "é漢🙂"

    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("a<|im_end|>").ids == [ord("a"), 258]
    assert tokenizer.decode([ord("a"), 258]) == "a"


def test_smollm2_layers_are_checked_before_anything_else() -> None:
    """The function behind the command refuses what the command refuses."""
    with pytest.raises(CommandError, match="cannot keep 99"):
        ensure_smollm2(layers=99)


def fault(directory: Path) -> str | None:
    manifest = model_store.read_manifest(directory)
    return model_store.find_fault(directory, manifest, verify=True)


# Runs the command with the writing of weights, in the middle of a build, replaced by an action.
PATCHED = """
import os, sys
from time import sleep
from opal_connector.cli import main, tiny_models
tiny_models.write_weights = lambda *_: ({action})
sys.argv = ["opal", "models", "make", "tiny-llama"]
main.main()
"""
