"""The thread that keeps in touch with a shared medium for one instance's books."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from opal_connector.reports import RateLimitedWarnings
from opal_connector.tiers.shared_medium import Grant, Refresh, SharedMedium
from opal_connector.transfers import ObjectName, Question, SharedNews

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)

_BEAT_SECONDS = 30.0  # how often an instance says that it lives
_UNHEARD_SECONDS = 1.0  # after which news are taken for those of an instance that stands idle
_LARGEST_BATCH = 512  # objects asked about at once
_IDLE_SHARE = 20  # a refresh takes at most this part of the time


class Need(msgspec.Struct, frozen=True):
    """What the books would like to write, and what they have left."""

    wanted_bytes: int
    unused_bytes: int


class SharedKeeper:
    """Asks, refreshes and renews grants in a thread of its own; the books poll for the news.

    A refresh goes on between questions, a step at a time. Mutable state: the questions, the need
    and the news, guarded by `_wake`'s lock, which is never held while the medium is asked; the
    refresh that is under way, of the thread.
    """

    def __init__(
        self,
        medium: SharedMedium,
        *,
        tier: int,
        refresh_seconds: float,
        is_held: Callable[[bytes], bool],
        wants_identity: bool = False,
        begins_with_refresh: bool = False,
        generation: Callable[[], int] = lambda: 0,
    ) -> None:
        self.generation = generation  # of the tier's wipes
        self.identity: str | None = None  # of the medium, once it is known
        self._wants_identity = wants_identity
        self._medium = medium
        self._tier = tier
        self._refresh_seconds = refresh_seconds
        self._begins_with_refresh = begins_with_refresh
        self._is_held = is_held
        self._wake = threading.Condition()
        self._questions: list[Question] = []
        self._need: Need | None = None
        self._news: list[SharedNews] = []
        self._oldest_at = 0.0
        self.on_unheard: Callable[[], None] | None = None
        self._is_closing = False
        self._unused_bytes = 0
        self._refresh_at = 0.0
        self._refreshing_seconds = 0.0
        self._seen_generation = 0
        self._changes: Iterator[Refresh] | None = None
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
        first_wait_seconds = 0.0 if self._begins_with_refresh else self._refresh_seconds
        self._refresh_at = time.monotonic() + first_wait_seconds
        next_beat = time.monotonic() + _BEAT_SECONDS
        while True:
            if self._wants_identity and self.identity is None:
                with contained("name"):
                    self.identity = self._medium.identity()
            with self._wake:
                due = min(self._refresh_at, next_beat, self._unheard_at())
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
            if time.monotonic() >= self._refresh_at:
                self._refresh_a_little()
        with contained("leave"):
            self._medium.leave(unused_bytes=self._unused_bytes)

    def _refresh_a_little(self) -> None:
        """One step of a refresh; at its end, and after a fault, say when the next one begins."""
        began = time.monotonic()
        change: Refresh | None = None
        with contained("list"):
            if self._changes is None:
                self._changes = self._medium.changes()
                self._seen_generation = self.generation()
            change = next(self._changes, None)
        self._refreshing_seconds += time.monotonic() - began
        if change is not None:
            self._say(
                SharedNews(
                    self._tier,
                    found=change.names,
                    gone=change.gone,
                    generation=self._seen_generation,
                )
            )
            return
        wait_seconds = max(self._refresh_seconds, _IDLE_SHARE * self._refreshing_seconds)
        self._refresh_at = time.monotonic() + wait_seconds
        self._refreshing_seconds = 0.0
        self._changes = None

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
        generation = self.generation()
        with contained("ask"):
            for question in questions:
                names = _leading(question.chain, self._medium)
                found += names
                if len(names) == len(question.chain):
                    found += self._of(question.tails)[:1]
                found += self._of(question.singles)
        answered = tuple(question.question_id for question in questions)
        return SharedNews(self._tier, answered, tuple(found), generation=generation)

    def _of(self, names: tuple[ObjectName, ...]) -> list[ObjectName]:
        """Those of the names that are there."""
        found = self._medium.present(names) if names else []
        return [name for name, is_there in zip(names, found, strict=True) if is_there]

    def _grant(self, need: Need) -> SharedNews:
        grant = Grant()
        with contained("share out"):
            grant = self._medium.renew(
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


@contextlib.contextmanager
def contained(verb: str) -> Iterator[None]:
    """Turns a fault of the directory into a warning: it is a miss, and asked again later."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - any fault of a tier is a miss, never a crash
        warnings.warn(verb, "cannot %s the shared tier: %r", verb, error)


def _leading(names: tuple[ObjectName, ...], medium: SharedMedium) -> list[ObjectName]:
    """The names from the first on that are there without a gap; asks for few, then for more."""
    count, batch = 0, medium.first_batch
    while count < len(names):
        answers = medium.present(names[count : count + batch])
        if not all(answers):
            count += answers.index(False)
            break
        count += len(answers)
        batch = min(2 * batch, _LARGEST_BATCH)
    return list(names[:count])
