"""Questions to a shared tier about what lookups did not find."""

import itertools
from collections.abc import Iterable, Sequence

from opal_connector.integrations.lmcache.wishes import Lookup
from opal_connector.managers import OpalStorageManager
from opal_connector.transfers import ObjectName, Question


class SharedQuestions:
    """Asks once for each lookup, and lets it wait a little for the answer.

    Mutable state: the questions not yet taken, and the ids of those that are not answered; guarded
    by the lock of `ObjectBooks`.
    """

    def __init__(self, storage: OpalStorageManager, timeout_seconds: float) -> None:
        self._ids = itertools.count(1)
        self._timeout_seconds = timeout_seconds
        self._questions: list[Question] = []
        self._open: set[int] = set()
        shared = [place for place, tier in enumerate(storage.tiers) if tier.space.is_shared]
        self._place = shared[0] if shared else -1
        self._tier = storage.tiers[self._place] if shared else None

    @property
    def is_used(self) -> bool:
        """Whether there is anybody to be asked."""
        return self._tier is not None and self._timeout_seconds > 0

    def is_pending(self, lookup: Lookup, names: Sequence[ObjectName], now: float) -> bool:
        """Whether a lookup has to wait for what is known of `names`, which it did not find."""
        if lookup.question_id:
            return lookup.question_id in self._open and now < lookup.asked_until
        if not names or self._tier is None or not self._tier.is_readable:
            return False
        lookup.question_id = next(self._ids)
        lookup.asked_until = now + self._timeout_seconds
        self._open.add(lookup.question_id)
        self._questions.append(
            Question(lookup.question_id, self._place, (), (), singles=tuple(names))
        )
        return True

    def take(self) -> list[Question]:
        """Questions since the last call."""
        taken, self._questions = self._questions, []
        return taken

    def hear(self, answered: Iterable[int]) -> None:
        """These were answered."""
        self._open.difference_update(answered)
