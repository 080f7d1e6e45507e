"""The simulated device: the times that four numbers make."""

import pytest

from opal_connector.simulation.clock import VirtualClock
from opal_connector.simulation.device import DeviceParameters, SimulatedDevice

MB = 1_000_000


def device(
    clock: VirtualClock, *, latency_nsec: float = 0, concurrency: int = 1000
) -> SimulatedDevice:
    """One GB/s: a megabyte takes a millisecond alone."""
    return SimulatedDevice(
        DeviceParameters(
            bandwidth_GBps=1, latency_nsec=latency_nsec, concurrency=concurrency, capacity_GB=1
        ),
        clock,
    )


class Ends:
    """When each operation ended."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.at: dict[str, float] = {}

    def mark(self, name: str) -> None:
        self.at[name] = round(self.clock.now, 9)

    def run(self) -> dict[str, float]:
        while self.clock:
            self.clock.run_next()
        return self.at


def test_one_operation_takes_latency_and_transfer() -> None:
    """Latency first, then all of the bandwidth."""
    clock = VirtualClock()
    ends = Ends(clock)
    device(clock, latency_nsec=5e5).submit(1, MB, lambda: ends.mark("a"))

    assert ends.run() == {"a": 0.0015}


def test_transfers_share_the_bandwidth_equally() -> None:
    """Two at once take twice as long each; what is left alone speeds up."""
    clock = VirtualClock()
    ends = Ends(clock)
    made = device(clock)
    made.submit(1, MB, lambda: ends.mark("short"))
    made.submit(1, 3 * MB, lambda: ends.mark("long"))

    # Both share until 2 ms, then the long one has 2 MB left for itself.
    assert ends.run() == {"short": 0.002, "long": 0.004}


def test_newcomer_takes_its_share_from_then_on() -> None:
    """What was transferred before it came stays transferred."""
    clock = VirtualClock()
    ends = Ends(clock)
    made = device(clock)
    made.submit(1, 2 * MB, lambda: ends.mark("first"))
    clock.plan(0.001, lambda: made.submit(1, MB, lambda: ends.mark("second")))

    # 1 MB alone until 1 ms; then 1 MB each at half speed.
    assert ends.run() == {"first": 0.003, "second": 0.003}


def test_batch_counts_as_so_many_operations() -> None:
    """Three equal operations beside one have three quarters of the bandwidth."""
    clock = VirtualClock()
    ends = Ends(clock)
    made = device(clock)
    made.submit(3, MB, lambda: ends.mark("three"))
    made.submit(1, 2 * MB, lambda: ends.mark("one"))

    assert ends.run() == {"three": 0.004, "one": 0.005}


def test_slots_are_given_in_order_of_arrival() -> None:
    """With two slots the third waits, and a batch begins as far as it can."""
    clock = VirtualClock()
    ends = Ends(clock)
    made = device(clock, latency_nsec=1e6, concurrency=2)
    made.submit(3, 0, lambda: ends.mark("three"))
    made.submit(1, 0, lambda: ends.mark("last"))

    # Two of the batch in the first millisecond, the third and the other one in the second.
    assert ends.run() == {"three": 0.002, "last": 0.002}
    assert clock.now == pytest.approx(0.002)


def test_slow_transfers_hold_their_slots() -> None:
    """Concurrency one is one after the other."""
    clock = VirtualClock()
    ends = Ends(clock)
    made = device(clock, latency_nsec=1e6, concurrency=1)
    made.submit(1, MB, lambda: ends.mark("a"))
    made.submit(1, MB, lambda: ends.mark("b"))

    assert ends.run() == {"a": 0.002, "b": 0.004}
