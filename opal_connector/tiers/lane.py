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
_ANSWERED_BY_A_MEDIUM = frozenset({FailureKind.CHECKSUM, FailureKind.GONE, FailureKind.UNREADABLE})


class Lane:
    """Threads that run the parts of one tier, urgent ones first.

    With a timeout, a part whose medium does not answer is given up: it is answered as failed, its
    thread is replaced and ends when it returns. What such a thread brings is not used. A file that
    it may still publish is not deleted before, or it would come back after its deletion; and a
    deletion is answered only when its thread is out of it, or it would take a newer file.

    Mutable state: the two queues, the running parts (those that were given up included) and those
    whose thread was replaced, the breaker, the threads; guarded by `_wake`'s lock. Nothing is moved
    under it, and `answer` and `returned` are called without it.
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
        with self._wake:
            never_begun = [
                (part, FailureKind.TIMEOUT)
                for part in (*self._urgent, *self._other)
                if part.expires and part.deadline <= now
            ]
            for part, _ in never_begun:
                (self._urgent if part.is_urgent else self._other).remove(part)
            given_up = self._give_up_running(now)
            if self.timeout_seconds is not None and not self._breaker.takes_loads:
                # All threads may hang: nobody else would refuse what waits for them.
                waiting = [*self._urgent, *self._other]
                never_begun += [(part, FailureKind.SUSPENDED) for part in waiting]
                self._urgent.clear()
                self._other.clear()
            for part, _ in never_begun:
                part.state = PartState.DONE
        for part in given_up:
            self._answer(part, failed_outcome(part.positions, FailureKind.TIMEOUT))
        for part, kind in never_begun:
            self._end_unbegun(part, kind)

    def note_failure(self) -> None:
        """Something of the tier failed in another tier's thread."""
        with self._wake:
            if self.timeout_seconds is not None:
                self._breaker.failed(now=self._clock())

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

    def abandon(self) -> None:
        """What has not come back after `close` touches nothing any more that others see."""
        with self._wake:
            for part in self._running:
                if part.state is PartState.RUNNING:
                    part.state = PartState.GIVEN_UP

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
                part = self._take_part()
                while part is None and not self._is_closing:
                    self._wake.wait()
                    part = self._take_part()
                if part is None or self._is_closing:
                    return
                refusal = self._refusal(part)
                if refusal is None:
                    part.state = PartState.RUNNING
                    part.began = self._clock()
                    if self.timeout_seconds is not None:
                        part.deadline = part.began + self.timeout_seconds
                    self._running.add(part)
                else:
                    part.state = PartState.DONE
            if refusal is not None:
                self._end_unbegun(part, refusal)
            else:
                is_needed = self._end(part, _run_part(part))

    def _take_part(self) -> Part | None:
        """The next part whose turn it is; None if there is none that can be begun now."""
        if self._urgent:
            return self._urgent.popleft()
        for position, part in enumerate(self._other):
            if not self._must_wait(part):
                del self._other[position]
                return part
        return None

    def _must_wait(self, part: Part) -> bool:
        """Whether a deletion would come before the file that it is to delete."""
        if part.is_wipe:
            return any(running.writes for running in self._running)
        if part.deletes:
            return any(not part.deletes.isdisjoint(running.writes) for running in self._running)
        return False

    def _give_up_running(self, now: float) -> list[Part]:
        """Replace the threads of overdue parts; returns those that are to be answered."""
        given_up: list[Part] = []
        for part in [part for part in self._running if self._is_overdue(part, now)]:
            part.deadline = float("inf")
            self._breaker.hung(now=now)
            if not part.is_deletion:
                part.state = PartState.GIVEN_UP
                given_up.append(part)
            if len(self._threads) < self._most_threads:
                self._replaced.add(part)
                self._start_thread()
        return given_up

    def _end_unbegun(self, part: Part, kind: FailureKind) -> None:
        outcome = failed_outcome(part.positions, kind)
        self._answer(part, outcome)
        self._returned(part, outcome)

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
            if part.writes:
                self._wake.notify_all()  # its deletion may wait for that
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
        if kinds == {FailureKind.DROPPED}:
            return  # the medium was asked nothing
        if FailureKind.NO_SPACE in kinds:
            self._breaker.ran_out_of_space(now=now)
        elif kinds - _ANSWERED_BY_A_MEDIUM:
            self._breaker.failed(now=now)
        elif not part.is_deletion:  # which succeeds where there is no file, whatever else fails
            seconds = now - part.began
            self._breaker.succeeded(seconds=seconds, is_store=part.needs_space, now=now)


def _run_part(part: Part) -> PartOutcome:
    """The outcome, whatever happens: a part without an answer would keep its job open for ever."""
    try:
        return part.run(part)
    except Exception as error:  # noqa: BLE001 - parts should raise nothing; a thread must not end
        warnings.warn("part", "a transfer failed unexpectedly: %r", error)
        return failed_outcome(part.positions, FailureKind.IO)
