"""Kills the process groups that are left when whoever holds its standard input ends. A script.

Each line is `+GROUP` or `-GROUP`: one that is to be killed at the end, or one that has ended; or
`~DIRECTORY`, which is to be removed then.
"""

import contextlib
import os
import shutil
import signal
import sys


def main() -> None:
    """Read until the other end of the pipe is gone, which nothing can prevent."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    directories: set[bytes] = set()
    for line in sys.stdin.buffer:
        if not line.endswith(b"\n"):
            break
        sign, word = line[:1], line[1:-1]
        if sign == b"~":
            directories.add(word)
        elif sign == b"+":
            groups.add(int(word))
        else:
            groups.discard(int(word))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
