"""What the host lends to transfers: memory, pinned rows of it, processor cores."""

import contextlib
import os
from pathlib import Path

import torch

from opal_connector.tiers.base import Rows

_FOR_ALL_CONTEXTS = 1  # cudaHostRegisterPortable


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


class CudaPins:
    """Lets a CUDA device copy from and to rows directly that are there already. No state."""

    def pin(self, rows: Rows) -> bool:
        """Register rows, which takes all pages at once; whether the device does so."""
        if rows.nbytes == 0:
            return True
        code = torch.cuda.cudart().cudaHostRegister(
            rows.ctypes.data, rows.nbytes, _FOR_ALL_CONTEXTS
        )
        if int(code) == 0:
            return True
        # The runtime keeps its last error until somebody asks: better here than in the model.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return False

    def unpin(self, rows: Rows) -> None:
        """Give the registration back, before the memory goes."""
        if rows.nbytes:
            torch.cuda.cudart().cudaHostUnregister(rows.ctypes.data)


def pinned_host_rows(*, row_count: int, row_bytes: int) -> Rows:
    """Rows that a device can copy from and to directly. Takes all pages at once."""
    pool = torch.empty((row_count, row_bytes), dtype=torch.uint8, pin_memory=True)
    rows: Rows = pool.numpy()  # keeps the tensor alive
    return rows
