"""One run of a trace in virtual time, whoever serves it: the loop, and what it adds up to."""

from collections import deque
from collections.abc import Callable

from opal_connector.simulation.clock import VirtualClock
from opal_connector.simulation.report import DEVICE
from opal_connector.simulation.settings import ReplaySettings
from opal_connector.simulation.trace import Trace, TraceRequest


class TraceRun:
    """The clock of a run, who has news, and the figures of all requests.

    Mutable state: the clock, the calls that are due before time goes on, and the figures: tokens by
    source, hit tokens and ends by request, and the times to the first tokens in their order.
    """

    def __init__(self, trace: Trace, settings: ReplaySettings) -> None:
        self.trace = trace
        self.settings = settings
        first = trace.requests[0].arrival_seconds if trace.requests else 0.0
        self.began = 0.0 if settings.is_sequential else first
        self.clock = VirtualClock(self.began)
        device = [DEVICE] if settings.device_blocks else []
        self.tokens = dict.fromkeys([*device, *settings.config.kvc_tiers], 0)
        self.hit_tokens = [0] * len(trace.requests)
        self.end_counts = [0] * len(trace.requests)
        self.ttft_seconds: list[float] = []
        self._due: deque[Callable[[], None]] = deque()

    def before_time_goes_on(self, call: Callable[[], None]) -> None:
        """Have something done in this instant, behind whatever is going on."""
        self._due.append(call)

    def serve(
        self,
        begin: Callable[[int, TraceRequest], None],
        advance: Callable[[float], None] = lambda _count: None,
    ) -> None:
        """Let all requests begin when they come, and go on until nothing is left to do.

        `advance` hears how many more have come.
        """
        clock, is_sequential = self.clock, self.settings.is_sequential
        for place, request in enumerate(self.trace.requests):
            arrival = float("inf") if is_sequential else request.arrival_seconds
            while clock and clock.next_time <= arrival:
                self._step()
            if not is_sequential:
                clock.now = arrival
            begin(place, request)
            self._settle()
            advance(1)
        while clock:
            self._step()

    def check(self) -> None:
        """Every request was served once.

        Raises:
            AssertionError: One was not.
        """
        assert set(self.end_counts) <= {1}, "a request was not served once"
        assert len(self.ttft_seconds) == len(self.trace.requests), "a first token is missing"

    def _step(self) -> None:
        self.clock.run_next()
        self._settle()

    def _settle(self) -> None:
        while self._due:
            self._due.popleft()()
