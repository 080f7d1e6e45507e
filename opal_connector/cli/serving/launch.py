"""Becomes a program that does not outlive who started it. A script: `launch.py PARENT COMMAND...`.

It runs before the program, in its place in the tree of processes, and imports next to nothing.
"""

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, which a program keeps that is executed


def main() -> None:
    """Ask the kernel for our end when our parent ends, and become the program."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we could ask
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
