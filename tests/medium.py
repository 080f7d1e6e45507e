"""A medium under the control of a test: what the system calls below a directory do, and when.

Everything else on the machine goes on as before.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# What a tier of files does with paths, and with descriptors of files that it opened.
BY_PATH = ("open", "rename", "unlink", "mkdir", "utime", "link", "listdir", "scandir")
BY_FILE = ("pwritev", "preadv", "pwrite", "pread", "fsync", "ftruncate")

Rule = Callable[[str, str], None]


def works(call: str, path: str) -> None:
    """The rule of a medium that has no fault."""


class Medium:
    """Lets a rule see every system call below a directory before it is made.

    The rule gets the name of the call and the path, in the thread that calls; it may raise, sleep
    or wait. Mutable state: `rule`, and the paths of open descriptors, guarded by `_lock`.
    """

    def __init__(self, root: Path) -> None:
        self.rule: Rule = works
        self._root = str(root)
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator["Medium"]:
        """The medium, in effect for as long as the context lasts."""
        real = {name: getattr(os, name) for name in (*BY_PATH, *BY_FILE, "close")}
        for name in BY_PATH:
            setattr(os, name, self._by_path(name, real[name]))
        for name in BY_FILE:
            setattr(os, name, self._by_file(name, real[name]))
        os.close = self._closing(real["close"])
        try:
            yield self
        finally:
            self.rule = works
            for name, call in real.items():
                setattr(os, name, call)

    def _by_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, int) or not os.fspath(path).startswith(self._root):
                return real(path, *args, **kwargs)
            self.rule(name, os.fspath(path))
            result = real(path, *args, **kwargs)
            if name == "open":
                with self._lock:
                    self._paths[result] = os.fspath(path)
            return result

        return call

    def _by_file(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: int, *args: Any, **kwargs: Any) -> Any:
            path = self._paths.get(file)
            if path is not None:
                self.rule(name, path)
            return real(file, *args, **kwargs)

        return call

    def _closing(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(file: int) -> None:
            with self._lock:
                self._paths.pop(file, None)
            real(file)

        return call


class Hang:
    """A rule that stops calls until it is let go, and knows how many it has stopped.

    Mutable state: which calls to stop, and those that are stopped; guarded by `_changed`.
    """

    def __init__(self, is_stopped: Callable[[str, str], bool]) -> None:
        self._is_stopped = is_stopped
        self._changed = threading.Condition()
        self._is_over = False
        self._count = 0

    def __call__(self, call: str, path: str) -> None:
        if not self._is_stopped(call, path):
            return
        with self._changed:
            if self._is_over:
                return
            self._count += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._is_over, 20), "nobody let it go"

    @property
    def count(self) -> int:
        """How many calls it has stopped."""
        return self._count

    def wait_until_stopped(self, count: int = 1, timeout_seconds: float = 20.0) -> None:
        """Block until so many calls have been stopped."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._count >= count, timeout_seconds)

    def let_go(self) -> None:
        """The medium answers again, also what it was asked before."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
