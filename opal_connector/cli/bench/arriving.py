"""Workloads of single requests that arrive at a rate, whoever waits for an answer."""

import math
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta
from typing_extensions import override

from opal_connector.cli.bench.workload import Workload, WorkloadError, arrivals, request_limit


class ArrivingWorkload(Workload, frozen=True, kw_only=True):
    """Requests that come at their times, and end after so many or so long."""

    request_rate: Annotated[float, Meta(description="Requests a second.")] = 1.0
    jitter: Annotated[
        float, Meta(description="Chance in the times of arrival; 1 is a Poisson process.")
    ] = 0.0
    total_requests: Annotated[
        int | None, Meta(description="Requests.  [default: 100, unless a duration is given]")
    ] = None
    time_duration_sec: Annotated[
        float | None, Meta(description="No request begins later.  [default: no limit]")
    ] = None

    @property
    @override
    def request_count(self) -> int | None:
        if self.time_duration_sec is not None:
            return None
        return request_limit(self.total_requests, None)

    def check_arrivals(self) -> None:
        """Refuses what would never end, or never begin.

        Raises:
            WorkloadError: A field is not allowed.
        """
        self.check_positive("request_rate", "time_duration_sec")
        limit = request_limit(self.total_requests, self.time_duration_sec)
        if math.isinf(self.request_rate) and limit is None:  # no time would end it
            raise WorkloadError(
                f"request_rate: found {self.request_rate:g}, allowed: a finite one, "
                "or total_requests as well"
            )
        self.check_at_least(1, "total_requests")
        self.check_at_least(0, "jitter")
        self.check_at_most(1, "jitter")

    def starts(self) -> Iterator[float]:
        """When each begins, in seconds from the start."""
        return arrivals(
            self.random("arrivals"),
            rate=self.request_rate,
            jitter=self.jitter,
            count=request_limit(self.total_requests, self.time_duration_sec),
            duration_seconds=self.time_duration_sec,
        )
