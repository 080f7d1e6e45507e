"""What an instance hears of a store: a little at a time, answers first, nothing stale."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from fake_keeper import FakeKeeper
from fakes import stamp

from opal_connector.events import EventLog
from opal_connector.eviction import LRUPolicy
from opal_connector.keys import CHAIN_ROOT
from opal_connector.managers import ObjectGroup, OpalStorageBackend, SharedSpace
from opal_connector.sharing import SharedTierLink
from opal_connector.tiers import SharedKeeper
from opal_connector.tiers.shared_medium import Grant, Refresh
from opal_connector.transfers import ObjectName, Question, SharedNews

OBJECTS = 3000


def name(number: int) -> ObjectName:
    return ObjectName(0, CHAIN_ROOT, stamp(number))


class SlowMedium:
    """A store that takes its time to say what it holds, and says at once whether it has something.

    Mutable state: the steps that a refresh has taken; of the keeper's thread.
    """

    first_batch = 8

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.taken = 0
        self.go_on = threading.Event()
        self.closed = threading.Event()

    def identity(self) -> str:
        return "slow"

    def present(self, names: Sequence[ObjectName]) -> list[bool]:
        return [True] * len(names)

    def changes(self) -> Iterator[Refresh]:
        for step in range(self.steps):
            self.taken = step + 1
            yield Refresh((name(step),))
            self.go_on.wait(0.02)

    def renew(
        self, *, wanted_bytes: int, unused_bytes: int, is_held: Callable[[bytes], bool]
    ) -> Grant:
        return Grant(wanted_bytes)

    def leave(self, *, unused_bytes: int) -> None:
        self.closed.set()


def keeper_of(medium: SlowMedium, **options: object) -> SharedKeeper:
    return SharedKeeper(
        medium,
        tier=0,
        refresh_seconds=3600,
        is_held=lambda key: False,
        begins_with_refresh=True,
        **options,  # type: ignore[arg-type]
    )


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        threading.Event().wait(0.005)


def test_a_question_is_answered_in_the_middle_of_a_listing() -> None:
    """A listing of a large store takes minutes; a lookup waits half a second."""
    medium = SlowMedium(steps=100_000)
    keeper = keeper_of(medium)
    wait_until(lambda: medium.taken > 2, "a listing under way")

    keeper.ask([Question(7, 0, (name(1),), ())])

    answers: list[SharedNews] = []

    def is_answered() -> bool:
        answers.extend(news for news in keeper.take_news() if news.answered)
        return bool(answers)

    wait_until(is_answered, "an answer")
    assert answers[0].found == (name(1),)
    assert medium.taken < medium.steps
    began = time.monotonic()
    keeper.close(unused_bytes=0)
    assert medium.closed.wait(5), "closing waits for one step, not for the listing"
    assert time.monotonic() - began < 5


def test_what_was_seen_before_a_reset_does_not_come_back() -> None:
    """A listing that began before the tier was emptied tells of what is not there any more."""
    books = tier()
    medium = SlowMedium(steps=50)
    keeper = keeper_of(medium, generation=lambda: books.leaving.wipe.generation)
    link = SharedTierLink(Books(books), keeper, books.space)  # type: ignore[arg-type]
    wait_until(lambda: medium.taken > 3, "a listing under way")
    link.poll()
    assert books.index.readable_keys()

    books.clear()
    books.leaving.wipe.want()
    assert books.leaving.wipe.take_due()
    books.leaving.wipe.end(is_done=True)

    wait_until(lambda: medium.taken == medium.steps, "the end of the listing")
    link.poll()
    link.poll()
    assert books.index.readable_keys() == []
    keeper.close(unused_bytes=0)


def test_a_step_hears_a_little_and_an_answer_at_once() -> None:
    """Thousands of objects that others wrote must not hold up a scheduler's step."""
    books = tier()
    keeper = FakeKeeper()
    link = SharedTierLink(Books(books), keeper, books.space)  # type: ignore[arg-type]
    keeper.news = [SharedNews(0, found=tuple(name(number) for number in range(OBJECTS)))]
    link.poll()
    heard = len(books.index.readable_keys())
    assert 0 < heard < OBJECTS

    keeper.news = [SharedNews(0, (1,), (name(OBJECTS + 1),))]
    link.poll()
    assert books.index.knows(books_key(name(OBJECTS + 1)))
    for _ in range(OBJECTS):
        link.poll()
        if len(books.index.readable_keys()) == OBJECTS + 1:
            return
    pytest.fail("what was found is never heard to its end")


class Books:
    """What the link wants of the books, over one tier."""

    def __init__(self, books: OpalStorageBackend) -> None:
        self._books = books

    def take_questions(self) -> list[Question]:
        return []

    def hear(self, news: SharedNews, now: float) -> None:
        for found in news.found:
            self._books.adopt(found)


def tier() -> OpalStorageBackend:
    space = SharedSpace(capacity_bytes=1 << 40, file_bytes=lambda blocks, members: blocks * 100)
    space.grant(1 << 20, was_crowded=False)
    return OpalStorageBackend(
        tier="Valkey",
        space=space,
        policy=LRUPolicy(),
        log=EventLog(enabled=False),
        groups=[ObjectGroup()],
    )


def books_key(wanted: ObjectName) -> bytes:
    return wanted.run[-32:] + wanted.group.to_bytes(2, "little")
