"""Numbers that an option takes."""

import math
from typing import Any

import click
from typing_extensions import override


class NonNegative(click.FloatRange):
    """A number from 0 on; no infinity, and nothing that is not a number."""

    def __init__(self) -> None:
        super().__init__(min=0)

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number from 0 on.", param, ctx)
        return number
