"""The files that say what names refer to, when somebody takes them away under a running server."""

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")

from l2_world import hosted, key_of, store_some, tiers_of, until

from opal_connector.integrations.lmcache import contexts
from opal_connector.integrations.lmcache.contexts import ContextFiles
from opal_connector.integrations.lmcache.identity import Context, Layout
from opal_connector.tiers.file_names import namespace_name

NAMESPACE = b"\1" * 32


def context(number: int) -> Context:
    """Some context."""
    return Context(f"model-{number}", 0, "", Layout(((4,),), ("float32",), 16))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[ContextFiles]:
    """The contexts of a directory, looked after all the time."""
    found = ContextFiles(tmp_path, NAMESPACE, look_seconds=0.01)
    yield found
    found.close()


def written(root: Path) -> int:
    """How many contexts are there."""
    return len(list((root / namespace_name(NAMESPACE) / "contexts").glob("*.json")))


def emptied(root: Path, *, but_for_the_tier: bool) -> None:
    """Everything is removed; the tier has made its directory anew, or not yet."""
    space = root / namespace_name(NAMESPACE)
    shutil.rmtree(space)
    if but_for_the_tier:
        (space / "r0").mkdir(parents=True)


def test_files_that_are_gone_are_written_again(tmp_path: Path, files: ContextFiles) -> None:
    """Nobody asks for them again: whatever was stored before knows them as written."""
    files.want([context(0), context(1)])
    until(lambda: written(tmp_path) == 2, "they are written")
    emptied(tmp_path, but_for_the_tier=True)
    until(lambda: written(tmp_path) == 2, "they are written again")


def test_one_file_that_is_gone_is_written_again(tmp_path: Path, files: ContextFiles) -> None:
    """Others may have made the folder anew, with theirs."""
    files.want([context(0), context(1)])
    until(lambda: written(tmp_path) == 2, "they are written")
    next((tmp_path / namespace_name(NAMESPACE) / "contexts").glob("*.json")).unlink()
    until(lambda: written(tmp_path) == 2, "it is written again")


def test_what_was_read_and_not_written_here_is_written_again_too(tmp_path: Path) -> None:
    """Objects from before a restart may be in memory, and come to the disk later."""
    before = ContextFiles(tmp_path, NAMESPACE)
    before.want([context(0)])
    before.close()
    after = ContextFiles(tmp_path, NAMESPACE)
    until(lambda: after.is_read, "they are read")
    emptied(tmp_path, but_for_the_tier=True)
    after.close()
    assert written(tmp_path) == 1


def test_an_emptied_directory_that_nobody_uses_stays_empty(tmp_path: Path) -> None:
    """Without the tier's directory there are no objects, and so no names."""
    files = ContextFiles(tmp_path, NAMESPACE)
    files.want([context(0)])
    until(lambda: written(tmp_path) == 1, "it is written")
    emptied(tmp_path, but_for_the_tier=False)
    files.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("faults", [1, 1000])
def test_a_file_that_cannot_be_read_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: int
) -> None:
    """Objects of contexts that nobody has read are deleted, so it is tried again; not for ever."""
    before = ContextFiles(tmp_path, NAMESPACE)
    before.want([context(number) for number in range(3)])
    before.close()
    left = {max(tmp_path.rglob("contexts/*.json")).name: faults}
    read_bytes = Path.read_bytes

    def faulty(path: Path) -> bytes:
        if left.get(path.name):
            left[path.name] -= 1
            raise OSError(errno.EIO, "input/output error")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", faulty)
    monkeypatch.setattr(contexts, "_RETRY_SECONDS", 0.001)
    after = ContextFiles(tmp_path, NAMESPACE)
    after.read_again()
    until(lambda: after.is_read, "they are read")
    assert len(after.take()) == (3 if faults == 1 else 2)
    after.close()


@pytest.mark.parametrize("memory", [None, "1MiB"])
def test_what_is_stored_after_the_directory_was_emptied_survives_a_restart(
    tmp_path: Path, memory: str | None
) -> None:
    """The tier makes its directory anew and goes on storing; what it stores has to have a name."""
    params = tiers_of(tmp_path, memory=memory)
    with hosted(params) as host:
        assert all(store_some(host, range(2)))
        host.settle()
        until(lambda: list(tmp_path.rglob("contexts/*.json")), "the context is written")
        [space] = tmp_path.iterdir()
        shutil.rmtree(space)
        assert all(store_some(host, range(2, 6)))
        host.settle()
    with hosted(params) as host:
        assert host.look_up([key_of(n) for n in range(2, 6)]) == [True] * 4
