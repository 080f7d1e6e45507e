"""The lines of engines: whose they are, that nothing waits for them, and what is kept."""

import io
import logging
import os
import threading
from pathlib import Path
from typing import Any

from opal_connector.cli.serving import log_sink
from opal_connector.cli.serving.log_sink import LogSink, SinkHandler


class Written(io.StringIO):
    """Keeps what was written, also after it is closed."""


def test_names_stand_before_lines_in_one_width() -> None:
    out = Written()
    sink = LogSink(out)
    sink.line("one", "first")
    sink.line("a-longer-name", "second")
    sink.line("one", "third")
    sink.close()
    assert out.getvalue() == "one      | first\na-longer-name | second\none           | third\n"


def test_each_name_has_a_colour_of_its_own() -> None:
    out = Written()
    sink = LogSink(out, is_coloured=True)
    for name in ("one", "two", "one"):
        sink.line(name, "text")
    sink.close()
    first, second, third = out.getvalue().splitlines()
    assert first == third
    assert first.startswith("\x1b[36mone ")
    assert second.startswith("\x1b[32mtwo ")
    assert first.endswith("\x1b[0mtext")


def test_files_have_the_lines_without_names(tmp_path: Path) -> None:
    sink = LogSink(directory=tmp_path / "logs")
    sink.line("one", "ü 1")
    sink.line("two", "2")
    sink.line("one", "3")
    sink.close()
    assert (tmp_path / "logs" / "one.log").read_text() == "ü 1\n3\n"
    assert (tmp_path / "logs" / "two.log").read_text() == "2\n"


def test_a_stream_that_nobody_reads_stops_nobody(monkeypatch: Any) -> None:
    """Lines that are too many are left out and counted; the last ones are known all the same."""
    monkeypatch.setattr(log_sink, "_WAITING_LINES", 100)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        sink = LogSink(stream)
        for number in range(20_000):
            sink.line("one", f"{number} " + "x" * 100)
        assert sink.tail("one").splitlines()[-1].startswith("19999 ")
        assert len(sink.tail("one").splitlines()) == 30
        found: list[bytes] = []

        def drain() -> None:
            while piece := os.read(reader, 1 << 16):
                found.append(piece)

        thread = threading.Thread(target=drain)
        thread.start()
        sink.close()
    thread.join()
    os.close(reader)
    assert b"lines were left out, since they were not read" in b"".join(found)


def test_records_of_our_own_are_lines_too() -> None:
    """A traceback is several."""
    out = Written()
    sink = LogSink(out)
    handler = SinkHandler(sink, "serve")
    handler.emit(logging.LogRecord("x", logging.INFO, "", 1, "two\nlines of %s", ("it",), None))
    sink.close()
    assert out.getvalue() == "serve    | two\nserve    | lines of it\n"
