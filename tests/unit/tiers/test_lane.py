"""The threads of one tier: nothing waits for ever, and late threads change nothing."""

import threading
from collections.abc import Callable, Iterator

import pytest
from fakes import FakeClock

from opal_connector.tiers.lane import Lane
from opal_connector.tiers.parts import Part, PartOutcome, failed_outcome
from opal_connector.transfers import FailureKind, TierHealth

TIMEOUT = 10.0


class Bench:
    """A lane on a clock of the test, and what it answered.

    Mutable state: the answers and returns by job, guarded by `_changed`.
    """

    def __init__(self, threads: int = 1) -> None:
        self.clock = FakeClock()
        self.answers: dict[int, PartOutcome] = {}
        self.returns: dict[int, PartOutcome] = {}
        self.open = threading.Event()  # lets parts that hang go on
        self._changed = threading.Condition()
        self.lane = Lane(
            "test",
            threads=threads,
            answer=lambda part, outcome: self._note(self.answers, part, outcome),
            returned=lambda part, outcome: self._note(self.returns, part, outcome),
            timeout_seconds=TIMEOUT,
            clock=self.clock,
        )

    def _note(self, where: dict[int, PartOutcome], part: Part, outcome: PartOutcome) -> None:
        with self._changed:
            assert part.job_id not in where, "said twice"
            where[part.job_id] = outcome
            self._changed.notify_all()

    def wait(self, where: dict[int, PartOutcome], *job_ids: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(job_ids) <= where.keys(), 20)

    def hanging(self, job_id: int, **kind: bool) -> tuple[Part, threading.Event]:
        """A part that has begun when the event is set, and hangs until `open` is."""
        begun = threading.Event()

        def run(_: Part) -> PartOutcome:
            begun.set()
            assert self.open.wait(30)
            return PartOutcome()

        return Part(job_id, (0,), run, **kind), begun

    def publishing(self, job_id: int) -> tuple[Part, threading.Event]:
        """A store that hangs while it gives its file the name."""
        begun = threading.Event()

        def run(part: Part) -> PartOutcome:
            assert self.lane.begin_delivery(part)
            begun.set()
            assert self.open.wait(30)
            return PartOutcome()

        return Part(job_id, (0,), run, needs_space=True), begun

    def quick(self, job_id: int, **kind: bool) -> Part:
        return Part(job_id, (0,), lambda _: PartOutcome(), **kind)

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.lane.give_up_overdue()

    def failure(self, job_id: int) -> FailureKind | None:
        return self.answers[job_id].failed.get(0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.open.set()
    for thread in bench.lane.close():
        thread.join(20)
        assert not thread.is_alive()


def test_hanging_load_is_answered_at_its_deadline(bench: Bench) -> None:
    """And not before; its thread returns later and is not heard any more."""
    part, begun = bench.hanging(1, is_urgent=True, expires=True)
    bench.lane.submit([part])
    assert begun.wait(20)

    bench.pass_time(TIMEOUT - 1)
    assert bench.answers == {}
    bench.pass_time(1)

    assert bench.failure(1) is FailureKind.TIMEOUT
    assert bench.returns == {}, "its rows are not free yet"
    assert bench.lane.begin_delivery(part) is False, "too late to touch anything"
    bench.open.set()
    bench.wait(bench.returns, 1)
    assert bench.failure(1) is FailureKind.TIMEOUT


def test_given_up_thread_is_replaced(bench: Bench) -> None:
    """A tier whose only thread hangs still works, once a probe has found it well."""
    part, begun = bench.hanging(1)
    bench.lane.submit([part])
    assert begun.wait(20)
    bench.pass_time(TIMEOUT)
    assert bench.lane.health is TierHealth.SUSPENDED

    bench.lane.submit([bench.quick(2)])
    bench.wait(bench.answers, 2)
    bench.clock.now += 100
    assert bench.lane.begin_probe()
    from opal_connector.tiers.breaker import ProbeOutcome

    bench.lane.end_probe(ProbeOutcome.OK)
    bench.lane.submit([bench.quick(3)])
    bench.wait(bench.answers, 3)

    assert (bench.failure(2), bench.failure(3)) == (FailureKind.SUSPENDED, None)


@pytest.mark.parametrize("is_urgent", [True, False])
def test_what_waits_too_long_in_the_queue_is_given_up(bench: Bench, is_urgent: bool) -> None:
    """A load for which a request waits, a store for which blocks of the device are held."""
    first, begun = bench.hanging(1)
    bench.lane.submit([first])
    assert begun.wait(20)
    bench.lane.submit([bench.quick(2, is_urgent=is_urgent, expires=True), bench.quick(3)])

    bench.pass_time(TIMEOUT)

    assert bench.failure(2) is FailureKind.TIMEOUT
    assert 2 in bench.returns
    assert 3 not in bench.answers or bench.failure(3) is FailureKind.SUSPENDED


def test_publishing_gets_as_long_again(bench: Bench) -> None:
    """A rename may take its time, but not for ever."""
    part, begun = bench.publishing(1)
    bench.lane.submit([part])
    assert begun.wait(20)

    bench.pass_time(TIMEOUT + 1)
    assert bench.answers == {}
    bench.pass_time(TIMEOUT)

    assert bench.failure(1) is FailureKind.TIMEOUT


def test_part_that_raises_is_a_failure_and_no_dead_thread(bench: Bench) -> None:
    """A defect of ours costs one object."""

    def run(_: Part) -> PartOutcome:
        raise RuntimeError("nobody expected this")

    bench.lane.submit([Part(1, (0,), run), bench.quick(2)])
    bench.wait(bench.answers, 1, 2)

    assert (bench.failure(1), bench.failure(2)) == (FailureKind.IO, None)


def test_urgent_parts_go_first(bench: Bench) -> None:
    """Somebody waits for a load, nobody for a store."""
    order: list[int] = []

    def noted(job_id: int) -> Callable[[Part], PartOutcome]:
        def run(_: Part) -> PartOutcome:
            order.append(job_id)
            return PartOutcome()

        return run

    first, begun = bench.hanging(1)
    bench.lane.submit([first])
    assert begun.wait(20)
    bench.lane.submit([Part(2, (0,), noted(2)), Part(3, (0,), noted(3), is_urgent=True)])
    bench.open.set()
    bench.wait(bench.answers, 1, 2, 3)

    assert order == [3, 2]


def test_full_medium_sheds_stores_and_goes_on_loading(bench: Bench) -> None:
    """HT-59: until a probe finds space again."""
    full = Part(1, (0,), lambda _: failed_outcome((0,), FailureKind.NO_SPACE), needs_space=True)
    bench.lane.submit([full])
    bench.wait(bench.answers, 1)
    bench.lane.submit([bench.quick(2, needs_space=True), bench.quick(3, is_urgent=True)])
    bench.wait(bench.answers, 2, 3)

    assert bench.lane.health is TierHealth.NO_SPACE
    assert (bench.failure(2), bench.failure(3)) == (FailureKind.NO_SPACE, None)


def test_what_hangs_at_the_end_touches_nothing_afterwards(bench: Bench) -> None:
    """A thread that outlives its lane may come back at any time; nobody waits for its answer."""
    part, begun = bench.hanging(1, needs_space=True)
    bench.lane.submit([part])
    assert begun.wait(20)

    bench.lane.close()
    bench.lane.abandon()

    assert bench.lane.begin_delivery(part) is False
    bench.open.set()
    bench.wait(bench.returns, 1)
    assert bench.answers == {}


@pytest.mark.parametrize(
    ("kind", "health"),
    [(FailureKind.DROPPED, TierHealth.OK), (FailureKind.IO, TierHealth.SUSPENDED)],
)
def test_what_a_tier_did_not_begin_says_nothing_of_its_medium(
    bench: Bench, kind: FailureKind, health: TierHealth
) -> None:
    """A store of what is just being removed is refused; many of them are no fault of the medium."""
    for job_id in range(10):
        bench.lane.submit([Part(job_id, (0,), lambda _: failed_outcome((0,), kind))])
        bench.wait(bench.returns, job_id)
        assert bench.failure(job_id) in (kind, FailureKind.SUSPENDED)
    assert bench.lane.health is health
