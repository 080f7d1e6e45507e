"""What the helper process of Mooncake does with a library that refuses: it ends in time."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from opal_connector.mooncake_helper.calls import Memories, StoreCalls
from opal_connector.mooncake_helper.messages import (
    ALREADY_THERE,
    BROKEN,
    NOT_FOUND,
    NOT_READY,
    Piece,
    Put,
)

REFUSED = -714
END_SECONDS = 10.0


class Library:
    """A store that holds another value under every key, and answers removals as told."""

    def __init__(self, removal: int) -> None:
        self.removal = removal
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def batch_put_session_start(self, keys: list[str], sizes: list[int], config: object) -> list:
        self.entered.set()
        assert self.gate.wait(END_SECONDS)
        return [ALREADY_THERE]

    def get_size(self, key: str) -> int:
        return NOT_FOUND

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        return [self.removal]


def calls_on(library: Library) -> StoreCalls:
    memories = Memories()
    memories.add(0, 0)
    return StoreCalls(library, None, memories)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.parametrize(
    ("removal", "expected"),
    [(REFUSED, REFUSED), (0, ALREADY_THERE), (NOT_READY, ALREADY_THERE)],
)
def test_a_put_over_what_does_not_go_away_ends_by_its_deadline(
    threads: ThreadPoolExecutor, removal: int, expected: int
) -> None:
    """Removal fails, or works and the key is there again, or somebody writes it for ever."""
    calls = calls_on(Library(removal))
    put = threads.submit(calls.carry_out, Put("key", [Piece(0, 0, 10)], 0.1))
    assert put.result(END_SECONDS).codes == [expected]


class SlowRemovals(Library):
    """Its keys are gone once they were removed, which takes longer than others are waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(0)
        self.now = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=lambda seconds: None)
        monkeypatch.setattr("opal_connector.mooncake_helper.calls.time", clock)

    def batch_put_session_start(self, keys: list[str], sizes: list[int], config: object) -> list:
        return [ALREADY_THERE if not self.now else REFUSED]

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        self.now += 1.5
        return [0]


def test_a_put_over_what_takes_long_to_remove_is_begun_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The old value is gone: to give up then would leave neither."""
    calls = calls_on(SlowRemovals(monkeypatch))
    assert calls.carry_out(Put("key", [Piece(0, 0, 10)], 5.0)).codes == [REFUSED]


def test_a_put_does_not_wait_for_another_beyond_its_deadline(threads: ThreadPoolExecutor) -> None:
    library = Library(REFUSED)
    library.gate.clear()
    calls = calls_on(library)
    first = threads.submit(calls.carry_out, Put("key", [Piece(0, 0, 10)], END_SECONDS))
    assert library.entered.wait(END_SECONDS)
    second = calls.carry_out(Put("key", [Piece(0, 0, 10)], 0.05))
    assert second.codes == [BROKEN]
    assert "still under way" in second.text
    library.gate.set()
    assert first.result(END_SECONDS).codes == [REFUSED]
