"""Tiers of files from their settings: what the filesystem says, or cannot say."""

import os
from pathlib import Path

import pytest

from opal_connector.config import LocalNVMeConfig
from opal_connector.tiers import make_keyed_tier
from opal_connector.tiers.build import free_bytes


def test_default_capacity_is_half_of_what_is_free(tmp_path: Path) -> None:
    """Of the filesystem that the directory will be on, less what is to stay free."""
    settings = LocalNVMeConfig(path=str(tmp_path / "not" / "yet"), reserve_GB=0)

    _, capacity_bytes = make_keyed_tier(
        "LocalNVMe", settings, row_bytes=4096, rank=0, local_ranks=2
    )

    assert capacity_bytes == pytest.approx(free_bytes(tmp_path) / 4, rel=0.2)
    assert not (tmp_path / "not").exists()


def test_ranks_of_one_disk_share_what_others_have_there(tmp_path: Path) -> None:
    """As they share its capacity."""
    (tmp_path / "notes").write_bytes(bytes(4 << 20))
    settings = LocalNVMeConfig(path=str(tmp_path), capacity_GB="64MiB")

    store, _ = make_keyed_tier("LocalNVMe", settings, row_bytes=4096, rank=0, local_ranks=4)

    assert list(store.open(bytes(32))) == []
    assert store.foreign_bytes == pytest.approx(1 << 20, abs=1 << 16)  # with lock and index
    store.close()


def test_filesystem_that_cannot_be_asked_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that fails at the start costs its tier, not the engine."""

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(os, "statvfs", fail)

    _, capacity_bytes = make_keyed_tier(
        "LocalNVMe", LocalNVMeConfig(path=str(tmp_path)), row_bytes=4096, rank=0
    )

    assert capacity_bytes == 0
