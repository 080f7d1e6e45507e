"""One question at a time, asked again when no answer comes."""

import msgspec

from opal_connector.cluster.ingest.states import SourceLimits
from opal_connector.events.channel import Question


class Conversation:
    """The question that is open, if any, and since when nothing was heard.

    Every attempt has its own request id, so that a late answer to an earlier one is not mixed into
    the answer to a later one. Mutable state: the open question and the times; its source guards it.
    """

    def __init__(self, limits: SourceLimits) -> None:
        self._limits = limits
        self._last_id = 0
        self._heard_at = 0.0
        self._attempt = 0
        self._hold = limits.first_hold_seconds
        self._held_until = float("-inf")
        self.open: Question | None = None

    def ask(self, question: Question, now: float) -> Question:
        """Open a question; what is to be sent."""
        self._attempt = 0
        return self._send(question, now)

    def is_answer(self, request_id: int) -> bool:
        """Whether a reply is to the open question."""
        return self.open is not None and self.open.request_id == request_id

    def heard(self, now: float) -> None:
        """A part of the answer came: the rest has its time from now."""
        self._heard_at = now

    def close(self) -> None:
        """The question is answered, or does not matter any more."""
        self.open = None

    def is_overdue(self, now: float) -> bool:
        """Whether the open question has waited longer than this attempt may."""
        if self.open is None:
            return False
        return now - self._heard_at >= self._limits.request_seconds * (1 << self._attempt)

    def again(self, now: float) -> Question | None:
        """The next attempt of the open question; None, and closed, when it was the last."""
        if self.open is None or self._attempt + 1 >= self._limits.request_attempts:
            self.open = None
            return None
        self._attempt += 1
        return self._send(self.open, now)

    def hold(self, now: float) -> None:
        """Ask nothing for a while, longer each time until `succeed`."""
        self._held_until = now + self._hold
        self._hold = min(2 * self._hold, self._limits.longest_hold_seconds)

    def succeed(self) -> None:
        """All is well again: the next hold is a short one."""
        self._hold = self._limits.first_hold_seconds

    def may_ask(self, now: float) -> bool:
        """Whether a question may be opened now."""
        return self.open is None and now >= self._held_until

    def _send(self, question: Question, now: float) -> Question:
        self._last_id += 1
        self._heard_at = now
        self.open = msgspec.structs.replace(question, request_id=self._last_id)
        return self.open
