"""Weights are told apart by their bytes, never by their name or place."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from opal_connector.keys import directory_fingerprint, weights, weights_fingerprint

Opened = list[Path]


@pytest.fixture(autouse=True)
def cache_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache is never touched: every test has its own."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("OPAL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights.json"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The files that were opened for reading their bytes."""
    seen: Opened = []
    real: Callable[..., object] = Path.open

    def recording(self: Path, mode: str = "r", *args: object, **kwargs: object) -> object:
        if mode == "rb":
            seen.append(self)
        return real(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", recording)
    return seen


def model(directory: Path, weight: bytes = b"weights", config: str = "{}") -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(config)
    (directory / "model.safetensors").write_bytes(weight)
    return directory


def snapshot(hub: Path, blobs: dict[str, tuple[str, bytes]], commit: str = "c0ffee") -> Path:
    """A model as the hub's client lays it down: links into a folder of content-named blobs."""
    directory = hub / "models--org--name" / "snapshots" / commit
    directory.mkdir(parents=True)
    store = hub / "models--org--name" / "blobs"
    store.mkdir(exist_ok=True)
    for name, (digest, content) in blobs.items():
        (store / digest).write_bytes(content)
        (directory / name).symlink_to(Path("../../blobs") / digest)
    return directory


def hub_blobs(weight: str = "a" * 64) -> dict[str, tuple[str, bytes]]:
    return {
        "config.json": ("b" * 40, b"{}"),
        "model.safetensors": (weight, b"weights"),
        "README.md": ("d" * 40, b"read me"),
    }


# HT-19: other weights, same name.


def test_ht_19_one_changed_byte_is_another_fingerprint(tmp_path: Path) -> None:
    """Two directories of one name: one byte of one tensor decides."""
    one = model(tmp_path / "a" / "llama", b"weights")
    other = model(tmp_path / "b" / "llama", b"weighty")

    assert weights_fingerprint(str(one)) != weights_fingerprint(str(other))


def test_ht_19_identical_copy_elsewhere_is_the_same(tmp_path: Path) -> None:
    """The same weights on another path, even under another name, are the same cache."""
    one = model(tmp_path / "a" / "llama")
    shutil.copytree(one, tmp_path / "b" / "renamed")

    assert weights_fingerprint(str(one)) == weights_fingerprint(str(tmp_path / "b" / "renamed"))


def test_changed_configuration_is_another_fingerprint(tmp_path: Path) -> None:
    """The same tensors with another rope base compute other KV."""
    one = model(tmp_path / "a", config='{"rope_theta": 10000}')
    other = model(tmp_path / "b", config='{"rope_theta": 50000}')

    assert weights_fingerprint(str(one)) != weights_fingerprint(str(other))


@pytest.mark.parametrize(
    "name",
    [
        "model-00002-of-00002.safetensors",
        "pytorch_model.bin",
        "consolidated.00.pth",
        "model.gguf",
        "model.tensors",
        "adapter_config.json",
        "params.json",
        "hf_quant_config.json",
        "quantize_config.json",
        "preprocessor_config.json",
        "modeling_custom.py",
    ],
)
def test_every_file_that_shapes_the_kv_counts(tmp_path: Path, name: str) -> None:
    """Another shard, quantisation, image preprocessing or model code is another cache."""
    directory = model(tmp_path / "a")
    fingerprints = set()
    for content in (None, "one", "two"):
        if content is not None:
            (directory / name).write_text(content)
        fingerprints.add(weights_fingerprint(str(directory)))

    assert len(fingerprints) == 3


def test_files_that_shape_no_kv_do_not_count(tmp_path: Path) -> None:
    """A README, a licence or a chat template may change without losing the cache."""
    directory = model(tmp_path / "a")
    before = weights_fingerprint(str(directory))
    for name in ("README.md", "LICENSE", "chat_template.jinja", "model.safetensors.lock"):
        (directory / name).write_text("text")

    assert weights_fingerprint(str(directory)) == before


def test_swapped_files_are_another_fingerprint(tmp_path: Path) -> None:
    """The names of the files count: two shards that changed places are another model."""
    one = model(tmp_path / "a", b"x")
    (one / "other.safetensors").write_bytes(b"y")
    other = model(tmp_path / "b", b"y")
    (other / "other.safetensors").write_bytes(b"x")

    assert weights_fingerprint(str(one)) != weights_fingerprint(str(other))


def test_single_file_is_read(tmp_path: Path, opened: Opened) -> None:
    """A GGUF file is a model: its bytes decide, and it too is read only once."""
    for name, content in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.gguf").write_bytes(content)
    a, b, c = (weights_fingerprint(str(tmp_path / name / "model.gguf")) for name in ("a", "b", "c"))
    assert a != b
    assert a == c
    opened.clear()

    assert weights_fingerprint(str(tmp_path / "a" / "model.gguf")) == a
    assert opened == []


def test_name_that_is_no_path_is_marked_as_a_name(tmp_path: Path) -> None:
    """What cannot be read here is named, visibly so, and never equal to something read."""
    assert weights_fingerprint("org/model") == "name:org/model"
    assert weights_fingerprint(str(tmp_path / "absent")).startswith("name:")


# Hub snapshots.


def test_hub_snapshot_is_named_by_its_blobs_and_not_read(tmp_path: Path, opened: Opened) -> None:
    """The hub's client named the blobs by their content: no start reads gigabytes again."""
    one = snapshot(tmp_path / "a", hub_blobs())
    same = snapshot(tmp_path / "b", hub_blobs(), commit="decade")
    other = snapshot(tmp_path / "c", hub_blobs("e" * 64))

    assert weights_fingerprint(str(one)) == weights_fingerprint(str(same))
    assert weights_fingerprint(str(one)) != weights_fingerprint(str(other))
    assert opened == []


def test_snapshot_of_plain_files_is_read(tmp_path: Path) -> None:
    """Where the client could not link, the bytes decide as in any directory."""
    one = model(tmp_path / "a" / "snapshots" / "c0ffee", b"weights")
    other = model(tmp_path / "b" / "snapshots" / "c0ffee", b"weighty")

    assert weights_fingerprint(str(one)) != weights_fingerprint(str(other))


def test_ht_19_links_to_files_that_are_no_blobs_are_read(tmp_path: Path) -> None:
    """A folder that happens to be called snapshots: names of link targets prove nothing."""
    fingerprints = set()
    for place, content in (("a", b"weights"), ("b", b"weighty")):
        store = model(tmp_path / place / "store", content)
        linked = tmp_path / place / "snapshots" / "today"
        linked.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (linked / name).symlink_to(store / name)
        fingerprints.add(weights_fingerprint(str(linked)))

    assert len(fingerprints) == 2


# The cache of digests.


def test_second_read_reads_no_file(tmp_path: Path, opened: Opened) -> None:
    """A restart costs a few stats, not a read of the weights."""
    directory = model(tmp_path / "a")
    first = weights_fingerprint(str(directory))
    assert {path.name for path in opened} == {"config.json", "model.safetensors"}
    opened.clear()

    assert weights_fingerprint(str(directory)) == first
    assert opened == []


def test_changed_file_is_read_again(tmp_path: Path, opened: Opened) -> None:
    """A file of the same size and name that was written again is not taken from the cache."""
    directory = model(tmp_path / "a")
    first = weights_fingerprint(str(directory))
    opened.clear()
    weight = directory / "model.safetensors"
    before = weight.stat().st_mtime_ns
    weight.write_bytes(b"weighty")
    os.utime(weight, ns=(before + 1, before + 1))

    assert weights_fingerprint(str(directory)) != first
    assert opened == [weight]


def test_replaced_file_with_the_same_times_is_read_again(tmp_path: Path) -> None:
    """Rsync and tar keep size and mtime; the inode still tells."""
    directory = model(tmp_path / "a")
    first = weights_fingerprint(str(directory))
    weight = directory / "model.safetensors"
    stat = weight.stat()
    other = directory / "incoming"
    other.write_bytes(b"weighty")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(weight)

    assert weights_fingerprint(str(directory)) != first


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"null",
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ],
)
def test_damaged_cache_costs_one_read(tmp_path: Path, cache_file: Path, content: bytes) -> None:
    """A torn cache of digests is as good as none, and is repaired."""
    directory = model(tmp_path / "a")
    first = weights_fingerprint(str(directory))
    cache_file.write_bytes(content)

    assert weights_fingerprint(str(directory)) == first
    assert len(json.loads(cache_file.read_text())) == 2


