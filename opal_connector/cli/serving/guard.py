"""Nothing that we start outlives us, even if we are killed with SIGKILL.

The kernel kills an engine when we end (`launch`), and a guardian, who hears of our end because a
pipe closes, kills what the engine has started and removes directories (`guardian`). Each does
without the other.
"""

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from opal_connector.cli.serving import guardian, launch

logger = logging.getLogger(__name__)

_PYTHON: Final = (sys.executable, "-I", "-S")
_END_SECONDS: Final = 5.0


class Guard:
    """The guardian, as we see it.

    Mutable state: its process. Used by one thread; whoever it is must be the one that started the
    engines, since the kernel takes the end of a thread for that of the parent.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [*_PYTHON, str(Path(guardian.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to our group does not reach it
        )

    @property
    def pid(self) -> int:
        """The guardian's process."""
        return self._process.pid

    @staticmethod
    def command(words: Sequence[str]) -> list[str]:
        """The command that runs a program which ends when we do."""
        return [*_PYTHON, str(Path(launch.__file__)), str(os.getpid()), *words]

    def watch(self, group: int) -> None:
        """Kill a process group when we end."""
        self._say(f"+{group}\n")

    def forget(self, group: int) -> None:
        """A process group has ended; its number may be given to another one."""
        self._say(f"-{group}\n")

    def remove(self, directory: Path) -> None:
        """Remove a directory when we end."""
        self._say(f"~{directory}\n")

    def close(self) -> None:
        """End it; what is still watched is killed, and directories are removed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _say(self, text: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()
        except OSError:
            logger.warning("the guardian is gone: if we are killed, parts of engines may stay")
