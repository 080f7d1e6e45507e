"""Clusters of fake engines that are children, for tests of `opal serve`."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opal_connector.cli.serving.load import serve_config
from opal_connector.cli.serving.running import RunningCluster
from opal_connector.cli.serving.schema import ServeConfig

FAKE = (sys.executable, str(Path(__file__).parent / "fake_engine_process.py"))
QUICK_RESTART = {"first_seconds": 0.05, "longest_seconds": 0.2, "jitter": 0.0}
QUICK_HEALTH = {"interval_seconds": 0.05, "timeout_seconds": 1.0, "dead_after_seconds": 0.5}


def given(directory: Path, **changes: Any) -> dict[str, Any]:
    """A file's contents: two fake engines with private and shared tiers, in a hurry."""
    (directory / "model").mkdir(exist_ok=True)
    tiers = {
        "kvc_tiers": ["CPUMemory", "LocalNVMe", "DistributedFS"],
        "LocalNVMe": {"path": str(directory / "{name}")},
        "DistributedFS": {"path": str(directory / "shared")},
    }
    base: dict[str, Any] = {
        "model": str(directory / "model"),
        "instances": 2,
        "command": list(FAKE),
        "tiers": tiers,
        "router": {"port": 0, "health": QUICK_HEALTH, "breaker": {"open_seconds": 0.2}},
        "restart": QUICK_RESTART,
        "stop": {"drain_seconds": 2.0, "kill_seconds": 2.0},
    }
    return {**base, **changes}


def fake_cluster(directory: Path, **changes: Any) -> ServeConfig:
    """The checked configuration of it."""
    return serve_config(given(directory, **changes))


def environment(**more: str) -> Mapping[str, str]:
    """Of serve and so of the engines."""
    return {**os.environ, **more}


def pids(running: RunningCluster) -> list[int]:
    """The engines' processes."""
    return [one.pid for one in running.supervisors.values() if one.pid is not None]


def _status(pid: int) -> list[str]:
    """What the kernel tells of a process after its name: its state, its parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def lives(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet buried does not."""
    status = _status(pid)
    return bool(status) and status[0] != "Z"


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    parents = {
        int(path.name): int(status[1])
        for path in Path("/proc").iterdir()
        if path.name.isdecimal() and (status := _status(int(path.name)))
    }
    found, below = [], [pid]
    while below:
        parent = below.pop()
        children = [child for child, of in parents.items() if of == parent]
        found += children
        below += children
    return found
