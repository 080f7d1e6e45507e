"""Tables, JSON, and sizes and ages as people read them."""

import time
from collections.abc import Sequence

import click
import msgspec
from rich.console import Console
from rich.table import Table


def print_json(facts: object) -> None:
    """One JSON object on standard output."""
    click.echo(msgspec.json.format(msgspec.json.encode(facts)).decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """A table on standard output, or the sentence for no rows."""
    if not rows:
        click.echo(empty)
        return
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    output_console().print(table, soft_wrap=False)


def output_console() -> Console:
    """Standard output; where it is no terminal, nothing wraps what a script may read."""
    console = Console(highlight=False, markup=False)  # names may have brackets
    if not console.is_terminal:
        console.width = 240
    return console


def size_text(size: int) -> str:
    """Bytes in the largest unit that leaves a digit before the point."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def age_text(when: float) -> str:
    """How long ago a time was; what never was is said so."""
    if not when:
        return "never"
    seconds = max(0.0, time.time() - when)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
