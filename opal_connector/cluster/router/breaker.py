"""Keeps requests away from an instance that fails them."""

from enum import StrEnum

import msgspec


class BreakerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a circuit breaker opens and tries again.

    After `failures` in a row nothing is sent for `open_seconds`, then one request on trial; each
    trial that fails doubles the time, up to `longest_open_seconds`.
    """

    failures: int = 5
    open_seconds: float = 2.0
    longest_open_seconds: float = 60.0


class BreakerState(StrEnum):
    """Closed: requests pass. Open: none does. Half-open: one is on trial."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """The circuit breaker of one instance.

    Mutable state: failures in a row, until when it is open, and whether one request is on trial.
    """

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self._failures = 0
        self._open_seconds = 0.0
        self._open_until: float | None = None
        self._has_trial = False
        self.opened = 0

    def state(self, now: float) -> BreakerState:
        """Where it stands."""
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        if self._open_until is None:
            return True
        return now >= self._open_until and not self._has_trial

    def wait_seconds(self, now: float) -> float:
        """How long until a request may be tried."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - now)

    def begin(self) -> None:
        """A request is sent."""
        if self._open_until is not None:
            self._has_trial = True

    def succeed(self) -> None:
        """A request ended well."""
        self._failures = 0
        self._open_seconds = 0.0
        self._open_until = None
        self._has_trial = False

    def fail(self, now: float) -> None:
        """A request failed by the instance's fault."""
        self._failures += 1
        was_trial, self._has_trial = self._has_trial, False
        if was_trial or (self._open_until is None and self._failures >= self._settings.failures):
            self._open_seconds = min(
                max(2 * self._open_seconds, self._settings.open_seconds),
                self._settings.longest_open_seconds,
            )
            self._open_until = now + self._open_seconds
            self.opened += 1

    def abandon(self) -> None:
        """A request ended without telling anything about the instance."""
        self._has_trial = False
