"""The threads of one tier when its medium hangs: what is answered, and what has to wait."""

import threading
from collections.abc import Callable, Iterator

import pytest
from fakes import FakeClock, stamp

from opal_connector.tiers.breaker import ProbeOutcome
from opal_connector.tiers.lane import Lane
from opal_connector.tiers.parts import Part, PartOutcome
from opal_connector.transfers import FailureKind, ObjectName, TierHealth

TIMEOUT_SECONDS = 1.0


def name(number: int) -> ObjectName:
    return ObjectName(0, bytes(32), stamp(number))


class Bench:
    """A lane whose clock stands still, and the answers that it gave.

    Mutable state: the answers by job, guarded by `_changed`; `order`, what parts did.
    """

    def __init__(self, threads: int = 1) -> None:
        self.clock = FakeClock()
        self.answers: dict[int, PartOutcome] = {}
        self.order: list[str] = []
        self.hang = threading.Event()
        self._changed = threading.Condition()
        self.lane = Lane(
            "tier",
            threads=threads,
            answer=self._answered,
            returned=lambda part, outcome: None,
            clock=self.clock,
            timeout_seconds=TIMEOUT_SECONDS,
        )

    def _answered(self, part: Part, outcome: PartOutcome) -> None:
        with self._changed:
            assert part.job_id not in self.answers, "answered twice"
            self.answers[part.job_id] = outcome
            self._changed.notify_all()

    def wait(self, *job_ids: int) -> None:
        """Block until these are answered."""
        with self._changed:
            assert self._changed.wait_for(lambda: set(job_ids) <= set(self.answers), 20)

    def part(self, job_id: int, *, publishes: bool = False, is_load: bool = False) -> Part:
        """A part that does its work at once."""

        def run(part: Part) -> PartOutcome:
            if publishes:
                self.lane.begin_delivery(part)
            self.order.append(f"{job_id} ran")
            return PartOutcome()

        return Part(job_id, (0,), run, is_urgent=is_load, needs_space=not is_load)

    def hanging(
        self, job_id: int, *, publishes: bool = False, needs_space: bool = True
    ) -> tuple[Part, threading.Event]:
        """A part that hangs until `hang` is set, and the sign that it does."""
        begun = threading.Event()

        def run(part: Part) -> PartOutcome:
            if publishes:
                assert self.lane.begin_delivery(part)
            begun.set()
            assert self.hang.wait(30)
            self.order.append(f"{job_id} came late")
            return PartOutcome()

        return Part(job_id, (0,), run, needs_space=needs_space), begun

    def start(self, part: Part, begun: threading.Event) -> None:
        self.lane.submit([part])
        assert begun.wait(20)

    def let_time_pass(self) -> None:
        self.clock.now += 2 * TIMEOUT_SECONDS
        self.lane.give_up_overdue()

    def close_circuit(self) -> None:
        self.clock.now += 120
        assert self.lane.begin_probe()
        self.lane.end_probe(ProbeOutcome.OK)


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(threads: int = 1) -> Bench:
        made.append(Bench(threads))
        return made[-1]

    yield make
    for bench in made:
        bench.hang.set()
        for thread in bench.lane.close():
            thread.join(20)
            assert not thread.is_alive()


def test_what_waits_is_answered_when_no_thread_is_left(make_bench: Callable[..., Bench]) -> None:
    """Probes succeed and writes hang, again and again: stores and loads behind them still end."""
    bench = make_bench()
    for job_id in range(1, 5):  # four times the threads that it was given
        bench.start(*bench.hanging(job_id))
        bench.let_time_pass()
        bench.wait(job_id)
        if job_id < 4:
            bench.close_circuit()
    bench.lane.submit([bench.part(10), bench.part(11, is_load=True)])

    bench.lane.give_up_overdue()

    bench.wait(10, 11)
    assert bench.answers[10].failed == {0: FailureKind.SUSPENDED}
    assert bench.answers[11].failed == {0: FailureKind.SUSPENDED}


def test_file_that_may_still_appear_is_not_deleted_before(make_bench: Callable[..., Bench]) -> None:
    """Or it would come back after its deletion, in nobody's books. Others are deleted."""
    bench = make_bench()
    late, begun = bench.hanging(1, publishes=True)
    late.writes = frozenset({name(1)})
    bench.start(late, begun)
    bench.let_time_pass()
    bench.close_circuit()
    same, other = bench.part(2), bench.part(3)
    same.deletes, other.deletes = frozenset({name(1)}), frozenset({name(2)})
    bench.lane.submit([same, other])
    bench.wait(3)
    assert 2 not in bench.answers

    bench.hang.set()

    bench.wait(2)
    assert bench.order == ["3 ran", "1 came late", "2 ran"]


def test_wipe_waits_for_every_write(make_bench: Callable[..., Bench]) -> None:
    """A store that was begun before a reset is deleted by it, whenever it ends."""
    bench = make_bench(threads=2)
    store, begun = bench.hanging(1, publishes=True)
    store.writes = frozenset({name(1)})
    bench.start(store, begun)
    wipe = bench.part(2)
    wipe.is_wipe = True
    bench.lane.submit([wipe, bench.part(3)])
    bench.wait(3)
    assert 2 not in bench.answers

    bench.hang.set()

    bench.wait(1, 2)
    assert bench.order == ["3 ran", "1 came late", "2 ran"]


def test_deletion_that_hangs_is_answered_when_it_has_ended(
    make_bench: Callable[..., Bench],
) -> None:
    """Its names must not be written again before, or the late deletion takes the new file."""
    bench = make_bench()
    deletion, begun = bench.hanging(1, needs_space=False)
    deletion.deletes = frozenset({name(1)})
    bench.start(deletion, begun)
    bench.let_time_pass()
    assert bench.lane.health is TierHealth.SUSPENDED
    bench.close_circuit()
    bench.lane.submit([bench.part(2)])  # another thread has taken over
    bench.wait(2)
    bench.let_time_pass()
    assert 1 not in bench.answers

    bench.hang.set()

    bench.wait(1)
    assert bench.answers[1].failed == {}


def test_deletions_of_nothing_do_not_hide_that_stores_fail(
    make_bench: Callable[..., Bench],
) -> None:
    """Every failed store is followed by the deletion of what it did not write, which succeeds."""
    bench = make_bench()
    for job_id in range(1, 4):
        failing = bench.part(job_id)
        failing.run = lambda part: failed()
        bench.lane.submit([failing])
        bench.wait(job_id)
        if job_id < 3:
            deletion = bench.part(10 + job_id)
            deletion.deletes = frozenset({name(job_id)})
            bench.lane.submit([deletion])
            bench.wait(10 + job_id)

    assert bench.lane.health is TierHealth.SUSPENDED


def failed() -> PartOutcome:
    outcome = PartOutcome()
    outcome.failed = {0: FailureKind.IO}
    return outcome
