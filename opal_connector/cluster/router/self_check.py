"""Whether what instances announce is what they were sent: the same blocks, by the same hashes."""

import logging
import time
from typing import Final

import msgspec

from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.places import HashedPrefix
from opal_connector.cluster.router.admission import Placement
from opal_connector.cluster.router.decide import Router

logger = logging.getLogger(__name__)

_WAITING_PROMPTS: Final = 8
_MISSES: Final = 4  # prompts in a row of which no block was announced
_ANNOUNCED_SECONDS: Final = 5.0  # by when the blocks of an answered prompt are announced


class WorkerCheck(msgspec.Struct):
    """What is known of one worker: `matches` is None until it is known.

    `waiting` are prompts that it answered, each with the time by which some block of it must have
    been announced.
    """

    incarnation: int
    matches: bool | None = None
    misses: int = 0
    waiting: list[tuple[float, tuple[HashedPrefix, ...]]] = []


class EventCheck:
    """Holds the first events of every worker against the prompts that it answered.

    A block size, a hash or a tokenizer that is not the one this router reckons with would look like
    a cache that never hits. A worker of which no block is ever found is routed to by load alone,
    and that is said loudly; it is believed again when a block is found after all. Mutable state:
    the checks by worker. The loop's thread alone uses it.
    """

    def __init__(self, index: KVBM, router: Router) -> None:
        self._index = index
        self._router = router
        self.workers: dict[str, WorkerCheck] = {}

    def see(self, placement: Placement) -> None:
        """A worker has answered a prompt."""
        decision = placement.decision
        check = self.workers.get(decision.worker_id)
        state = self._index.workers.get(decision.worker_id)
        if state is None or not state.is_live:
            return
        if not any(_is_scored(prefix, decision.worker_id) for prefix in decision.prefixes):
            return
        incarnation = state.description.incarnation
        if check is None or check.incarnation != incarnation:
            check = self.workers[decision.worker_id] = WorkerCheck(incarnation)
        if not check.matches and len(check.waiting) < _WAITING_PROMPTS:
            due = time.monotonic() + _ANNOUNCED_SECONDS
            check.waiting.append((due, decision.prefixes))

    def look(self, now: float) -> None:
        """Look whether what was waited for is there."""
        for worker_id, check in list(self.workers.items()):
            if worker_id not in self._index.workers:
                del self.workers[worker_id]
                self._router.believe(worker_id, is_believed=True)
            elif check.waiting:
                self._judge(worker_id, check, now)

    def _judge(self, worker_id: str, check: WorkerCheck, now: float) -> None:
        for due, prefixes in list(check.waiting):
            if any(self._index.announced_any(prefix, worker_id) for prefix in prefixes):
                check.waiting.clear()
                self._decide(worker_id, check, matches=True)
                return
            if now >= due:
                check.waiting.remove((due, prefixes))
                check.misses += 1
        if check.misses >= _MISSES:
            self._decide(worker_id, check, matches=False)

    def _decide(self, worker_id: str, check: WorkerCheck, *, matches: bool) -> None:
        if check.matches is matches:
            return
        check.matches = matches
        check.misses = 0
        self._router.believe(worker_id, is_believed=matches)
        if not matches:
            has_blocks = bool(self._index.workers[worker_id].block_counts)
            logger.error(
                "%s %s: requests are sent there by load alone. Its block size, its hashes or its "
                "tokens are not those that its events say",
                worker_id,
                "announces blocks, but none of the prompts that it answered"
                if has_blocks
                else "announces no blocks",
            )


def _is_scored(prefix: HashedPrefix, worker_id: str) -> bool:
    """Whether the worker must announce something of the prompt, as far as its groups tell.

    A group that does not look back on everything may keep nothing of a prompt of one block: the
    last block of a prompt is computed once more.
    """
    places = prefix.places
    scored = places.scored_by(worker_id)
    if scored is None or not places.bit(worker_id) & prefix.workers:
        return False
    tokens = len(prefix.hashes) * places.block_tokens
    if scored.whole:
        return tokens >= min(group.block_tokens for _, group in scored.whole)
    return tokens >= 2 * scored.alignment_tokens
