"""What `opal serve` adds to the router's figures, read when somebody asks."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from opal_connector.cli.serving.supervisor import State, Supervisor

_PREFIX = "opal_serve_"


class ServeCollector:
    """Reads the supervisors and counters. It keeps nothing of its own."""

    def __init__(
        self,
        supervisors: Mapping[str, Supervisor],
        counts: Callable[[], dict[str, Counter[str]]],
    ) -> None:
        self._supervisors = supervisors
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """All figures as they are now."""
        states = GaugeMetricFamily(
            f"{_PREFIX}engine_state",
            "What an engine does; 1 for what it does now.",
            labels=("instance", "state"),
        )
        restarts = CounterMetricFamily(
            f"{_PREFIX}restarts", "Times an engine was started again.", labels=("instance",)
        )
        for name, supervisor in list(self._supervisors.items()):
            for state in State:
                states.add_metric((name, state.value), float(supervisor.state is state))
            restarts.add_metric((name,), supervisor.restarts)
        yield states
        yield restarts
        for part, counts in self._counts().items():
            family = CounterMetricFamily(f"{_PREFIX}{part}", f"What {part} did.", labels=("what",))
            for what, count in sorted(counts.items()):
                family.add_metric((what,), count)
            yield family
