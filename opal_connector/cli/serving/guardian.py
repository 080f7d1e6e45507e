"""Kills the process groups that are left when whoever holds its standard input ends. A script.

Each line is `+GROUP` or `-GROUP`: one that is to be killed at the end, or one that has ended.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read until the other end of the pipe is gone, which nothing can prevent."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        if not line.endswith(b"\n"):
            break
        sign, group = line[:1], int(line[1:])
        if sign == b"+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
