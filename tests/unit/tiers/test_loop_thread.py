"""A loop in a thread: what it runs ends by its deadline, and nothing of it outlives `close`."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from opal_connector.tiers.engines.loop_thread import LoopThread

NAME = "opal-test-loop"
PATIENCE_SECONDS = 20.0


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    made = LoopThread(NAME)
    yield made
    made.close()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


async def answer() -> int:
    return 42


def test_calls_share_one_thread_that_ends_with_close(loop_thread: LoopThread) -> None:
    """It is made by the first call, and `close`, also a second one, ends it."""
    assert threads() == []
    assert [loop_thread.run(answer, 5.0) for _ in range(3)] == [42] * 3
    (thread,) = threads()
    loop_thread.close()
    loop_thread.close()
    thread.join(PATIENCE_SECONDS)
    assert threads() == []


@pytest.mark.parametrize("is_used", [False, True])
def test_a_call_after_close_is_an_error_and_starts_nothing(
    loop_thread: LoopThread, is_used: bool
) -> None:
    """Nobody would end what it starts."""
    if is_used:
        loop_thread.run(answer, 5.0)
    before = threads()
    loop_thread.close()
    with pytest.raises(OSError, match="closed"):
        loop_thread.run(answer, 5.0)
    for thread in before:
        thread.join(PATIENCE_SECONDS)
    assert threads() == []


def test_a_call_under_way_ends_with_close(loop_thread: LoopThread) -> None:
    """Cancelled, and its caller gets an error of the system."""
    began = threading.Event()
    seen: list[BaseException] = []

    async def wait() -> None:
        began.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            loop_thread.run(wait, 10 * PATIENCE_SECONDS)
        except OSError as error:
            seen.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert began.wait(PATIENCE_SECONDS)
    loop_thread.close()
    caller.join(PATIENCE_SECONDS)
    assert not caller.is_alive()
    assert "closed" in str(seen[0])


def test_no_call_hangs_that_comes_while_it_closes() -> None:
    """At whatever moment it is closed, every caller gets a result or an error."""
    for _ in range(200):
        loop_thread = LoopThread(NAME)
        loop_thread.run(answer, 5.0)
        ended: list[object] = []

        def call(loop_thread: LoopThread = loop_thread, ended: list[object] = ended) -> None:
            try:
                while True:
                    ended[:] = [loop_thread.run(answer, 5.0)]
            except OSError as error:
                ended.append(error)

        callers = [threading.Thread(target=call, daemon=True) for _ in range(2)]
        for caller in callers:
            caller.start()
        loop_thread.close()
        for caller in callers:
            caller.join(PATIENCE_SECONDS)
            assert not caller.is_alive(), "a call hangs in a closed loop"


def test_a_call_that_takes_too_long_is_cancelled(loop_thread: LoopThread) -> None:
    """Nothing of it runs any more when the caller knows."""
    ended = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        loop_thread.run(wait, 0.05)
    assert ended.is_set()
