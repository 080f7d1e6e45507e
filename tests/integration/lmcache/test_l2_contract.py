"""LMCache's own contract tests for L2 adapters, with Opal's adapter in place of the mock.

Everything but `TestCloseInterface`, which makes its adapters itself.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")

from l2_world import tiers_of
from medium import Medium
from sdist_tests import NotAvailableError, contract_tests

from opal_connector.integrations.lmcache.l2_adapter import OpalL2Adapter

try:
    CONTRACT = contract_tests()
except NotAvailableError as error:
    pytest.skip(f"LMCache's contract tests cannot be had: {error}", allow_module_level=True)

for _name, _tests in vars(CONTRACT).items():
    if _name.startswith("Test") and _name != "TestCloseInterface":
        setattr(sys.modules[__name__], _name, _tests)


@pytest.fixture(params=["CPUMemory", "LocalNVMe", "CPUMemory+LocalNVMe"])
def adapter(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpalL2Adapter]:
    """Opal's adapter with about a megabyte, as the mock has it, in every kind of tier."""
    names = request.param.split("+")
    memory = "1MiB" if "CPUMemory" in names else None
    directory = tmp_path / "nvme" if "LocalNVMe" in names else None
    made = OpalL2Adapter(tiers_of(directory, memory=memory, disk="1MiB"))
    yield made
    made._runtime.books.check()
    made.close()


@pytest.fixture
def slow_adapter(tmp_path: Path) -> Iterator[OpalL2Adapter]:
    """Opal's adapter over a disk that takes its time for every write."""
    medium = Medium(tmp_path)

    def slowly(call: str, path: str) -> None:
        if call == "pwritev" and ".tmp-" in path:
            time.sleep(0.2)

    with medium.installed():
        made = OpalL2Adapter(tiers_of(tmp_path / "nvme", memory=None))
        medium.rule = slowly
        yield made
        made.close()


def test_every_class_of_the_contract_is_run() -> None:
    """42 tests: the mock's 44 without the two that make an adapter themselves."""
    here: dict[str, Any] = vars(sys.modules[__name__])
    classes = [tests for name, tests in here.items() if name.startswith("Test")]
    count = sum(name.startswith("test_") for tests in classes for name in vars(tests))
    assert count == 42
