"""A trace through the real books, in virtual time.

Lookups, leases, jobs, copies, moves and deletions are planned and committed by the manager that
vLLM's scheduler has; a simulated worker lets time pass for them. Requests do not wait for each
other's computation: there is no batch and no limit of requests at once.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from opal_connector.config import chunk_blocks_for
from opal_connector.events import EventLog
from opal_connector.managers import (
    LookupState,
    OpalRequest,
    SharedSpace,
    build_manager,
    tier_space,
)
from opal_connector.simulation.clock import VirtualClock
from opal_connector.simulation.device import SimulatedDevice
from opal_connector.simulation.device_cache import DeviceCache
from opal_connector.simulation.keeper import SimulatedKeeper
from opal_connector.simulation.ledger import EventLedger
from opal_connector.simulation.report import (
    CACHE_MISS,
    DEVICE,
    ReplayReport,
    TierReport,
    summary,
    window_rates,
)
from opal_connector.simulation.settings import ReplaySettings
from opal_connector.simulation.trace import Trace, TraceRequest
from opal_connector.simulation.worker import SimulatedWorker
from opal_connector.transfers import InventoryPage, JobResult

_STEP_SECONDS = 0.01  # of the engine: how often what waits is asked again
_STORE_TRIES = 8  # at growing distance, as the steps of a request that still decodes would
_TOO_LARGE = "too_large"  # trying again will not help


class _Life:
    """One request on its way. Mutable state: what it has got so far."""

    __slots__ = ("began", "decoded", "device_blocks", "opal", "place", "trace")

    def __init__(self, place: int, trace: TraceRequest, opal: OpalRequest, began: float) -> None:
        self.place = place
        self.trace = trace
        self.opal = opal
        self.began = began
        self.decoded = began  # when its last token comes
        self.device_blocks = 0


class Replay:
    """One run of one trace.

    Mutable state: the clock, the manager and what it plans, the device's cache, the requests that
    wait for an answer, and the figures.
    """

    def __init__(self, trace: Trace, settings: ReplaySettings) -> None:
        self._trace = trace
        self._settings = settings
        first = trace.requests[0].arrival_seconds if trace.requests else 0.0
        self._began = 0.0 if settings.is_sequential else first
        self._clock = VirtualClock(self._began)
        row_bytes = settings.bytes_per_token * trace.block_tokens
        chunk_blocks = chunk_blocks_for(
            settings.chunk_tokens or trace.block_tokens,
            block_tokens=trace.block_tokens,
            block_bytes=row_bytes,
            warn=lambda _text: None,
        )
        # Nobody else writes to a simulated directory, so there is nothing to ask about.
        shared = msgspec.structs.replace(settings.config.DistributedFS, lookup_timeout_seconds=0.0)
        config = msgspec.structs.replace(settings.config, DistributedFS=shared)
        log = EventLog(enabled=True)
        self.manager = build_manager(
            config,
            kind="full_attention",
            block_tokens=trace.block_tokens,
            chunk_blocks=chunk_blocks,
            spaces={
                name: tier_space(
                    config,
                    name,
                    capacity_bytes=settings.capacity_bytes(name),
                    row_bytes=row_bytes,
                    file_bytes=lambda blocks, row_bytes: blocks * row_bytes,
                )
                for name in config.kvc_tiers
            },
            log=log,
        )
        self.ledger = EventLedger(self.manager, log)
        self._keepers: list[SimulatedKeeper] = []
        for place, tier in enumerate(self.manager.storage.tiers):
            if tier.space.frees_later:
                self.manager.adopt(InventoryPage(place, 0, is_last=True))
            if isinstance(tier.space, SharedSpace):
                self._keepers.append(SimulatedKeeper(self.manager, place, tier.space))
        self._worker = SimulatedWorker(
            [SimulatedDevice(settings.devices[name], self._clock) for name in config.kvc_tiers],
            clock=self._clock,
            row_bytes=row_bytes,
            commit=self._commit,
        )
        self._cache = DeviceCache(settings.device_blocks)
        self._waiting: list[_Life] = []
        self._has_news = False
        device = [DEVICE] if settings.device_blocks else []
        self._tokens = dict.fromkeys([*device, *config.kvc_tiers], 0)
        self._hit_tokens = [0] * len(trace.requests)
        self._ttft_seconds: list[float] = []

    def run(
        self, policy: str, advance: Callable[[float], None] = lambda _count: None
    ) -> ReplayReport:
        """Serve all requests and report; `advance` hears how many more have come."""
        began = time.perf_counter()
        clock, requests = self._clock, self._trace.requests
        is_sequential = self._settings.is_sequential
        for place, request in enumerate(requests):
            arrival = float("inf") if is_sequential else request.arrival_seconds
            while clock and clock.next_time <= arrival:
                self._step()
            if not is_sequential:
                clock.now = arrival
            opal = self.manager.new_request(str(place))
            opal.chain.hashes.extend(request.hashes)
            self._look(_Life(place, request, opal, clock.now))
            self._keep_up()
            advance(1)
        while clock:
            self._step()
        return self._report(policy, time.perf_counter() - began)

    def check(self) -> None:
        """Audit the books at the end, and compare them with the replay of all events.

        Raises:
            AssertionError: They differ, or something was left behind.
        """
        self.manager.check()
        assert self.manager.lease_count == 0, "a lease was left behind"
        assert self.manager.open_job_count == 0, "a job was left behind"
        assert not self._waiting, "a request was left waiting"
        self.ledger.check()

    # ---- one request ----

    def _look(self, life: _Life) -> None:
        usable = self._trace.usable_blocks(life.trace)
        life.device_blocks = self._cache.match(life.trace.hashes, usable)
        result = self.manager.lookup(
            life.opal,
            computed_blocks=life.device_blocks,
            max_blocks=usable,
            now=self._clock.now,
        )
        if result.state is LookupState.WAIT:
            if not self._waiting:
                self._clock.plan(_STEP_SECONDS, self._ask_again)
            self._waiting.append(life)
        elif result.state is LookupState.HIT:
            job = self.manager.plan_load(life.opal, range(result.block_count))
            self._has_news = True
            self._worker.load(job, partial(self._loaded, life))
        else:
            self.manager.release(life.opal)
            self._loaded(life)

    def _ask_again(self) -> None:
        waiting, self._waiting = self._waiting, []
        for life in waiting:
            self._look(life)

    def _loaded(self, life: _Life) -> None:
        device_tokens = life.device_blocks * self._trace.block_tokens
        hit_tokens = device_tokens
        if device_tokens:
            self._tokens[DEVICE] += device_tokens
        for tier, tokens in life.opal.hit_tokens.items():
            self._tokens[tier] += tokens
            hit_tokens += tokens
        self._hit_tokens[life.place] = hit_tokens
        self.manager.count_admission(life.opal.hit_tokens, life.trace.input_tokens - device_tokens)
        speed = self._settings.prefill_tokens_per_second
        if speed:
            seconds = (life.trace.input_tokens - hit_tokens) / speed
            self._clock.plan(seconds, partial(self._computed, life))
        else:
            self._computed(life)

    def _computed(self, life: _Life) -> None:
        self._ttft_seconds.append(self._clock.now - life.began)
        self._cache.put(life.trace.hashes)
        speed = self._settings.decode_tokens_per_second
        life.decoded = self._clock.now + (life.trace.output_tokens / speed if speed else 0.0)
        self._store(life, 0)

    def _store(self, life: _Life, tries: int) -> None:
        blocks = len(life.trace.hashes)
        job = self.manager.plan_store(
            life.opal, full_blocks=blocks, block_ids=range(blocks), include_tail=True
        )
        self._has_news = True
        if job is not None:
            self._worker.store(job)
        is_worth_it = life.opal.drop_reason not in (None, _TOO_LARGE)
        if is_worth_it and tries + 1 < _STORE_TRIES:
            delay_seconds = _STEP_SECONDS * (1 << tries)
            self._clock.plan(delay_seconds, partial(self._store, life, tries + 1))
        elif life.decoded > self._clock.now:
            self._clock.plan(life.decoded - self._clock.now, partial(self._end, life))
        else:
            self._end(life)

    def _end(self, life: _Life) -> None:
        self.manager.end_request(life.opal)
        self._has_news = True

    # ---- between requests ----

    def _step(self) -> None:
        self._clock.run_next()
        if self._has_news:
            self._keep_up()

    def _commit(self, result: JobResult) -> None:
        self.manager.commit(result)
        self._has_news = True

    def _keep_up(self) -> None:
        """Do what is due between the tiers, and take note of the events."""
        self._has_news = False
        for keeper in self._keepers:
            keeper.poll(self._clock.now)
        if self.manager.wants_upkeep:
            batch = self.manager.plan_upkeep()
            for copy in batch.copies:
                self._worker.copy(copy)
            for drop in batch.drops:
                self._worker.drop(drop)
            for keeper in self._keepers:
                keeper.used(batch.touches.get(keeper.place, ()))
        events = self.ledger.take()
        for keeper in self._keepers:
            keeper.follow(events)
            if keeper.is_asked and (self._clock or not keeper.was_full):
                self._clock.plan(_STEP_SECONDS, self._keep_up)

    def _report(self, policy: str, replay_seconds: float) -> ReplayReport:
        trace = self._trace
        input_tokens = trace.input_tokens
        hit_tokens = sum(self._hit_tokens)
        counters = self.manager.take_counters()
        unique_chunks = trace.unique_chunks(self.manager.database.chunk_blocks)
        return ReplayReport(
            policy=policy,
            requests=len(trace.requests),
            input_tokens=input_tokens,
            output_tokens=sum(request.output_tokens for request in trace.requests),
            unique_chunks=unique_chunks,
            duration_seconds=self._clock.now - self._began,
            tier_tokens={**self._tokens, CACHE_MISS: input_tokens - hit_tokens},
            hit_rate=hit_tokens / input_tokens,
            tiers=self._tiers(counters.get("evictions", {}), unique_chunks),
            events=dict(self.ledger.counts),
            dropped_stores={
                reason: int(count) for reason, count in counters.get("dropped_stores", {}).items()
            },
            ttft_seconds=summary(self._ttft_seconds),
            hit_rate_windows=window_rates(
                self._hit_tokens, [request.input_tokens for request in trace.requests]
            ),
            replay_seconds=replay_seconds,
        )

    def _tiers(
        self, evictions: Mapping[str, int | float], unique_chunks: int
    ) -> dict[str, TierReport]:
        reports = {name: self._hits(name) for name in self._tokens}
        for tier, traffic in zip(self.manager.storage.tiers, self._worker.traffic, strict=True):
            report = reports[tier.tier]
            report.capacity_bytes = tier.capacity_bytes
            report.used_bytes = tier.used_bytes
            report.objects = len(tier)
            report.read_bytes = traffic.read_bytes
            report.written_bytes = traffic.written_bytes
            report.written_objects = traffic.written_objects
            report.writes_per_unique_chunk = traffic.written_objects / max(1, unique_chunks)
            report.evictions = int(evictions.get(tier.tier, 0))
        for keeper in self._keepers:
            reports[keeper.tier].evictions += keeper.removed_count
        return reports

    def _hits(self, name: str) -> TierReport:
        tokens = self._tokens[name]
        return TierReport(
            hit_tokens=tokens,
            hit_rate=tokens / self._trace.input_tokens,
            mean_tokens_per_request=tokens / len(self._trace.requests),
        )
