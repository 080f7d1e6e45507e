"""What engines on a CPU leave in shared memory, with small processes in place of engines."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from opal_connector.integrations.lmcache.segments import (
    EngineSegments,
    segments_removed,
)

# A server that starts a worker, which makes its segment and then waits to be killed.
WORKER = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], f"lmcache_kv_{os.getpid()}_0").write_bytes(b"kv")
print(os.getpid(), flush=True)
sys.stdin.read()
"""
SERVER = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]])
sys.exit(worker.wait() != 0)
"""


@contextmanager
def engine(directory: Path) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A server, and the process id of its worker, whose segment is there."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(directory), WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None
        yield server, int(server.stdout.readline())


def until(condition: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at, f"not in time: {what}"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_killed_worker_left_is_removed(tmp_path: Path, number: int) -> None:
    """The worker's parent alone is a child of the one that watches."""
    segments = EngineSegments(tmp_path)
    with engine(tmp_path) as (server, worker):
        segments.look()
        os.kill(worker, number)
        server.wait()
        assert names(tmp_path) == [f"lmcache_kv_{worker}_0"]
    assert segments.remove()
    assert names(tmp_path) == []


def test_what_an_orphan_left_is_removed(tmp_path: Path) -> None:
    """A worker that outlives its server is still ours when it ends."""
    segments = EngineSegments(tmp_path)
    with engine(tmp_path) as (server, worker):
        segments.look()
        server.kill()
        server.wait()
        segments.look()
        assert not segments.remove()
        os.kill(worker, signal.SIGKILL)
        until(segments.remove, "the worker has ended")
    assert names(tmp_path) == []


def test_what_a_running_engine_has_is_not_touched(tmp_path: Path) -> None:
    """It reads and writes its KV there."""
    segments = EngineSegments(tmp_path)
    with engine(tmp_path) as (_, worker):
        segments.look()
        assert not segments.remove()
        assert names(tmp_path) == [f"lmcache_kv_{worker}_0"]


def test_the_segments_of_others_are_not_touched(tmp_path: Path) -> None:
    """Other ids, other times and other names are somebody else's."""
    segments = EngineSegments(tmp_path)
    with engine(tmp_path) as (_, worker):
        segments.look()
        os.kill(worker, signal.SIGKILL)
    ours = tmp_path / f"lmcache_kv_{worker}_0"
    long_ago = time.time() - 3600  # by a process of another container that has the same id
    os.utime(ours, (long_ago, long_ago))
    for name in ("lmcache_kv_4194305_0", "lmcache_kv_mine_0", f"lmcache_l1_pool_{worker}"):
        (tmp_path / name).touch()
    before = names(tmp_path)
    assert segments.remove()
    assert names(tmp_path) == before


def test_a_block_that_fails_removes_what_its_processes_left(tmp_path: Path) -> None:
    """Whatever the reason of the end; nobody has to look himself."""

    def fail() -> None:
        with segments_removed(tmp_path) as segments, engine(tmp_path) as (_, worker):
            until(lambda: worker in segments._lives, "the worker was seen")
            os.kill(worker, signal.SIGKILL)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert names(tmp_path) == []
