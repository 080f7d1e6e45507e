"""How loaded an engine is and how fast it was, at a few operations a step."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from vllm.v1.core.sched.output import SchedulerOutput

from opal_connector.managers.jobs import JobKind, OpenJob
from opal_connector.transfers import JobResult

_REMEMBERED: Final = 0.9  # of the past, per sample
_REMEMBERED_TOKENS: Final = 8_192.0  # that were computed
_PREFILL_TOKENS: Final = 32  # fewer say more about a step than about prefill
_STEPS_IN_FLIGHT: Final = 16  # more were never answered


class Rate:
    """A quotient of sums that forget their past.

    Mutable state: the two sums; written by one thread, `value` may be read by others.
    """

    __slots__ = ("_amount", "_per", "value")

    def __init__(self) -> None:
        self._amount = 0.0
        self._per = 0.0
        self.value: float | None = None

    def add(self, amount: float, per: float) -> None:
        """So much of it, in so much of the other."""
        self._amount = _REMEMBERED * self._amount + amount
        self._per = _REMEMBERED * self._per + per
        if self._per > 0:
            self.value = self._amount / self._per


class PrefillRate:
    """Prompt tokens per second of the last few thousand of them.

    A step counts by its tokens: what it costs besides them says little about a long prompt, and
    engines that mostly hit their caches have many short steps. Mutable state: the two sums; written
    by one thread, `value` may be read by others.
    """

    __slots__ = ("_squares", "_weighted_seconds", "value")

    def __init__(self) -> None:
        self._squares = 0.0
        self._weighted_seconds = 0.0
        self.value: float | None = None

    def add(self, tokens: int, seconds: float) -> None:
        """A step computed so many in so long."""
        kept = math.exp(-tokens / _REMEMBERED_TOKENS)
        self._squares = kept * self._squares + tokens * tokens
        self._weighted_seconds = kept * self._weighted_seconds + tokens * seconds
        self.value = self._squares / self._weighted_seconds


class LoadMeter:
    """Requests, prefill speed, and seconds per byte of every tier.

    Mutable state: the numbers below, written by the engine core's thread; the publisher's thread
    reads single ones.
    """

    def __init__(self, tiers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._live: set[str] = set()
        self._running = 0
        self._steps: deque[tuple[float, int]] = deque()  # when planned, with how many prompt tokens
        self._last_output = 0.0
        self.prefill = PrefillRate()
        self.loads = [Rate() for _ in range(tiers)]
        self.stores = [Rate() for _ in range(tiers)]

    @property
    def queue_depth(self) -> int:
        """Requests that are not finished."""
        return len(self._live)

    @property
    def running(self) -> int:
        """Requests of the last step that are not finished."""
        return min(self._running, len(self._live))

    def begin_request(self, request_id: str) -> None:
        """A request has come."""
        self._live.add(request_id)

    def end_request(self, request_id: str) -> None:
        """A request has ended."""
        self._live.discard(request_id)

    def begin_step(self, output: SchedulerOutput) -> None:
        """A step is planned."""
        requests = len(output.num_scheduled_tokens)
        tokens = output.total_num_scheduled_tokens - requests
        if output.scheduled_spec_decode_tokens:
            tokens -= sum(map(len, output.scheduled_spec_decode_tokens.values()))
        if requests or not self._live:
            self._running = requests
        if len(self._steps) >= _STEPS_IN_FLIGHT:
            self._steps.clear()
        # One token of every request is what a decode step has, too.
        self._steps.append((self._clock(), tokens))

    def end_step(self) -> None:
        """The output of the oldest step in flight is here."""
        if not self._steps:
            return
        now = self._clock()
        began, tokens = self._steps.popleft()
        # Steps may overlap: this one had the device since the last one left it.
        seconds = now - max(began, self._last_output)
        self._last_output = now
        if tokens >= _PREFILL_TOKENS and seconds > 0:
            self.prefill.add(tokens, seconds)

    def end_job(self, job: OpenJob, result: JobResult) -> None:
        """Bytes were moved."""
        rates = self.loads if job.kind is JobKind.LOAD else self.stores
        for place, (moved_bytes, seconds) in result.moved.items():
            if moved_bytes:
                rates[place].add(seconds, moved_bytes)
