"""A device in virtual time, by Opal's four numbers: bandwidth, latency, concurrency, capacity.

Operations take slots in the order in which they came. Each waits for the latency, then all that
transfer share the bandwidth equally.
"""

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Annotated

import msgspec

from opal_connector.simulation.clock import VirtualClock


class DeviceParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a device can do, under Opal's names. `capacity_GB` counts GiB, `bandwidth_GBps` 10^9."""

    bandwidth_GBps: Annotated[float, msgspec.Meta(gt=0, le=1e9)]  # noqa: N815 - Opal's own name
    latency_nsec: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    concurrency: Annotated[int, msgspec.Meta(ge=1)]
    capacity_GB: Annotated[float, msgspec.Meta(gt=0)]  # noqa: N815 - Opal's own name


DEVICES = {
    "CPUMemory": DeviceParameters(
        bandwidth_GBps=50, latency_nsec=200, concurrency=1_000_000, capacity_GB=8
    ),
    "LocalNVMe": DeviceParameters(
        bandwidth_GBps=10, latency_nsec=10_000, concurrency=1000, capacity_GB=1024
    ),
    "DistributedFS": DeviceParameters(
        bandwidth_GBps=100, latency_nsec=100_000, concurrency=1000, capacity_GB=1_048_576
    ),
}


class _Batch:
    """Equal operations that were asked for together.

    Mutable state: how many have not begun and how many have not ended.
    """

    __slots__ = ("done", "not_begun", "not_ended", "size_bytes")

    def __init__(self, count: int, size_bytes: int, done: Callable[[], None]) -> None:
        self.not_begun = count
        self.not_ended = count
        self.size_bytes = size_bytes
        self.done = done


class SimulatedDevice:
    """Serves operations of so many bytes.

    Equal operations that begin together end together, so they are one entry of `_flows` with a
    weight. `_served_bytes` is what an operation that transfers all the time has got so far; a flow
    ends when that reaches its mark.

    Mutable state: the free slots, the batches that wait for one, the flows by mark and their
    weight, and how far the transfers were when last looked at.
    """

    def __init__(self, parameters: DeviceParameters, clock: VirtualClock) -> None:
        self._clock = clock
        self._bytes_per_second = parameters.bandwidth_GBps * 1e9
        self.latency_seconds = parameters.latency_nsec * 1e-9
        self._free_slots = parameters.concurrency
        self._waiting: deque[_Batch] = deque()
        self._flows: list[tuple[float, int, int, _Batch]] = []
        self._flow_number = 0
        self._weight = 0
        self._served_bytes = 0.0
        self._looked_at = clock.now
        self._plan_number = 0

    def submit(self, count: int, size_bytes: int, done: Callable[[], None]) -> None:
        """Have `count` operations of `size_bytes` each done, and be told when all are."""
        self._waiting.append(_Batch(count, size_bytes, done))
        self._begin()

    def _begin(self) -> None:
        """Give the free slots away, first come first served."""
        while self._waiting and self._free_slots:
            batch = self._waiting[0]
            count = min(batch.not_begun, self._free_slots)
            batch.not_begun -= count
            self._free_slots -= count
            if not batch.not_begun:
                self._waiting.popleft()
            self._clock.plan(self.latency_seconds, partial(self._transfer, count, batch))

    def _transfer(self, count: int, batch: _Batch) -> None:
        if not batch.size_bytes:
            self._end(count, batch)
            self._begin()
            return
        self._catch_up()
        self._flow_number += 1
        mark = self._served_bytes + batch.size_bytes
        heapq.heappush(self._flows, (mark, self._flow_number, count, batch))
        self._weight += count
        self._plan_end()

    def _catch_up(self) -> None:
        if self._weight:
            passed = self._clock.now - self._looked_at
            self._served_bytes += passed * self._bytes_per_second / self._weight
        self._looked_at = self._clock.now

    def _plan_end(self) -> None:
        """Come back when the first flow ends, unless another begins before."""
        self._plan_number += 1
        if self._flows:
            left_bytes = max(0.0, self._flows[0][0] - self._served_bytes)
            delay_seconds = left_bytes * self._weight / self._bytes_per_second
            self._clock.plan(delay_seconds, partial(self._end_first, self._plan_number))

    def _end_first(self, plan_number: int) -> None:
        if plan_number != self._plan_number:
            return
        # The mark itself, not the sum of rounded pieces on the way to it: ties end together.
        self._served_bytes = self._flows[0][0]
        self._looked_at = self._clock.now
        while self._flows and self._flows[0][0] <= self._served_bytes:
            _, _, count, batch = heapq.heappop(self._flows)
            self._weight -= count
            self._end(count, batch)
        self._plan_end()
        self._begin()

    def _end(self, count: int, batch: _Batch) -> None:
        self._free_slots += count
        batch.not_ended -= count
        if not batch.not_ended:
            self._clock.plan(0.0, batch.done)
