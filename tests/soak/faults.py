"""What can go wrong with a medium and its files, chosen by a seeded generator."""

import contextlib
import ctypes
import errno
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from medium import Hang, Medium, works

ERRORS = {
    "EIO": (errno.EIO, ("pwritev", "preadv", "open")),
    "EACCES": (errno.EACCES, ("open", "rename")),
    "EMFILE": (errno.EMFILE, ("open",)),
    "ENOSPC": (errno.ENOSPC, ("pwritev", "mkdir")),
}
DAMAGES = ("bit_flip", "torn", "short", "zeroed", "swapped", "removed")
_LIBC = ctypes.CDLL(None, use_errno=True)
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
SLOW_SECONDS = 0.06  # seconds of a real medium, scaled down like the timeouts of the tiers


def files_below(directory: Path, is_wanted: Callable[[str], bool]) -> list[Path]:
    """Files by name, in order. What vanishes meanwhile is not there."""
    return sorted(
        Path(folder, name)
        for folder, _, names in os.walk(directory)
        for name in names
        if is_wanted(name)
    )


def exchange(first: Path, second: Path) -> None:
    """Exchange two files at once: step by step, one that a tier has just deleted would come back.

    Raises:
        OSError: One of them is not there, or the filesystem cannot do it.
    """
    paths = (os.fsencode(first), os.fsencode(second))
    if _LIBC.renameat2(_HERE, paths[0], _HERE, paths[1], _EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(first))


class Faults:
    """Puts faults into a medium and damages files, and counts what it did.

    Mutable state: the fault in effect and when it ends (in operations), and the counts.
    """

    def __init__(self, chance: random.Random, medium: Medium, root: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.hang: Hang | None = None
        self._chance = chance
        self._medium = medium
        self._root = root
        self._ends_at = 0

    def tick(self, operation: int) -> None:
        """End the fault in effect if it has lasted long enough."""
        if operation >= self._ends_at:
            self.clear()

    def clear(self) -> None:
        """The medium works again, also for calls that it has held up."""
        self._medium.rule = works
        if self.hang is not None:
            self.hang.let_go()
            self.hang = None

    def begin(self, operation: int) -> None:
        """Put a fault into the medium for some hundred operations."""
        self.clear()
        kind = self._chance.choice([*ERRORS, "latency", "hang"])
        tier = self._chance.choice(["near", "far"])
        self.counts[kind] += 1
        self._ends_at = operation + self._chance.randrange(20, 400)
        if kind == "hang":
            self.begin_hang(tier, self._chance.choice(["pwritev", "preadv", "open", "rename"]))
        elif kind == "latency":
            self._medium.rule = self._slow(tier)
        else:
            self._medium.rule = self._failing(tier, *ERRORS[kind])

    def begin_hang(self, tier: str, call: str) -> None:
        """Hold up every call of a kind until the fault ends."""
        part = f"/{tier}/"
        self.hang = Hang(lambda name, path: name == call and part in path)
        self._medium.rule = self.hang

    def damage(self) -> None:
        """Do something to one file of an object, or two."""
        kind = self._chance.choice(DAMAGES)
        files = files_below(self._root, lambda name: name.endswith(".opal"))
        if len(files) < 2:
            return
        first = self._chance.choice(files)
        with contextlib.suppress(OSError):  # the tier has removed one meanwhile
            # Of one tier and size: else the disk would hold more than the books let it.
            tier, size = self._root / first.relative_to(self._root).parts[0], first.stat().st_size
            others = [path for path in files if path.is_relative_to(tier) and path != first]
            alike = [path for path in others if path.stat().st_size == size]
            second = self._chance.choice(alike or [first])
            self._damage(kind, first, second)
            self.counts[kind] += 1

    def _damage(self, kind: str, first: Path, second: Path) -> None:
        size = first.stat().st_size
        if not size:
            return
        if kind == "bit_flip":
            place = self._chance.randrange(size)
            with open(first, "r+b") as file:
                file.seek(place)
                byte = file.read(1)
                file.seek(place)
                file.write(bytes([byte[0] ^ 1 << self._chance.randrange(8)]))
        elif kind == "torn":
            os.truncate(first, self._chance.randrange(size))
        elif kind == "short":
            os.truncate(first, size - 1)
        elif kind == "zeroed":
            with open(first, "r+b") as file:
                file.seek(size // 2)
                file.write(bytes(size - size // 2))
        elif kind == "swapped":
            exchange(first, second)
        else:
            first.unlink()

    def remove_directory(self) -> None:
        """Take everything of a tier away, as somebody who tidies up."""
        tier = self._chance.choice(["near", "far"])
        for directory in sorted((self._root / tier).glob("*")):
            if directory.is_dir():
                shutil.rmtree(directory, ignore_errors=True)
        self.counts["directory_removed"] += 1

    def _failing(
        self, tier: str, number: int, calls: tuple[str, ...]
    ) -> Callable[[str, str], None]:
        part, share = f"/{tier}/", self._chance.choice([0.2, 1.0])
        chance = random.Random(self._chance.random())

        def rule(call: str, path: str) -> None:
            if call in calls and part in path and chance.random() < share:
                raise OSError(number, os.strerror(number), path)

        return rule

    def _slow(self, tier: str) -> Callable[[str, str], None]:
        part, seconds = f"/{tier}/", self._chance.choice([0.1, 1.0, 3.0]) * SLOW_SECONDS

        def rule(call: str, path: str) -> None:
            if call in ("pwritev", "preadv", "rename") and part in path:
                time.sleep(seconds)

        return rule
