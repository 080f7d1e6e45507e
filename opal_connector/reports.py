"""Warnings that a fault may cause a thousand times a second, said at most once a minute."""

import logging
import threading
import time
from collections.abc import Callable

QUIET_SECONDS = 60.0


class RateLimitedWarnings:
    """One WARNING per kind and minute, with the number of those that were left out.

    Mutable state: per kind, when it was said last and how many were left out since; guarded by
    its own lock, because worker threads share it.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[str, tuple[float, int]] = {}

    def warn(self, kind: str, message: str, *args: object) -> None:
        """Say it, unless this kind was said within the last minute."""
        now = self._clock()
        with self._lock:
            last, left_out = self._said.get(kind, (-QUIET_SECONDS, 0))
            if now - last < QUIET_SECONDS:
                self._said[kind] = (last, left_out + 1)
                return
            self._said[kind] = (now, 0)
        if left_out:
            message = f"{message} ({left_out} more like this in the last minute)"
        self._logger.warning(message, *args)
