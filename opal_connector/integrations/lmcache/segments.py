"""Shared memory that engines on a CPU leave behind when LMCache reads their KV through it.

LMCache's connector moves a worker's whole KV cache into `/dev/shm/lmcache_kv_<pid>_<n>` and means
to remove that at the interpreter's end. vLLM's workers are ended without one, so every engine
leaves as many bytes as its KV cache has, in memory, until somebody removes them.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

SHARED_MEMORY: Final = Path("/dev/shm")
PREFIX: Final = "lmcache_kv_"
_LOOK_SECONDS: Final = 0.5  # a worker lives for seconds before it makes a segment
_END_SECONDS: Final = 5.0  # for processes that have been killed to give up their memory
_CLOCK_SECONDS: Final = 2.0  # how far a file's time and our looks may lie apart


class _Process(NamedTuple):
    """A process that runs. Its start, in ticks, tells it from others that had its id before."""

    process: int
    parent: int
    start: int


@dataclass
class _Life:
    """When a process was first and last seen alive, in seconds of the wall clock."""

    start: int
    first: float
    last: float


@dataclass
class EngineSegments:
    """The processes that this one has started, directly or not, and the segments they left.

    A segment says nothing of its owner but a process id, and containers may share `/dev/shm`
    without sharing ids. So only what was made while a process of ours had that id is removed.
    `_lives` is touched by one thread at a time: that of `segments_removed`, then its caller's.
    """

    directory: Path = SHARED_MEMORY
    _lives: dict[int, _Life] = field(default_factory=dict)

    def look(self) -> None:
        """Remember what runs now."""
        now, running = time.time(), list(_processes())
        ours = {os.getpid()} | {one.process for one in running if self._is_known(one)}
        for one in running:
            if one.process in ours or one.parent in ours:
                ours.add(one.process)
                if not self._is_known(one):
                    self._lives[one.process] = _Life(one.start, now, now)
                self._lives[one.process].last = now

    def _is_known(self, one: _Process) -> bool:
        life = self._lives.get(one.process)
        return life is not None and life.start == one.start

    def remove(self) -> bool:
        """Remove what processes that have ended left; whether none is left that has a segment."""
        running = {one.process for one in _processes()}
        is_over = True
        for path, owner in self._ours():
            if owner in running:
                is_over = False
                continue
            with contextlib.suppress(OSError):
                path.unlink()
        return is_over

    def _ours(self) -> Iterator[tuple[Path, int]]:
        for path in self.directory.glob(f"{PREFIX}*_*"):
            owner = path.name.removeprefix(PREFIX).partition("_")[0]
            life = self._lives.get(int(owner)) if owner.isdigit() else None
            with contextlib.suppress(OSError):
                # Writes through a mapping leave the time as it was when the segment was made.
                made = path.stat().st_mtime
                if life and life.first - _CLOCK_SECONDS <= made <= life.last + _CLOCK_SECONDS:
                    yield path, int(owner)


@contextlib.contextmanager
def segments_removed(directory: Path = SHARED_MEMORY) -> Iterator[EngineSegments]:
    """Watch what is started in a `with` block; at its end what that has left is removed.

    The processes have to be at their end by then: what one that goes on has is not touched.
    """
    segments, is_over = EngineSegments(directory), threading.Event()

    def watch() -> None:
        while not is_over.wait(_LOOK_SECONDS):
            segments.look()

    watching = threading.Thread(target=watch, name="lmcache-segments", daemon=True)
    watching.start()
    try:
        yield segments
    finally:
        is_over.set()
        watching.join()
        give_up_at = time.monotonic() + _END_SECONDS
        while not segments.remove() and time.monotonic() < give_up_at:
            time.sleep(_END_SECONDS / 100)


def _processes() -> Iterator[_Process]:
    for name in sorted(filter(str.isdigit, os.listdir("/proc")), key=int):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may have spaces and parentheses.
            facts = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            if facts[0] != "Z":
                yield _Process(int(name), int(facts[1]), int(facts[19]))
