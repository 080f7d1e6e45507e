"""One run of one engine: its process and what it starts, its lines, its end."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from opal_connector.cli.serving.guard import Guard

_PIECE_BYTES: Final = 64 << 10
_LINE_BYTES: Final = 16 << 10  # longer ones are cut into several
_GROUP_SECONDS: Final = 3.0
_PUMP_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.02
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


class EngineProcess:
    """A process in a group of its own, started in the constructor.

    Reading its lines and waiting for it are two threads', so that the loop is free of both.
    Mutable state: the process, and the future of its end; the loop's thread alone uses it.

    Args:
        command: What to run.
        environment: All of its environment.
        guard: Who ends it when we end.
        on_line: Takes its lines, from another thread.

    Raises:
        OSError: No process can be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        guard: Guard,
        on_line: Callable[[str], None],
    ) -> None:
        self._guard = guard
        self._process = subprocess.Popen(
            guard.command(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C at the terminal is for us alone
        )
        self.pid = self._process.pid
        guard.watch(self.pid)
        self._is_over = False
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        self._pump = threading.Thread(target=self._read, args=(on_line,), daemon=True)
        self._pump.start()
        threading.Thread(target=self._await_end, args=(loop,), daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether its first process has ended."""
        return self._ended.done()

    async def wait(self) -> int:
        """Its exit code, once it has ended; negative for a signal."""
        return await asyncio.shield(self._ended)

    async def stop(self, seconds: float) -> int:
        """Ask it to end, wait for so long, and kill what is left."""
        try:
            if not self._ended.done():
                self._process.send_signal(signal.SIGTERM)
                await asyncio.wait([self._ended], timeout=seconds)
        finally:
            self.kill()
        return await self.clear()

    def kill(self) -> None:
        """End it and all that it has started, at once."""
        if not self._is_over:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def clear(self) -> int:
        """After its end: nothing of what it has started stays. Returns its exit code."""
        code = await self.wait()
        deadline = time.monotonic() + _GROUP_SECONDS
        while time.monotonic() < deadline and not self._is_over:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                break
            except PermissionError:  # only the dead are left, who wait for their parent
                pass
            await asyncio.sleep(_POLL_SECONDS)
        if not self._is_over:
            self._is_over = True
            self._guard.forget(self.pid)
        await asyncio.to_thread(self._pump.join, _PUMP_SECONDS)
        return code

    # ---- threads ----

    def _await_end(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            loop.call_soon_threadsafe(self._set_ended, code)

    def _set_ended(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    def _read(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        rest = b""
        with self._process.stdout as stream:
            while piece := os.read(stream.fileno(), _PIECE_BYTES):
                *lines, rest = _LINE_END.split(rest + piece)
                for line in lines:
                    if line:
                        on_line(line.decode(errors="replace"))
                while len(rest) > _LINE_BYTES:
                    on_line(rest[:_LINE_BYTES].decode(errors="replace"))
                    rest = rest[_LINE_BYTES:]
        if rest:
            on_line(rest.decode(errors="replace"))
