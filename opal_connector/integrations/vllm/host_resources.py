"""What the host lends to transfers: memory, pinned rows of it, processor cores."""

import contextlib
import os
from pathlib import Path

import torch

from opal_connector.tiers.base import Rows


def available_memory_bytes() -> int:
    """Memory that can be had without swapping: the machine's, or the container's if less."""
    available = _machine_available_bytes()
    limit = _read_int(Path("/sys/fs/cgroup/memory.max"))
    used = _read_int(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _machine_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # no such limit ("max"), or no such control group


def process_cpus() -> frozenset[int]:
    """The cores of all threads of this process together.

    On a CPU the model's threads are tied to one core each, the calling thread too; a transfer
    thread that inherited that would run on the core of a thread that computes.
    """
    cpus: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            cpus |= os.sched_getaffinity(int(task.name))
    return frozenset(cpus)


def pinned_host_rows(*, row_count: int, row_bytes: int) -> Rows:
    """Rows that a device can copy from and to directly. Takes all pages at once."""
    pool = torch.empty((row_count, row_bytes), dtype=torch.uint8, pin_memory=True)
    rows: Rows = pool.numpy()  # keeps the tensor alive
    return rows
