"""A short run of the soak; `scripts/soak` does long ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("seed", [7])
def test_short_soak_finds_nothing(tmp_path: Path, seed: int) -> None:
    """No wrong byte, no exception, books that agree, limits kept, and an end in time."""
    report_path = tmp_path / "soak.json"
    run = subprocess.run(
        [sys.executable, "-m", "soak", "--ops=2000", f"--seed={seed}", f"--json={report_path}"],
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert report_path.exists(), run.stderr

    report = json.loads(report_path.read_text())

    assert report["ok"], report
    assert run.returncode == 0
    assert report["ops"] == 2000
    assert report["loads_right"] > 100, "it did not load enough to mean anything"
    assert sum(report["faults"].values()) > 20
    assert sum(report["failures"].values()) > 20


def test_report_of_a_soak_that_found_something_is_not_ok() -> None:
    """One wrong byte, one exception or one late second is enough."""
    from soak.run import Report, Soak

    fine = Soak(operations=0, seed=0, say=lambda line: None)
    assert fine.run().ok
    for field, value in (
        ("wrong_bytes", 1),
        ("late_writes", 1),
        ("exceptions", 1),
        ("auditors_clean", False),
        ("events_equal_contents", False),
        ("leases", 1),
        ("jobs", 1),
        ("over_capacity", 1),
        ("over_capacity_on_disk", 1),
        ("temporary_files", 1),
        ("shutdown_s", 5.1),
    ):
        soak = Soak(operations=0, seed=0, say=lambda line: None)
        soak.report = Report(**{field: value})  # type: ignore[arg-type]
        assert not soak.run().ok, field