@pytest.mark.parametrize("value", [None, "", "None", 5, "zz" * 32, "ab" * 31])
def test_entry_that_is_no_digest_is_read_again(
    tmp_path: Path, cache_file: Path, value: object
) -> None:
    """Two models whose entries were damaged alike must not become one model."""
    directory = model(tmp_path / "a")
    first = weights_fingerprint(str(directory))
    cached = json.loads(cache_file.read_text())
    cache_file.write_text(json.dumps(dict.fromkeys(cached, value)))

    assert weights_fingerprint(str(directory)) == first


def test_cache_that_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only home costs time, never a start."""
    directory = model(tmp_path / "a")
    first = weights_fingerprint(str(directory))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPAL_CACHE_DIR", str(tmp_path / "file" / "below"))

    assert weights_fingerprint(str(directory)) == first


def test_cache_lies_under_the_users_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPAL_CACHE_DIR before XDG_CACHE_HOME before ~/.cache, and nothing lies elsewhere."""
    directory = model(tmp_path / "a")
    for name, place in (
        ("OPAL_CACHE_DIR", tmp_path / "cache" / "weights.json"),
        ("XDG_CACHE_HOME", tmp_path / "xdg" / "opal_connector" / "weights.json"),
        (None, tmp_path / "home" / ".cache" / "opal_connector" / "weights.json"),
    ):
        monkeypatch.delenv("OPAL_CACHE_DIR", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if name == "OPAL_CACHE_DIR":
            monkeypatch.setenv(name, str(tmp_path / "cache"))
        elif name == "XDG_CACHE_HOME":
            monkeypatch.setenv(name, str(tmp_path / "xdg"))
        assert not place.exists()
        weights_fingerprint(str(directory))

        assert place.is_file()
        assert [path.name for path in place.parent.iterdir()] == ["weights.json"]


def test_directory_without_weights_differs_from_one_with(tmp_path: Path) -> None:
    """Nothing is something else than a model."""
    empty = tmp_path / "empty"
    empty.mkdir()

    assert directory_fingerprint(empty) != directory_fingerprint(model(tmp_path / "a"))


def test_large_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest does not depend on the size of the pieces, and a piece bounds the memory."""
    whole = weights_fingerprint(str(model(tmp_path / "a", bytes(range(256)) * 10)))
    monkeypatch.setattr(weights, "_READ_BYTES", 100)

    assert weights_fingerprint(str(model(tmp_path / "b", bytes(range(256)) * 10))) == whole
