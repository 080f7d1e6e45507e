"""Sessions that stay where they were."""

from collections import OrderedDict
from typing import Literal

import msgspec


class AffinitySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How sessions stick.

    `hard` sends a session to its worker as long as that one takes requests, `soft` unless it costs
    `soft_factor` times what the policy's choice costs; `off` ignores sessions. A session that was
    silent for `ttl_seconds` is forgotten.
    """

    mode: Literal["off", "soft", "hard"] = "soft"
    soft_factor: float = 2.0
    ttl_seconds: float = 600.0
    max_sessions: int = 100_000


class SessionAffinity:
    """Which worker served a session last.

    Mutable state: the sessions, the least recently used first; used by one thread.
    """

    def __init__(self, settings: AffinitySettings | None = None) -> None:
        self.settings = settings or AffinitySettings()
        self._sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def worker(self, session_id: str | None, now: float) -> str | None:
        """The worker of a session, None for one that is new or was silent too long."""
        if session_id is None or self.settings.mode == "off":
            return None
        found = self._sessions.get(session_id)
        if found is None:
            return None
        worker_id, used_at = found
        if now - used_at > self.settings.ttl_seconds:
            del self._sessions[session_id]
            return None
        return worker_id

    def remember(self, session_id: str | None, worker_id: str, now: float) -> None:
        """A session goes to this worker."""
        if session_id is None or self.settings.mode == "off":
            return
        self._sessions[session_id] = (worker_id, now)
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > self.settings.max_sessions:
            self._sessions.popitem(last=False)

    def forget_worker(self, worker_id: str) -> None:
        """A worker is gone, and its sessions are free."""
        gone = [name for name, (worker, _) in self._sessions.items() if worker == worker_id]
        for name in gone:
            del self._sessions[name]
