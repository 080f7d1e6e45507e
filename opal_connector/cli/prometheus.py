"""What a server's /metrics say, as samples."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_SAMPLE: Final = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL: Final = re.compile(r'(?P<name>\w+)="(?P<value>(?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")


@dataclass(frozen=True)
class Sample:
    """One line of a Prometheus exposition."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse_prometheus(text: str) -> list[Sample]:
    """The samples of a Prometheus text exposition; comments and what is no sample are left out."""
    samples = []
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        labels = {
            label["name"]: _ESCAPED.sub(_unescape, label["value"])
            for label in _LABEL.finditer(match["labels"] or "")
        }
        try:
            samples.append(Sample(match["name"], labels, float(match["value"])))
        except ValueError:
            continue
    return samples


def sum_by_label(samples: list[Sample], name: str, label: str) -> dict[str, int]:
    """A counter's total per value of one label, over all its other labels."""
    totals: dict[str, int] = {}
    for sample in samples:
        if sample.name == name and label in sample.labels:
            value = sample.labels[label]
            totals[value] = totals.get(value, 0) + round(sample.value)
    return totals


def _unescape(match: re.Match[str]) -> str:
    return {"n": "\n"}.get(match[1], match[1])
