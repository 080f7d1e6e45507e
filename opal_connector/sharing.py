"""Links the books of one instance with the keeper of a tier that it shares with others."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from opal_connector.config import EngineTierConfig, OpalConfig
from opal_connector.managers import OpalStorageManager, SharedSpace
from opal_connector.managers.records import ObjectKey
from opal_connector.tiers import Need, SharedKeeper, make_shared_medium
from opal_connector.transfers import Question, SharedNews

_PATIENCE_SECONDS = 10.0  # for a keeper whose directory hangs
_SLICE = 16  # objects that are written into the books at once
_HEARING_SECONDS = 0.001  # of a step, for what nobody waits for


class SharedTierBooks(Protocol):
    """The books, as far as they speak of a shared tier. `OpalKVCacheManager` is one."""

    storage: OpalStorageManager

    def take_questions(self) -> list[Question]:
        """What lookups want to know, since the last call."""

    def hear(self, news: SharedNews, now: float) -> None:
        """Take note of what the keeper has found out."""

    def is_held(self, key: bytes) -> bool:
        """Whether some copy of an object is promised or in motion."""


class SharedTierLink:
    """Carries questions and needs to the keeper and its news to the books.

    Answers are heard at once, and what was found otherwise a little at a time. News that nobody has
    polled for a while are heard in the keeper's thread: an instance that stands idle goes on saying
    what is where. Mutable state: what was not heard yet, whether an answer is due, and since when,
    guarded by `_turn`; whoever polls and finds the other at it goes on. Nothing here waits.
    """

    def __init__(
        self,
        manager: SharedTierBooks,
        keeper: SharedKeeper,
        space: SharedSpace,
        *,
        ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._keeper = keeper
        self._space = space
        self._ranks = ranks
        self._clock = clock
        self._turn = threading.Lock()
        self._unheard: deque[SharedNews] = deque()
        self._is_renewing = False
        self._asked_at = float("-inf")
        self._open_questions = 0
        keeper.on_unheard = self._hear_while_idle

    @property
    def is_waiting(self) -> bool:
        """Whether the keeper owes an answer that it will probably give."""
        is_owed = self._is_renewing or self._open_questions > 0
        return is_owed and self._clock() - self._asked_at < _PATIENCE_SECONDS

    @property
    def identity(self) -> str | None:
        """The directory's name, once it is known. May be asked by any thread."""
        return self._keeper.identity

    def poll(self) -> None:
        """Exchange what there is. Cheap when there is nothing."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            if self._keeper.has_news or self._unheard:
                self._hear_a_little()
            self._ask()
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the keeper."""
        self._keeper.close(unused_bytes=self._promised_bytes)

    def _take(self) -> None:
        """Queue the keeper's news, in parts that a scheduler's step can hear."""
        for news in self._keeper.take_news():
            if news.answered:
                self._unheard.appendleft(news)  # somebody waits for it
                continue
            first, *rest = slices(news, _SLICE)
            (self._unheard.appendleft if news.is_grant else self._unheard.append)(first)
            self._unheard.extend(rest)

    def _hear_a_little(self) -> None:
        """Answers, and as much of the rest as there is time for in a step."""
        self._take()
        deadline = time.perf_counter() + _HEARING_SECONDS
        while self._unheard and (self._unheard[0].answered or time.perf_counter() < deadline):
            self._hear(self._unheard.popleft())

    def _hear_while_idle(self) -> None:
        """What nobody has polled for, a little at a time. In the keeper's thread."""
        with self._turn:
            self._take()
            while self._unheard:
                self._hear(self._unheard.popleft())

    def _hear(self, news: SharedNews) -> None:
        self._is_renewing = self._is_renewing and not news.is_grant
        self._open_questions -= len(news.answered)
        granted_bytes = news.granted_bytes // self._ranks
        # What was seen before the tier was emptied is not there any more.
        found = news.found if news.generation == self._keeper.generation() else ()
        news = msgspec.structs.replace(news, granted_bytes=granted_bytes, found=found)
        self._manager.hear(news, self._clock())

    def _ask(self) -> None:
        questions = self._manager.take_questions()
        if questions:
            self._keeper.ask(questions)
            self._open_questions += len(questions)
            self._asked_at = self._clock()
        if self._space.wanted_bytes and not self._is_renewing:
            wanted_bytes = self._space.wanted_bytes * self._ranks
            self._keeper.renew(Need(wanted_bytes, self._promised_bytes))
            self._is_renewing = True
            self._asked_at = self._clock()

    @property
    def _promised_bytes(self) -> int:
        """The books count one rank's file of every object; the directory has all ranks' files."""
        return self._space.promised_bytes * self._ranks


def slices(news: SharedNews, size: int) -> Iterator[SharedNews]:
    """The same news in parts of so many objects; answers and grants come with the first."""
    yield msgspec.structs.replace(news, found=news.found[:size], gone=news.gone[:size])
    for start in range(size, max(len(news.found), len(news.gone)), size):
        found, gone = news.found[start : start + size], news.gone[start : start + size]
        yield SharedNews(news.tier, found=found, gone=gone, generation=news.generation)


def link_shared_tier(
    config: OpalConfig,
    manager: SharedTierBooks,
    *,
    namespace: bytes,
    ranks: int,
    clock: Callable[[], float] = time.monotonic,
) -> SharedTierLink | None:
    """The link for the configured shared tier, with its keeper started; None without one."""
    shared = config.shared_tier()
    if shared is None:
        return None
    name, settings = shared
    place = config.kvc_tiers.index(name)
    tier = manager.storage.tiers[place]
    assert isinstance(tier.space, SharedSpace)
    medium = make_shared_medium(
        name,
        settings,
        namespace=namespace,
        ranks=ranks,
        limit_bytes=tier.space.capacity_bytes,
        knows=lambda key: tier.index.knows(ObjectKey(key)),
        known_keys=tier.index.readable_keys,
    )
    keeper = SharedKeeper(
        medium,
        tier=place,
        refresh_seconds=settings.refresh_seconds,
        is_held=manager.is_held,
        wants_identity=config.events is not None,
        begins_with_refresh=isinstance(settings, EngineTierConfig),
        generation=lambda: tier.leaving.wipe.generation,
    )
    return SharedTierLink(manager, keeper, tier.space, ranks=ranks, clock=clock)
