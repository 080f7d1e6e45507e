"""When a tier is asked, and when it is left alone because it fails, is slow or is full."""

from enum import StrEnum
from typing import Final

import msgspec

from opal_connector.transfers import TierHealth

_NEVER: Final = float("-inf")


class ProbeOutcome(StrEnum):
    """What became of a probe."""

    OK = "ok"
    NO_SPACE = "no_space"  # the medium answers, and is full
    FAILED = "failed"  # it raised, or did not answer in time


class BreakerLimits(msgspec.Struct, frozen=True):
    """When a tier is suspended, and how long nobody asks it then."""

    errors_in_a_row: int = 3
    slow_seconds: float = 2.0  # an operation that takes longer is slow
    slow_in_a_row: int = 3
    first_wait_seconds: float = 1.0  # doubles with every failed probe
    longest_wait_seconds: float = 60.0


class _BackOff:
    """A wait that doubles up to a bound until something goes well."""

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._next_seconds = limits.first_wait_seconds
        self.ends_at = _NEVER

    def start(self, now: float) -> None:
        """Wait from now on, longer than the last time."""
        self.ends_at = now + self._next_seconds
        self._next_seconds = min(2 * self._next_seconds, self._limits.longest_wait_seconds)

    def reset(self) -> None:
        """The next wait is a short one again."""
        self._next_seconds = self._limits.first_wait_seconds


class CircuitBreaker:
    """The health of one tier, from what its operations report. Never waits, never reads a clock.

    It opens when operations fail or are slow several times in a row, or when one hangs; nothing
    is asked then. After a wait one probe is due: if it succeeds the circuit closes, else the next
    wait is twice as long. The wait is short again only after real work went well, so that a medium
    that answers probes and nothing else is left alone ever longer.

    A full medium is another state: loads go on, stores are shed until a probe succeeds.

    An answer counts as a success even if it is a miss: the medium was there. Mutable state: all
    of it, guarded by the caller; every call takes the caller's monotonic `now` in seconds.
    """

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self.limits = limits or BreakerLimits()
        self._is_open = False
        self._is_full = False
        self._is_probing = False
        self._errors = 0
        self._slow = 0
        self._suspended = _BackOff(self.limits)
        self._full = _BackOff(self.limits)

    @property
    def health(self) -> TierHealth:
        """What the tier can do: OK, NO_SPACE or SUSPENDED."""
        if self._is_open:
            return TierHealth.SUSPENDED
        return TierHealth.NO_SPACE if self._is_full else TierHealth.OK

    @property
    def takes_loads(self) -> bool:
        """Whether to read from the tier."""
        return not self._is_open

    @property
    def takes_stores(self) -> bool:
        """Whether to write to the tier."""
        return not self._is_open and not self._is_full

    # What operations report. What began before the circuit opened may end after.

    def succeeded(self, *, seconds: float, is_store: bool, now: float) -> None:
        """An operation ended after so many seconds, with what was wanted or with a miss."""
        if self._is_open:
            return  # only a probe closes it: this one may have begun long ago
        self._errors = 0
        if seconds > self.limits.slow_seconds:
            self._slow += 1
            if self._slow >= self.limits.slow_in_a_row:
                self._open(now)
            return
        self._slow = 0
        self._suspended.reset()
        if is_store and not self._is_full:
            self._full.reset()

    def failed(self, *, now: float) -> None:
        """An operation raised."""
        self._errors += 1
        if self._errors >= self.limits.errors_in_a_row and not self._is_open:
            self._open(now)

    def hung(self, *, now: float) -> None:
        """An operation did not end before its deadline."""
        if not self._is_open:
            self._open(now)

    def ran_out_of_space(self, *, now: float) -> None:
        """A store found the medium full."""
        self._errors = 0  # the medium answers
        if not self._is_full:
            self._is_full = True
            self._full.start(now)

    # Probes.

    def begin_probe(self, *, now: float) -> bool:
        """Whether the caller is to probe the tier now; if so, it must report the end."""
        if self._is_probing:
            return False
        waiting = self._suspended if self._is_open else self._full
        is_due = (self._is_open or self._is_full) and now >= waiting.ends_at
        self._is_probing = is_due
        return is_due

    def end_probe(self, outcome: ProbeOutcome, *, now: float) -> None:
        """The probe that was begun has ended so."""
        self._is_probing = False
        if outcome is ProbeOutcome.FAILED:
            self._open(now)
            return
        self._is_open = False
        self._errors = self._slow = 0
        self._is_full = outcome is ProbeOutcome.NO_SPACE
        if self._is_full:
            self._full.start(now)

    def _open(self, now: float) -> None:
        self._is_open = True
        self._errors = self._slow = 0
        self._suspended.start(now)
