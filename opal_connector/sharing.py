"""Links the books of one instance with the keeper of a directory that it shares with others."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from opal_connector.config import OpalConfig
from opal_connector.managers import OpalKVCacheManager, SharedSpace
from opal_connector.tiers import Need, SharedDirectory, SharedKeeper
from opal_connector.transfers import SharedNews

_PATIENCE_SECONDS = 10.0  # for a keeper whose directory hangs
_IDLE_SLICE = 64  # objects that are written into the books of an idle instance at once


class SharedTierLink:
    """Carries questions and needs to the keeper and its news to the books.

    News that nobody has polled for a while are heard in the keeper's thread: an instance that
    stands idle goes on saying what is where. Mutable state: whether an answer is due, and since
    when, guarded by `_turn`; whoever polls and finds the other at it goes on. Nothing here waits.
    """

    def __init__(
        self,
        manager: OpalKVCacheManager,
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
            if self._keeper.has_news:
                for news in self._keeper.take_news():
                    self._hear(news)
            self._ask()
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the keeper."""
        self._keeper.close(unused_bytes=self._promised_bytes)

    def _hear_while_idle(self) -> None:
        """What nobody has polled for, a little at a time. In the keeper's thread."""
        with self._turn:
            for news in self._keeper.take_news():
                for part in slices(news, _IDLE_SLICE):
                    self._hear(part)

    def _hear(self, news: SharedNews) -> None:
        self._is_renewing = self._is_renewing and not news.is_grant
        self._open_questions -= len(news.answered)
        granted_bytes = news.granted_bytes // self._ranks
        news = msgspec.structs.replace(news, granted_bytes=granted_bytes)
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
        stop = start + size
        yield SharedNews(news.tier, found=news.found[start:stop], gone=news.gone[start:stop])


def link_shared_tier(
    config: OpalConfig,
    manager: OpalKVCacheManager,
    *,
    namespace: bytes,
    ranks: int,
    clock: Callable[[], float] = time.monotonic,
) -> SharedTierLink | None:
    """The link for the configured shared tier, with its keeper started; None without one."""
    settings = config.DistributedFS
    for place, tier in enumerate(manager.storage.tiers):
        if isinstance(tier.space, SharedSpace) and settings.path is not None:
            directory = SharedDirectory(
                Path(settings.path).expanduser(),
                namespace=namespace,
                ranks=ranks,
                limit_bytes=tier.space.capacity_bytes,
            )
            keeper = SharedKeeper(
                directory,
                tier=place,
                refresh_seconds=settings.refresh_seconds,
                is_held=manager.is_held,
                wants_identity=config.events is not None,
            )
            return SharedTierLink(manager, keeper, tier.space, ranks=ranks, clock=clock)
    return None
