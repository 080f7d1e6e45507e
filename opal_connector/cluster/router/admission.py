"""Which instance a request is sent to, or how long it waits for one to have room."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Collection

import msgspec

from opal_connector.cluster.router.config import QueueConfig
from opal_connector.cluster.router.decide import RouteDecision, RouteQuestion, Router
from opal_connector.cluster.router.instances import Fleet, Instance


class Refusal(Exception):
    """A request is not taken; with the status and when to come back."""

    def __init__(self, status: int, text: str, retry_after_seconds: float) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.retry_after = max(1, math.ceil(retry_after_seconds))


class Placement(msgspec.Struct, frozen=True):
    """Where a request was sent, counted there until `Admission.leave`."""

    instance: Instance
    decision: RouteDecision


class _Waiter(msgspec.Struct, eq=False):
    question: RouteQuestion
    model: str | None
    without: Collection[str]
    turn: "asyncio.Future[Placement]"


class Admission:
    """Places requests, in the order in which they came while there is no room.

    Mutable state: who waits, whether the router drains, counters; the router's books and the
    instances' counts are changed here only. The loop's thread alone uses it.
    """

    def __init__(self, router: Router, fleet: Fleet, config: QueueConfig) -> None:
        self._router = router
        self._fleet = fleet
        self._config = config
        self._waiting: dict[int, _Waiter] = {}  # in order
        self._last_ticket = 0
        self.is_draining = False
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[tuple[str, str]] = Counter()  # by reason and worker
        fleet.on_change = self.wake

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    async def place(
        self,
        question: RouteQuestion,
        model: str | None,
        *,
        without: Collection[str] = (),
        deadline: float = math.inf,
    ) -> Placement:
        """Send a request somewhere, when there is room, and count it there.

        Args:
            question: What is known of it.
            model: What it asks for; only instances that serve it are meant.
            without: Names of instances where it has failed.
            deadline: When it is too late, in monotonic time.

        Raises:
            Refusal: Too many wait, none is well, or it took too long.
            ValueError: It names a policy that does not exist.
        """
        placement = self._place_now(question, model, without)
        if placement is not None:
            return placement
        if len(self._waiting) >= self._config.max_queue:
            self.counts["queue_full"] += 1
            raise Refusal(429, "too many requests wait already", self._config.retry_after_seconds)
        until = min(deadline, time.monotonic() + self._config.queue_timeout_seconds)
        turn: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        return await self._turn(_Waiter(question, model, without, turn), until)

    def leave(self, question: RouteQuestion, placement: Placement, *, is_computed: bool) -> None:
        """A request is over, or is about to be sent elsewhere."""
        placement.instance.in_flight -= 1
        self._router.end(question.request_id, time.monotonic(), is_computed=is_computed)
        if self._waiting:
            self.wake()

    def wake(self) -> None:
        """There may be room, or nobody left to wait for."""
        without_room: set[tuple[str | None, tuple[str, ...]]] = set()
        for ticket, waiter in list(self._waiting.items()):
            wanted = waiter.model, tuple(waiter.without)
            if waiter.turn.done() or wanted in without_room:
                continue
            try:
                placement = self._place_now(waiter.question, waiter.model, waiter.without)
            except (Refusal, ValueError) as refusal:
                waiter.turn.set_exception(refusal)
            else:
                if placement is None:
                    without_room.add(wanted)
                    continue
                waiter.turn.set_result(placement)
            del self._waiting[ticket]

    def _place_now(
        self, question: RouteQuestion, model: str | None, without: Collection[str]
    ) -> Placement | None:
        now = time.monotonic()
        well = self._fleet.well(now, model, without)
        if not well or self.is_draining:
            self.counts["no_instance"] += 1
            reason = "the router is ending" if self.is_draining else "no instance takes requests"
            raise Refusal(503, reason, self._retry_after(now))
        workers = {
            worker_id: instance
            for instance in well
            if self._fleet.has_room(instance)
            for worker_id in instance.worker_ids
        }
        if not workers:
            return None
        decision = self._router.decide(question, workers, now)
        assert decision is not None
        self.reasons[decision.reason, decision.worker_id] += 1
        instance = workers[decision.worker_id]
        self._router.begin(question, decision, now)
        instance.breaker.begin()
        instance.in_flight += 1
        return Placement(instance, decision)

    def _retry_after(self, now: float) -> float:
        waits = [found.breaker.wait_seconds(now) for found in self._fleet]
        return max(self._config.retry_after_seconds, min(waits, default=0.0))

    async def _turn(self, waiter: _Waiter, until: float) -> Placement:
        """Wait for a turn."""
        self._last_ticket += 1
        ticket = self._last_ticket
        self._waiting[ticket] = waiter
        try:
            async with asyncio.timeout(until - time.monotonic()):
                return await waiter.turn
        except TimeoutError:
            self._give_up(ticket, waiter)
            self.counts["queue_timeout"] += 1
            raise Refusal(
                503, "no instance had room in time", self._config.retry_after_seconds
            ) from None
        except asyncio.CancelledError:
            self._give_up(ticket, waiter)
            raise

    def _give_up(self, ticket: int, waiter: _Waiter) -> None:
        """Somebody waits no more; a place that was found at the same moment is given back."""
        self._waiting.pop(ticket, None)
        turn = waiter.turn
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            placement = turn.result()
            placement.instance.breaker.abandon()
            self.leave(waiter.question, placement, is_computed=False)
