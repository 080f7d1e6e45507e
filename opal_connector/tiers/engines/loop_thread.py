"""An event loop in a thread, for calls that have many requests under way and one deadline."""

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines for threads that block, each until its deadline.

    Mutable state: the loop, made with the first call, and whether this is closed, both guarded by
    `_lock`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def run(self, make: Callable[[], Awaitable[Result]], timeout_seconds: float) -> Result:
        """The result of what `make` gives, which is called in the loop.

        When this returns or raises, nothing of it runs any more.

        Raises:
            TimeoutError: It took longer, and was cancelled.
            OSError: `close` was called before or meanwhile.
        """

        async def bounded() -> Result:
            async with asyncio.timeout(timeout_seconds):
                return await make()

        try:
            return self._begun(bounded).result()
        except CancelledError:
            raise OSError(errno.ECANCELED, "the client was closed meanwhile") from None

    def close(self) -> None:
        """End the thread; calls that are under way are cancelled. May be called again."""
        with self._lock:
            self._is_closed = True
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.call_soon_threadsafe(loop.stop)

    def _begun(self, bounded: Callable[[], Coroutine[Any, Any, Result]]) -> Future[Result]:
        """A call, begun in the loop.

        Under the lock, as the loop's end is: what came before the end is cancelled by it, and
        nothing comes after, of which nobody would ever hear again.
        """
        with self._lock:
            if self._is_closed:
                raise OSError(errno.ESHUTDOWN, "the client is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=_run_until_stopped, args=(self._loop,), name=self._name, daemon=True
                ).start()
            return asyncio.run_coroutine_threadsafe(bounded(), self._loop)


async def map_bounded(
    function: Callable[[Item], Awaitable[Result]], items: Iterable[Item], limit: int
) -> list[Result]:
    """The results for all items, in their order, with at most `limit` under way.

    The first error cancels the others and is raised alone.
    """
    gate = asyncio.Semaphore(limit)

    async def one(item: Item) -> Result:
        async with gate:
            return await function(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.run_until_complete(_cancel_others())
    loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
