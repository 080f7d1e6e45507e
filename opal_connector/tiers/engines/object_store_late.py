"""PUTs that nobody got an answer to: a server that stood still may carry them out later."""

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Final

_MOST: Final = 4096
_LATE_SECONDS_MAX: Final = 1.0
_LATE_SHARE: Final = 0.5  # of the timeout, so that a removal has time to be made twice


class LatePuts:
    """Keys that may still be written by what was sent before, and for how long.

    A server that goes on carries out what lies in its connections side by side, so that a DELETE
    can be over before an older PUT, and nothing of the protocol tells when that one is over. It
    comes soon after the server has begun to answer again: whoever removes such a key removes it
    once more then.

    Mutable state, guarded by `_lock`: the keys, the oldest first, each with the number of its last
    PUT; and since when the server has answered, if it has since the last of them was added.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._late_seconds = min(_LATE_SECONDS_MAX, _LATE_SHARE * timeout_seconds)
        self._lock = threading.Lock()
        self._keys: dict[str, int] = {}
        self._number = 0
        self._answers_since: float | None = None

    def add(self, key: str) -> None:
        """A PUT of this key ended without an answer."""
        with self._lock:
            self._number += 1
            self._keys[key] = self._number
            self._answers_since = None
            if len(self._keys) > _MOST:
                del self._keys[next(iter(self._keys))]

    def among(self, keys: Iterable[str]) -> dict[str, int]:
        """Those of these keys that may still be written, as `forget` wants to have them."""
        with self._lock:
            return {key: self._keys[key] for key in keys if key in self._keys}

    def under(self, prefix: str) -> list[str]:
        """The keys with this prefix that may still be written."""
        with self._lock:
            return [key for key in self._keys if key.startswith(prefix)]

    def seconds_to_wait(self) -> float:
        """The server has answered just now: how long until nothing older is to be expected."""
        now = time.monotonic()
        with self._lock:
            if self._answers_since is None:
                self._answers_since = now
            return max(0.0, self._answers_since + self._late_seconds - now)

    def forget(self, late: Mapping[str, int]) -> None:
        """These were removed when nothing older was to be expected; what was added since stays."""
        with self._lock:
            for key, number in late.items():
                if self._keys.get(key) == number:
                    del self._keys[key]
