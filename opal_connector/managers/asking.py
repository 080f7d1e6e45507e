"""What a lookup asks a shared tier about, and for how long it waits for the answer."""

from collections.abc import Sequence
from hashlib import sha256

from opal_connector.keys import HASH_BYTES
from opal_connector.managers.coordinator import OpalKVCacheCoordinator, UnknownNames
from opal_connector.managers.records import ObjectKey, object_key
from opal_connector.managers.request import OpalRequest
from opal_connector.transfers import ObjectName, Question

_ABSENT_SECONDS = 2.0  # for how long an answer "not there" is believed
_REMEMBERED = 65536
_OPEN_QUESTIONS = 64  # without an answer; bounds what piles up before a directory that hangs


class Asking:
    """Questions about one shared tier.

    Mutable state: `_absent` (what was not there lately, and until when that counts), `_open`
    (questions without an answer, by number) and those not yet taken; guarded by the lock of
    `OpalKVCacheManager`.
    """

    def __init__(
        self, *, tier: int, coordinator: OpalKVCacheCoordinator, timeout_seconds: float
    ) -> None:
        self.tier = tier
        self._coordinator = coordinator
        self._timeout_seconds = timeout_seconds
        self._next_id = 0
        self._absent: dict[ObjectKey, float] = {}
        self._open: dict[int, ObjectKey] = {}
        self._outbox: list[Question] = []

    def is_pending(
        self, request: OpalRequest, *, stop_block: int, max_blocks: int, now: float
    ) -> bool:
        """Whether an answer about what lies behind `stop_block` is to be waited for.

        Asks, if nobody has. A request waits for one question, once and not for long.
        """
        if request.question is not None:
            question_id, deadline = request.question
            if question_id in self._open and now < deadline:
                return True  # later than that, whoever looks again may find it
        if len(self._open) >= _OPEN_QUESTIONS:
            return False  # nobody answers: the directory hangs, and waiting would not help
        names = self._coordinator.unknown_names(
            request.chain, stop_block=stop_block, max_blocks=max_blocks
        )
        key = _question_key(names)
        if key is None:
            return False
        if self._absent.get(key, 0.0) > now or request.asked_key == key:
            return False
        self._next_id += 1
        request.question = (self._next_id, now + self._timeout_seconds)
        request.asked_key = key
        self._open[self._next_id] = key
        self._outbox.append(
            Question(self._next_id, self.tier, names.chain, names.tails, names.singles)
        )
        return True

    def take(self) -> list[Question]:
        """Questions since the last call."""
        taken, self._outbox = self._outbox, []
        return taken

    @property
    def has_questions(self) -> bool:
        """Whether there is something to take."""
        return bool(self._outbox)

    def answer(self, question_ids: Sequence[int], found: Sequence[ObjectName], now: float) -> None:
        """These questions were answered, and this is what was found for all of them."""
        there = set(map(_key, found))
        for question_id in question_ids:
            key = self._open.pop(question_id, None)
            if key is not None and key not in there and not (len(key) == HASH_BYTES and there):
                self._absent[key] = now + _ABSENT_SECONDS
        if len(self._absent) > _REMEMBERED:
            self._absent = {key: until for key, until in self._absent.items() if until > now}


def _question_key(names: UnknownNames) -> ObjectKey | None:
    """What two questions have in common that have one answer; None for no question.

    Of a chain its first object, without which the rest is of no use; else all that is asked for.
    """
    chain = (*names.chain, *names.tails)
    if chain:
        return _key(chain[0])
    if not names.singles:
        return None
    return ObjectKey(sha256(b"".join(map(_key, names.singles))).digest())


def _key(name: ObjectName) -> ObjectKey:
    return object_key(name.chunk_hash, name.group)
