"""Every tier store under the one suite."""

import numpy as np
import pytest
from tier_suite import TierSuite
from typing_extensions import override

from opal_connector.tiers import CPUMemory, TierStore, allocate_host_rows


class TestCPUMemory(TierSuite):
    @override
    def make(self, row_count: int, row_bytes: int) -> TierStore:
        return CPUMemory(allocate_host_rows(row_count=row_count, row_bytes=row_bytes))

    @override
    def raw_get(self, store: TierStore, row: int) -> bytes:
        assert isinstance(store, CPUMemory)
        return store.rows[row].tobytes()

    @override
    def raw_set(self, store: TierStore, row: int, data: bytes) -> None:
        assert isinstance(store, CPUMemory)
        store.rows[row] = np.frombuffer(data, dtype=np.uint8)


class TestCPUMemoryOfThreeMembers(TestCPUMemory):
    """Rows of one block in three kv groups are as different as those of three blocks."""

    members = 3


def test_nobody_overrides_a_test_of_the_suite() -> None:
    """A tier that cannot do what the suite asks is not a tier."""
    with pytest.raises(TypeError, match="overrides test_what_was_written_is_read"):
        type("TestSpecial", (TierSuite,), {"test_what_was_written_is_read": lambda self: None})
