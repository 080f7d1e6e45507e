"""The open replay of an engine's stream, and how it goes."""

import msgspec

from opal_connector.cluster.ingest.states import SourceLimits


class AskReplayFrom(msgspec.Struct, frozen=True):
    """Ask the engine for all batches from this one on, and hear no older answer any more."""

    first_sequence: int


class OpenReplay:
    """At most one replay, asked again when nothing comes.

    `is_poll` says that nothing is known to be missing. `asked_in_gap` that something was when it
    was asked: else what is missing now was published after the answer. Mutable state: all of it;
    its source guards it.
    """

    def __init__(self, limits: SourceLimits) -> None:
        self._limits = limits
        self._attempt = 0
        self._is_beginning = False
        self.heard_at = 0.0
        self.is_open = False
        self.is_poll = False
        self.asked_in_gap = False
        self.has_progress = False

    def begin(self, *, in_gap: bool, is_poll: bool) -> None:
        """It is another one; `send` follows."""
        self._attempt = 0
        self.asked_in_gap = in_gap
        self.is_poll = is_poll
        self.has_progress = False

    def send(self, now: float) -> None:
        """It is asked for, the first time or again."""
        self.is_open = True
        self._is_beginning = True
        self.heard_at = now

    def heard(self, now: float) -> bool:
        """A batch of it came; whether it is the first one."""
        self.heard_at = now
        is_first, self._is_beginning = self._is_beginning, False
        return is_first

    @property
    def is_empty(self) -> bool:
        """Whether no batch of it came."""
        return self._is_beginning

    def is_overdue(self, now: float) -> bool:
        """Whether this attempt has waited for too long."""
        patience = self._limits.request_seconds * (1 << min(self._attempt, 3))
        return self.is_open and now - self.heard_at >= patience

    def may_try_again(self) -> bool:
        """Count an attempt that brought nothing; whether there may be another one."""
        self._attempt = 0 if self.has_progress else self._attempt + 1
        self.has_progress = False
        return self._attempt < self._limits.request_attempts

    def close(self) -> None:
        """It has ended, or does not matter any more."""
        self.is_open = False
