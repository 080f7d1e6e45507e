"""Where the lines of engines go: to one stream with their names before them, and to files."""

import contextlib
import logging
import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO, Final, TextIO

import click
from typing_extensions import override

_COLOURS: Final = ("cyan", "green", "magenta", "yellow", "blue", "bright_red", "bright_cyan")
_LEAST_WIDTH: Final = 8
_WAITING_LINES: Final = 20_000
_TAIL_LINES: Final = 30
_CLOSE_SECONDS: Final = 2.0


class LogSink:
    """Writes lines from a thread of its own, so that a stream nobody reads stops nobody.

    Mutable state: the lines that wait and the number of those left out because too many did, the
    last lines by name, guarded by its condition; files and colours are the thread's.

    Args:
        stream: Where to write, None for nowhere.
        is_coloured: Whether names have colours.
        directory: Where each name has a file, None for no files.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        is_coloured: bool = False,
        directory: Path | None = None,
    ) -> None:
        self._stream = stream
        self._is_coloured = is_coloured
        self._directory = directory
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        self._condition = threading.Condition()
        self._waiting: deque[tuple[str, str]] = deque()
        self._left_out = 0
        self._is_closing = False
        self._tails: dict[str, deque[str]] = {}
        self._files: dict[str, BinaryIO | None] = {}
        self._colours: dict[str, str] = {}
        self._width = _LEAST_WIDTH
        self._thread = threading.Thread(target=self._write_all, name="log sink", daemon=True)
        self._thread.start()

    def line(self, name: str, text: str) -> None:
        """One line of whoever has that name. Never waits."""
        with self._condition:
            self._tails.setdefault(name, deque(maxlen=_TAIL_LINES)).append(text)
            if len(self._waiting) >= _WAITING_LINES:
                self._left_out += 1
                return
            self._waiting.append((name, text))
            self._condition.notify()

    def tail(self, name: str) -> str:
        """The last lines of a name."""
        with self._condition:
            return "\n".join(self._tails.get(name, ()))

    def close(self) -> None:
        """Write what waits, as far as the stream takes it soon."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join(_CLOSE_SECONDS)

    # ---- the thread ----

    def _write_all(self) -> None:
        while True:
            with self._condition:
                while not self._waiting and not self._is_closing:
                    self._condition.wait()
                lines = list(self._waiting)
                self._waiting.clear()
                left_out, self._left_out = self._left_out, 0
                is_last = self._is_closing
            for name, text in lines:
                self._write(name, text)
            if left_out:
                self._write("serve", f"{left_out} lines were left out, since they were not read")
            self._flush()
            if is_last:
                for file in self._files.values():
                    if file is not None:
                        file.close()
                return

    def _write(self, name: str, text: str) -> None:
        file = self._file(name)
        if file is not None:
            with contextlib.suppress(OSError):
                file.write(text.encode(errors="replace") + b"\n")
        if self._stream is None:
            return
        self._width = max(self._width, len(name))
        prefix = f"{name:<{self._width}} | "
        if self._is_coloured:
            colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
            prefix = click.style(prefix, fg=colour)
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            self._stream.write(f"{prefix}{text}\n")

    def _flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._stream is not None:
                self._stream.flush()
        for file in self._files.values():
            if file is not None:
                with contextlib.suppress(OSError):
                    file.flush()

    def _file(self, name: str) -> BinaryIO | None:
        if self._directory is None:
            return None
        if name not in self._files:
            self._files[name] = None
            with contextlib.suppress(OSError):
                self._files[name] = (self._directory / f"{name}.log").open("ab")
        return self._files[name]


class SinkHandler(logging.Handler):
    """Our own log records, as lines of a sink under one name."""

    def __init__(self, sink: LogSink, name: str) -> None:
        super().__init__()
        self._sink = sink
        self._line_name = name

    @override
    def emit(self, record: logging.LogRecord) -> None:
        """Hands every line of a record on."""
        for line in self.format(record).splitlines():
            self._sink.line(self._line_name, line)
