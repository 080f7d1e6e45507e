"""How a long command tells a person where it stands, on standard error only."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from typing_extensions import override

Advance = Callable[[float], None]


class Reporter:
    """Says nothing: what library callers and tests use."""

    def say(self, text: str) -> None:
        """States one fact."""

    @contextlib.contextmanager
    def step(self, text: str, total: float | None) -> Iterator[Advance]:  # noqa: ARG002 - no bar
        """Runs one step of `total` units; the given function moves it forward by some units.

        A total of None says that nobody knows how far it is: something moves, no share is shown.
        """
        self.say(text)
        yield lambda _units: None


class ConsoleReporter(Reporter):
    """Writes facts as lines, and steps as bars where standard error is a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)

    @override
    def say(self, text: str) -> None:
        """Writes one line."""
        self._console.print(text, markup=False, soft_wrap=True)

    @override
    @contextlib.contextmanager
    def step(self, text: str, total: float | None) -> Iterator[Advance]:
        """Shows a bar on a terminal, and a line elsewhere."""
        if not self._console.is_terminal:
            with super().step(text, total) as advance:
                yield advance
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(text, total=total)
            yield lambda units: progress.advance(task, units)
        self.say(text)
