"""What a lookup asks a shared tier about, and for how long it waits for the answer."""

from collections.abc import Sequence

from opal_connector.keys import CHAIN_ROOT
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

    def __init__(self, *, tier: int, group: int, chunk_blocks: int, timeout_seconds: float) -> None:
        self.tier = tier
        self._group = group
        self._chunk_blocks = chunk_blocks
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
        chain, tails = self._names(request, stop_block, max_blocks)
        first = (*chain, *tails)[:1]
        if not first:
            return False
        key = object_key(first[0].chunk_hash, self._group)
        if self._absent.get(key, 0.0) > now or request.asked_key == key:
            return False
        self._next_id += 1
        request.question = (self._next_id, now + self._timeout_seconds)
        request.asked_key = key
        self._open[self._next_id] = key
        self._outbox.append(Question(self._next_id, self.tier, chain, tails))
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
        there = {object_key(name.chunk_hash, self._group) for name in found}
        for question_id in question_ids:
            key = self._open.pop(question_id, None)
            if key is not None and key not in there:
                self._absent[key] = now + _ABSENT_SECONDS
        if len(self._absent) > _REMEMBERED:
            self._absent = {key: until for key, until in self._absent.items() if until > now}

    def _names(
        self, request: OpalRequest, stop_block: int, max_blocks: int
    ) -> tuple[tuple[ObjectName, ...], tuple[ObjectName, ...]]:
        hashes, chunk_blocks = request.chain.hashes, self._chunk_blocks
        first = stop_block - stop_block % chunk_blocks
        whole = max_blocks - max_blocks % chunk_blocks
        chain = tuple(
            self._name(hashes, start, start + chunk_blocks)
            for start in range(first, whole, chunk_blocks)
        )
        begin = max(first, whole)
        stops = range(max_blocks, max(stop_block, begin), -1)
        tails = tuple(self._name(hashes, begin, stop) for stop in stops)
        return chain, tails

    def _name(self, hashes: list[bytes], start: int, stop: int) -> ObjectName:
        parent = hashes[start - 1] if start else CHAIN_ROOT
        return ObjectName(self._group, parent, b"".join(hashes[start:stop]))
