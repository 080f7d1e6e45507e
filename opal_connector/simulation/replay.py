"""A trace through the real books of one instance, in virtual time.

Requests do not wait for each other's computation unless the settings say so: there is no batch.
"""

import time
from collections.abc import Callable

from opal_connector.simulation.instance import SimulatedInstance
from opal_connector.simulation.report import ReplayReport, summary, window_rates
from opal_connector.simulation.run import TraceRun
from opal_connector.simulation.settings import ReplaySettings
from opal_connector.simulation.totals import totals
from opal_connector.simulation.trace import Trace


class Replay:
    """One run of one trace by one instance. Mutable state: that of the run and the instance."""

    def __init__(self, trace: Trace, settings: ReplaySettings) -> None:
        self._run = TraceRun(trace, settings)
        self._instance = SimulatedInstance(self._run)

    def run(
        self, policy: str, advance: Callable[[float], None] = lambda _count: None
    ) -> ReplayReport:
        """Serve all requests and report; `advance` hears how many more have come."""
        began = time.perf_counter()
        self._run.serve(self._instance.begin, advance)
        return self._report(policy, time.perf_counter() - began)

    def check(self) -> None:
        """Audit the books at the end, and compare them with the replay of all events.

        Raises:
            AssertionError: They differ, or something was left behind.
        """
        self._run.check()
        self._instance.check()

    def _report(self, policy: str, replay_seconds: float) -> ReplayReport:
        run = self._run
        trace = run.trace
        found = totals(run, [self._instance])
        return ReplayReport(
            policy=policy,
            requests=len(trace.requests),
            input_tokens=trace.input_tokens,
            output_tokens=sum(request.output_tokens for request in trace.requests),
            unique_chunks=found.unique_chunks,
            duration_seconds=run.clock.now - run.began,
            tier_tokens=found.tier_tokens,
            hit_rate=found.hit_rate,
            tiers=found.tiers,
            events=found.events,
            dropped_stores=found.dropped_stores,
            ttft_seconds=summary(run.ttft_seconds),
            hit_rate_windows=window_rates(
                run.hit_tokens, [request.input_tokens for request in trace.requests]
            ),
            replay_seconds=replay_seconds,
        )
