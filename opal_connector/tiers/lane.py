"""The threads of one tier: what somebody waits for first, and nothing waits for ever."""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from opal_connector.tiers.breaker import BreakerLimits, CircuitBreaker, ProbeOutcome
from opal_connector.tiers.parts import (
    Part,
    PartOutcome,
    PartState,
    failed_outcome,
    warnings,
)
from opal_connector.transfers import FailureKind, TierHealth

Answer = Callable[[Part, PartOutcome], None]
_ANSWERED_BY_A_MEDIUM = frozenset({FailureKind.CHECKSUM, FailureKind.GONE})


class Lane:
    """Threads that run the parts of one tier, urgent ones first.

    With a timeout, a part whose medium does not answer is given up: it is answered as failed, its
    thread is replaced and ends when it returns. What such a thread brings is not used.

    Mutable state: the two queues, the running parts and those whose thread was replaced, the
    breaker, the threads; guarded by `_wake`'s lock. Nothing is moved under it, and `answer` and
    `returned` are called without it.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        answer: Answer,
        returned: Answer,
        cpus: frozenset[int] | None = None,
        timeout_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.timeout_seconds = timeout_seconds
        self._answer = answer
        self._returned = returned
        self._cpus = cpus
        self._clock = clock
        self._wake = threading.Condition()
        self._urgent: deque[Part] = deque()
        self._other: deque[Part] = deque()
        self._running: set[Part] = set()
        self._replaced: set[Part] = set()
        self._is_closing = False
        slow_seconds = (timeout_seconds or 0.0) / 2
        self._breaker = CircuitBreaker(BreakerLimits(slow_seconds=slow_seconds))
        self._most_threads = 4 * threads
        self._threads: list[threading.Thread] = []
        for _ in range(threads):
            self._start_thread()

    @property
    def health(self) -> TierHealth:
        """What the tier can do now."""
        return self._breaker.health

    @property
    def thread_count(self) -> int:
        """Threads that it was given."""
        return self._most_threads // 4

    def submit(self, parts: Sequence[Part]) -> None:
        """Queue parts. Does not block."""
        with self._wake:
            if self.timeout_seconds is not None:
                deadline = self._clock() + self.timeout_seconds
                for part in parts:
                    part.deadline = deadline
            for part in parts:
                (self._urgent if part.is_urgent else self._other).append(part)
            self._wake.notify(len(parts))

    def begin_delivery(self, part: Part) -> bool:
        """Whether a running part may touch what others see; from then on it is not given up."""
        with self._wake:
            if part.state is not PartState.RUNNING:
                return False
            part.state = PartState.DELIVERING
            return True

    def give_up_overdue(self) -> None:
        """Answer for parts past their deadline. Called regularly by the mover's watchman."""
        now = self._clock()
        given_up: list[Part] = []
        with self._wake:
            for queue in (self._urgent, self._other):
                for part in [part for part in queue if part.expires and part.deadline <= now]:
                    queue.remove(part)
                    part.state = PartState.DONE
                    given_up.append(part)
            for part in [part for part in self._running if self._is_overdue(part, now)]:
                part.state = PartState.GIVEN_UP
                self._breaker.hung(now=now)
                given_up.append(part)
                if len(self._threads) < self._most_threads:
                    self._replaced.add(part)
                    self._start_thread()
        for part in given_up:
            outcome = failed_outcome(part.positions, FailureKind.TIMEOUT)
            self._answer(part, outcome)
            if part.state is PartState.DONE:
                self._returned(part, outcome)

    def _is_overdue(self, part: Part, now: float) -> bool:
        """Delivery to the device ends by itself; giving a file its name gets as long again."""
        if part.state is PartState.RUNNING:
            return part.deadline <= now
        is_publishing = part.state is PartState.DELIVERING and not part.is_urgent
        return is_publishing and part.deadline + (self.timeout_seconds or 0.0) <= now

    def suspend(self) -> None:
        """Take note that the tier cannot be used; a probe is due soon."""
        with self._wake:
            self._breaker.hung(now=self._clock())

    def begin_probe(self) -> bool:
        """Whether the caller is to probe the tier now; if so, it must report the end."""
        with self._wake:
            return self._breaker.begin_probe(now=self._clock())

    def end_probe(self, outcome: ProbeOutcome) -> None:
        """The probe that was begun has ended so."""
        with self._wake:
            self._breaker.end_probe(outcome, now=self._clock())

    def close(self) -> list[threading.Thread]:
        """Drop what is queued and have the threads end; returns them."""
        with self._wake:
            self._is_closing = True
            self._urgent.clear()
            self._other.clear()
            self._wake.notify_all()
            return list(self._threads)

    # ---- inside ----

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=self._run, name=f"opal-{self.name}-{len(self._threads)}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        if self._cpus:
            # Cores that were taken away meanwhile: the thread works where it is.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._cpus)
        is_needed = True
        while is_needed:
            with self._wake:
                while not (self._urgent or self._other or self._is_closing):
                    self._wake.wait()
                if self._is_closing:
                    return
                part = (self._urgent or self._other).popleft()
                refusal = self._refusal(part)
                if refusal is None:
                    part.state = PartState.RUNNING
                    part.began = self._clock()
                    if self.timeout_seconds is not None:
                        part.deadline = part.began + self.timeout_seconds
                    self._running.add(part)
            if refusal is not None:
                outcome = failed_outcome(part.positions, refusal)
                part.state = PartState.DONE
                self._answer(part, outcome)
                self._returned(part, outcome)
            else:
                is_needed = self._end(part, _run_part(part))

    def _refusal(self, part: Part) -> FailureKind | None:
        """Why a part is not begun. A tier without a timeout is never refused."""
        if self.timeout_seconds is None:
            return None
        if not self._breaker.takes_loads:
            return FailureKind.SUSPENDED
        if part.needs_space and not self._breaker.takes_stores:
            return FailureKind.NO_SPACE
        return None

    def _end(self, part: Part, outcome: PartOutcome) -> bool:
        """Answer for a part that has returned; False if its thread was replaced meanwhile."""
        with self._wake:
            self._running.discard(part)
            was_given_up = part.state is PartState.GIVEN_UP
            part.state = PartState.DONE
            if self.timeout_seconds is not None and not was_given_up:
                self._learn(part, outcome)
            is_replaced = part in self._replaced
            if is_replaced:
                self._replaced.discard(part)
                self._threads.remove(threading.current_thread())
        if not was_given_up:
            self._answer(part, outcome)
        self._returned(part, outcome)
        return not is_replaced

    def _learn(self, part: Part, outcome: PartOutcome) -> None:
        now = self._clock()
        kinds = set(outcome.failed.values())
        if FailureKind.NO_SPACE in kinds:
            self._breaker.ran_out_of_space(now=now)
        elif kinds - _ANSWERED_BY_A_MEDIUM:
            self._breaker.failed(now=now)
        else:
            seconds = now - part.began
            self._breaker.succeeded(seconds=seconds, is_store=part.needs_space, now=now)


def _run_part(part: Part) -> PartOutcome:
    """The outcome, whatever happens: a part without an answer would keep its job open for ever."""
    try:
        return part.run(part)
    except Exception as error:  # noqa: BLE001 - parts should raise nothing; a thread must not end
        warnings.warn("part", "a transfer failed unexpectedly: %r", error)
        return failed_outcome(part.positions, FailureKind.IO)
