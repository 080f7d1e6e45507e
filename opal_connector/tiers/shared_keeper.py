"""The thread that keeps in touch with a shared directory for one instance's books."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from opal_connector.reports import RateLimitedWarnings
from opal_connector.tiers.shared_directory import Grant, Refresh, SharedDirectory
from opal_connector.tiers.shared_identity import shared_identity
from opal_connector.transfers import ObjectName, Question, SharedNews

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)

_BEAT_SECONDS = 30.0  # how often an instance says that it lives
_UNHEARD_SECONDS = 1.0  # after which news are taken for those of an instance that stands idle
_IDLE_SHARE = 20  # a refresh takes at most this part of the time


class Need(msgspec.Struct, frozen=True):
    """What the books would like to write, and what they have left."""

    wanted_bytes: int
    unused_bytes: int


class SharedKeeper:
    """Asks, refreshes and renews grants in a thread of its own; the books poll for the news.

    Mutable state: the questions, the need and the news, guarded by `_wake`'s lock, which is never
    held while the directory is asked.
    """

    def __init__(
        self,
        directory: SharedDirectory,
        *,
        tier: int,
        refresh_seconds: float,
        is_held: Callable[[bytes], bool],
        wants_identity: bool = False,
    ) -> None:
        self.identity: str | None = None  # of the directory, once it is known
        self._wants_identity = wants_identity
        self._directory = directory
        self._tier = tier
        self._refresh_seconds = refresh_seconds
        self._is_held = is_held
        self._wake = threading.Condition()
        self._questions: list[Question] = []
        self._need: Need | None = None
        self._news: list[SharedNews] = []
        self._oldest_at = 0.0
        self.on_unheard: Callable[[], None] | None = None
        self._is_closing = False
        self._unused_bytes = 0
        self._thread = threading.Thread(target=self._run, name="opal-keeper", daemon=True)
        self._thread.start()

    def ask(self, questions: list[Question]) -> None:
        """Queue questions. Does not block."""
        with self._wake:
            self._questions += questions
            self._wake.notify_all()

    def renew(self, need: Need) -> None:
        """Say what is wanted and what is left. Does not block; one need at a time counts."""
        with self._wake:
            self._need = need
            self._unused_bytes = need.unused_bytes
            self._wake.notify_all()

    @property
    def has_news(self) -> bool:
        """Whether there is something to take."""
        return bool(self._news)

    def take_news(self) -> list[SharedNews]:
        """What was found out since the last call."""
        with self._wake:
            taken, self._news = self._news, []
        return taken

    def close(self, *, unused_bytes: int, timeout_seconds: float = 2.0) -> None:
        """Give back what was granted and end; a directory that hangs is left behind."""
        with self._wake:
            self._is_closing = True
            self._unused_bytes = unused_bytes
            self._wake.notify_all()
        self._thread.join(timeout_seconds)

    # ---- the thread ----

    def _run(self) -> None:
        next_refresh = time.monotonic() + self._refresh_seconds
        next_beat = time.monotonic() + _BEAT_SECONDS
        while True:
            if self._wants_identity and self.identity is None:
                with contained("name"):
                    self.identity = shared_identity(self._directory.root)
            with self._wake:
                due = min(next_refresh, next_beat, self._unheard_at())
                self._wake.wait_for(self._has_work, max(0.0, due - time.monotonic()))
                if self._is_closing:
                    break
                questions, self._questions = self._questions, []
                need, self._need = self._need, None
            if time.monotonic() >= self._unheard_at() and self.on_unheard is not None:
                with contained("hear of"):
                    self.on_unheard()
            if questions:
                self._say(self._answer(questions))
            if need is None and time.monotonic() >= next_beat:
                need = Need(0, self._unused_bytes)
            if need is not None:
                self._say(self._grant(need))
                next_beat = time.monotonic() + _BEAT_SECONDS
            if time.monotonic() >= next_refresh:
                began = time.monotonic()
                self._say(self._refresh())
                took_seconds = time.monotonic() - began
                wait_seconds = max(self._refresh_seconds, _IDLE_SHARE * took_seconds)
                next_refresh = time.monotonic() + wait_seconds
        self._directory.leave(unused_bytes=self._unused_bytes)

    def _unheard_at(self) -> float:
        """When the oldest news count as unheard."""
        has_listener = self.on_unheard is not None and bool(self._news)
        return self._oldest_at + _UNHEARD_SECONDS if has_listener else float("inf")

    def _has_work(self) -> bool:
        return bool(self._questions) or self._need is not None or self._is_closing

    def _say(self, news: SharedNews) -> None:
        if not (news.answered or news.found or news.gone or news.is_grant):
            return  # an engine that stands idle does not poll: nothing must not pile up
        with self._wake:
            if not self._news:
                self._oldest_at = time.monotonic()
            self._news.append(news)

    def _answer(self, questions: list[Question]) -> SharedNews:
        """What the directory cannot say is not there."""
        found: list[ObjectName] = []
        with contained("ask"):
            for question in questions:
                names = _leading(question.chain, self._directory.exists)
                found += names
                if len(names) == len(question.chain):
                    found += [name for name in question.tails if self._directory.exists(name)][:1]
        answered = tuple(question.question_id for question in questions)
        return SharedNews(self._tier, answered, tuple(found))

    def _grant(self, need: Need) -> SharedNews:
        grant = Grant()
        with contained("share out"):
            grant = self._directory.renew(
                wanted_bytes=need.wanted_bytes,
                unused_bytes=need.unused_bytes,
                is_held=self._is_held,
            )
        self._unused_bytes = need.unused_bytes + grant.granted_bytes
        return SharedNews(
            self._tier,
            gone=grant.gone,
            is_grant=need.wanted_bytes > 0,
            granted_bytes=grant.granted_bytes,
            was_crowded=bool(grant.gone) or grant.granted_bytes < need.wanted_bytes,
        )

    def _refresh(self) -> SharedNews:
        change = Refresh()
        with contained("list"):
            change = self._directory.refresh()
        return SharedNews(self._tier, found=change.names, gone=change.gone)


@contextlib.contextmanager
def contained(verb: str) -> Iterator[None]:
    """Turns a fault of the directory into a warning: it is a miss, and asked again later."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - any fault of a tier is a miss, never a crash
        warnings.warn(verb, "cannot %s the shared directory: %r", verb, error)


def _leading(
    names: tuple[ObjectName, ...], exists: Callable[[ObjectName], bool]
) -> list[ObjectName]:
    """The names from the first on that are there without a gap."""
    found: list[ObjectName] = []
    for name in names:
        if not exists(name):
            break
        found.append(name)
    return found
