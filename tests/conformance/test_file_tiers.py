"""Every tier of files under the one suite."""

import os
from pathlib import Path

import pytest
from fakes import FakeClock
from file_tier_crash_suite import FileTierCrashSuite
from file_tier_suite import FileTierSuite
from typing_extensions import override

from opal_connector.tiers.distributed_fs import DistributedFS
from opal_connector.tiers.file_tier import FileTier
from opal_connector.tiers.local_nvme import LocalNVMe
from opal_connector.transfers import ObjectName

CLOCK = FakeClock()


class Files:
    """Raw accessors that hold for all tiers of files."""

    def raw_path(self, tier: FileTier, name: ObjectName) -> Path:
        digits = name.chunk_hash.hex()
        return tier.directory / digits[:2] / f"{digits}-g{name.group}.opal"

    def raw_temporaries(self, root: Path) -> list[Path]:
        return list(root.rglob(".tmp-*"))


class TestLocalNVMe(Files, FileTierCrashSuite):
    @override
    def make(self, root: Path, row_bytes: int, rank: int = 0) -> FileTier:
        return LocalNVMe(root, row_bytes=row_bytes, rank=rank)


class TestDistributedFS(Files, FileTierCrashSuite):
    @override
    def make(self, root: Path, row_bytes: int, rank: int = 0) -> FileTier:
        return DistributedFS(root, row_bytes=row_bytes, rank=rank, clock=CLOCK)

    @override
    def let_a_minute_pass(self, root: Path) -> None:
        CLOCK.now += 60
        for path in root.rglob("*.opal"):
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 60 * 10**9))


class TestLocalNVMeOfThreeMembers(TestLocalNVMe):
    """Objects that three kv groups share: as many rows, for fewer blocks."""

    members = 3


class TestDistributedFSOfThreeMembers(TestDistributedFS):
    """Objects that three kv groups share: as many rows, for fewer blocks."""

    members = 3


def test_nobody_overrides_a_test_of_the_suite() -> None:
    """A tier that cannot do what the suite asks is not a tier."""
    with pytest.raises(TypeError, match="overrides test_removed_object_is_gone"):
        type("TestSpecial", (FileTierSuite,), {"test_removed_object_is_gone": lambda self: None})
