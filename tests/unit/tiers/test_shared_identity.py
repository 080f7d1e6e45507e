"""A shared directory has one name, whoever asks first and wherever it is mounted."""

import errno
import os
import threading
from pathlib import Path

import pytest
from publisher_world import wait_until

from opal_connector.cli.tiers_removal import Removed, clear, collect_garbage
from opal_connector.reports import RateLimitedWarnings
from opal_connector.tiers import Need, SharedDirectory, SharedKeeper, shared_keeper
from opal_connector.tiers.directory import find_slots
from opal_connector.tiers.shared_identity import IDENTITY_NAME, shared_identity

NAMESPACE = bytes(range(32))


def test_the_name_is_given_once_and_is_the_same_at_every_mount_point(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    name = shared_identity(root)
    elsewhere.symlink_to(root)
    assert shared_identity(elsewhere) == shared_identity(root) == name
    assert shared_identity(tmp_path / "another") != name


def test_many_who_ask_at_once_get_one_name_and_leave_nothing_behind(tmp_path: Path) -> None:
    names: list[str] = []
    start = threading.Barrier(16)

    def ask() -> None:
        start.wait()
        names.append(shared_identity(tmp_path / "root"))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names) == 16
    assert len(set(names)) == 1
    assert os.listdir(tmp_path / "root") == [IDENTITY_NAME]


def test_a_filesystem_without_links_has_a_name_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert shared_identity(tmp_path) == shared_identity(tmp_path)
    assert os.listdir(tmp_path) == [IDENTITY_NAME]


@pytest.mark.parametrize("text", ["", "0123", "x" * 32])
def test_a_name_that_is_none_is_an_error_and_is_not_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / IDENTITY_NAME).write_text(text)
    with pytest.raises(ValueError, match="no name"):
        shared_identity(tmp_path)
    assert (tmp_path / IDENTITY_NAME).read_text() == text


def test_neither_scans_nor_care_of_the_directory_mind_the_name(tmp_path: Path) -> None:
    name = shared_identity(tmp_path)
    directory = SharedDirectory(tmp_path, namespace=NAMESPACE, ranks=1, limit_bytes=1 << 20)
    assert directory.refresh().names == ()
    grant = directory.renew(wanted_bytes=100, unused_bytes=0, is_held=lambda key: False)
    assert (grant.granted_bytes, grant.total_bytes) == (100, 100)
    assert find_slots(tmp_path) == []
    removed = Removed()
    collect_garbage(tmp_path, removed)
    clear(tmp_path, removed)
    assert (removed.leftovers, removed.unreadable, removed.freed_bytes) == (0, 0, 0)
    assert shared_identity(tmp_path) == name


def _keeper(root: Path, **options: bool) -> SharedKeeper:
    directory = SharedDirectory(root, namespace=NAMESPACE, ranks=1, limit_bytes=1 << 20)
    return SharedKeeper(
        directory, tier=1, refresh_seconds=0.1, is_held=lambda key: False, **options
    )


def test_two_keepers_find_the_same_name_in_their_own_threads(tmp_path: Path) -> None:
    keepers = [_keeper(tmp_path, wants_identity=True) for _ in range(2)]
    wait_until(lambda: all(keeper.identity for keeper in keepers), "the names")
    assert keepers[0].identity == keepers[1].identity == shared_identity(tmp_path)
    for keeper in keepers:
        keeper.close(unused_bytes=0)


def test_a_keeper_names_nothing_unless_it_is_asked_to(tmp_path: Path) -> None:
    keeper = _keeper(tmp_path)
    keeper.renew(Need(100, 0))
    wait_until(lambda: keeper.has_news, "a grant")
    keeper.close(unused_bytes=0)
    assert keeper.identity is None
    assert not (tmp_path / IDENTITY_NAME).exists()


def test_a_directory_that_cannot_be_named_yet_is_named_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_keeper, "warnings", RateLimitedWarnings(shared_keeper.logger))
    (tmp_path / IDENTITY_NAME).write_text("half")
    keeper = _keeper(tmp_path, wants_identity=True)
    wait_until(lambda: "cannot name the shared tier" in caplog.text, "a warning")
    assert keeper.identity is None
    (tmp_path / IDENTITY_NAME).write_text("ab" * 16)
    wait_until(lambda: keeper.identity == "ab" * 16, "the name")
    keeper.close(unused_bytes=0)
