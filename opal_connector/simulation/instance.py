"""One simulated instance: the real books, devices that take time, and the life of its requests.

Lookups, leases, jobs, copies, moves and deletions are planned and committed by the manager that
vLLM's scheduler has; a simulated worker lets time pass for them.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

from opal_connector.events import DEVICE_TIER, EventLog, KVCEvent
from opal_connector.keys import HASH_BYTES
from opal_connector.managers import LookupState, OpalRequest, SharedSpace, one_table
from opal_connector.simulation.books import make_books
from opal_connector.simulation.device import SimulatedDevice
from opal_connector.simulation.device_cache import DeviceCache
from opal_connector.simulation.directory import SimulatedDirectory, SimulatedKeeper
from opal_connector.simulation.ledger import EventLedger
from opal_connector.simulation.report import DEVICE
from opal_connector.simulation.run import TraceRun
from opal_connector.simulation.slots import Slots
from opal_connector.simulation.trace import TraceRequest
from opal_connector.simulation.worker import SimulatedWorker
from opal_connector.transfers import InventoryPage, JobResult

STEP_SECONDS = 0.01  # of the engine: how often what waits is asked again
_STORE_TRIES = 8  # at growing distance, as the steps of a request that still decodes would
_TOO_LARGE = "too_large"  # trying again will not help


class Listener(Protocol):
    """Hears what an instance does, at once."""

    def events(self, events: Sequence[KVCEvent]) -> None:
        """What has come and gone, in order, its device included."""

    def first_token(self, place: int) -> None:
        """The prompt of a request is computed."""

    def end(self, place: int) -> None:
        """A request is over."""


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


class SimulatedInstance:
    """Serves requests of a run.

    Mutable state: the manager and what it plans, the device's cache, the requests that wait for an
    answer or for a slot, whether the books have changed since they were looked after, and how much
    was computed.

    Args:
        run: Of which it is a part.
        listener: Who hears what it does.
        directory: The shared one that it mounts; its own if None.
    """

    def __init__(
        self,
        run: TraceRun,
        *,
        listener: Listener | None = None,
        directory: SimulatedDirectory | None = None,
    ) -> None:
        settings, trace = run.settings, run.trace
        self._run = run
        self._clock = run.clock
        self._listener = listener
        log = EventLog(enabled=True)
        self.manager = make_books(
            settings,
            block_tokens=trace.block_tokens,
            clock=run.clock,
            log=log,
            has_siblings=directory is not None,
        )
        self.ledger = EventLedger(self.manager, log)
        devices = [
            directory.device
            if directory is not None and isinstance(tier.space, SharedSpace)
            else SimulatedDevice(settings.devices[tier.tier], run.clock)
            for tier in self.manager.storage.tiers
        ]
        self.keeper = self._open_tiers(devices, directory)
        self.worker = SimulatedWorker(
            devices,
            clock=run.clock,
            row_bytes=settings.bytes_per_token * trace.block_tokens,
            commit=self._commit,
        )
        self.cache = DeviceCache(settings.device_blocks, tells=listener is not None)
        self.request_count = 0
        self.computed_tokens = 0
        self._running = Slots(settings.max_num_seqs)
        self._prefills = Slots(settings.prefill_concurrency)
        self._waiting: list[_Life] = []
        self._has_news = False
        self._is_poll_planned = False

    def begin(self, place: int, request: TraceRequest) -> None:
        """A request has come."""
        opal = self.manager.new_request(str(place))
        opal.chain.hashes.extend(request.hashes)
        self.request_count += 1
        life = _Life(place, request, opal, self._clock.now)
        self._running.enter(partial(self._look, life))
        self._note()

    def blocks(self) -> Iterator[tuple[str, bytes]]:
        """Tier and hash of every block that is there, the device's included; some of them twice."""
        for block in self.cache.blocks:
            yield DEVICE_TIER, block
        for tier in self.manager.storage.tiers:
            for key in tier.index.readable_keys():
                run = tier.index.records[key].run
                for start in range(0, len(run), HASH_BYTES):
                    yield tier.tier, run[start : start + HASH_BYTES]

    def check(self) -> None:
        """Audit the books at the end, and compare them with the replay of all events.

        Raises:
            AssertionError: They differ, or something was left behind.
        """
        self.manager.check()
        assert self.manager.lease_count == 0, "a lease was left behind"
        assert self.manager.open_job_count == 0, "a job was left behind"
        waiting = len(self._waiting) + self._running.waiting_count + self._prefills.waiting_count
        assert not waiting, "a request was left waiting"
        self.ledger.check()

    # ---- one request ----

    def _look(self, life: _Life) -> None:
        usable = self._run.trace.usable_blocks(life.trace)
        life.device_blocks = self.cache.match(life.trace.hashes, usable)
        result = self.manager.lookup(
            life.opal,
            computed_blocks=life.device_blocks,
            max_blocks=usable,
            now=self._clock.now,
        )
        if result.state is LookupState.WAIT:
            self._ask()
            if not self._waiting:
                self._clock.plan(STEP_SECONDS, self._look_again)
            self._waiting.append(life)
        elif result.state is LookupState.HIT:
            first, count = life.device_blocks, result.block_count
            job = self.manager.plan_load(
                life.opal, one_table(range(first + count)), first_block=first, block_count=count
            )
            self._note()
            self.worker.load(job, partial(self._loaded, life))
        else:
            self.manager.release(life.opal)
            self._loaded(life)

    def _look_again(self) -> None:
        waiting, self._waiting = self._waiting, []
        for life in waiting:
            self._look(life)

    def _ask(self) -> None:
        """Carry questions about the shared directory there; a look at it takes its latency."""
        questions = self.manager.take_questions()
        keeper = self.keeper
        if not questions or keeper is None:
            return

        def answer() -> None:
            keeper.answer(questions, self._clock.now)
            self._note()

        self._clock.plan(keeper.directory.device.latency_seconds, answer)

    def _loaded(self, life: _Life) -> None:
        run = self._run
        device_tokens = life.device_blocks * run.trace.block_tokens
        hit_tokens = device_tokens
        if device_tokens:
            run.tokens[DEVICE] += device_tokens
        for tier, tokens in life.opal.hit_tokens.items():
            run.tokens[tier] += tokens
            hit_tokens += tokens
        run.hit_tokens[life.place] = hit_tokens
        self.manager.count_admission(life.opal.hit_tokens, life.trace.input_tokens - device_tokens)
        new_tokens = life.trace.input_tokens - hit_tokens
        self.computed_tokens += new_tokens
        self._prefills.enter(partial(self._compute, life, new_tokens))

    def _compute(self, life: _Life, new_tokens: int) -> None:
        speed = self._run.settings.prefill_tokens_per_second
        if speed:
            self._clock.plan(new_tokens / speed, partial(self._computed, life))
        else:
            self._computed(life)

    def _computed(self, life: _Life) -> None:
        self._run.ttft_seconds.append(self._clock.now - life.began)
        if self._listener is not None:
            self._listener.first_token(life.place)
        self.cache.put(life.trace.hashes)
        speed = self._run.settings.decode_tokens_per_second
        life.decoded = self._clock.now + (life.trace.output_tokens / speed if speed else 0.0)
        self._store(life, 0)
        self._prefills.leave()

    def _store(self, life: _Life, tries: int) -> None:
        blocks = len(life.trace.hashes)
        job = self.manager.plan_store(
            life.opal, full_blocks=blocks, tables=one_table(range(blocks)), include_tail=True
        )
        self._note()
        if job is not None:
            self.worker.store(job)
        is_worth_it = life.opal.drop_reason not in (None, _TOO_LARGE)
        if is_worth_it and tries + 1 < _STORE_TRIES:
            delay_seconds = STEP_SECONDS * (1 << tries)
            self._clock.plan(delay_seconds, partial(self._store, life, tries + 1))
        elif life.decoded > self._clock.now:
            self._clock.plan(life.decoded - self._clock.now, partial(self._end, life))
        else:
            self._end(life)

    def _end(self, life: _Life) -> None:
        self.manager.end_request(life.opal)
        self._note()
        self._run.end_counts[life.place] += 1
        if self._listener is not None:
            self._listener.end(life.place)
        self._running.leave()

    # ---- between requests ----

    def _open_tiers(
        self, devices: Sequence[SimulatedDevice], directory: SimulatedDirectory | None
    ) -> SimulatedKeeper | None:
        """Nothing was there before; who shares a directory has a keeper."""
        keeper = None
        for place, tier in enumerate(self.manager.storage.tiers):
            if tier.space.frees_later:
                self.manager.adopt(InventoryPage(place, 0, is_last=True))
            if isinstance(tier.space, SharedSpace):
                mounted = SimulatedDirectory(devices[place]) if directory is None else directory
                keeper = SimulatedKeeper(
                    mounted, self.manager, place, tier.space, changed=self._note
                )
        return keeper

    def _commit(self, result: JobResult) -> None:
        self.manager.commit(result)
        self._note()

    def _note(self) -> None:
        """The books have changed: look after them before time goes on."""
        if not self._has_news:
            self._has_news = True
            self._run.before_time_goes_on(self._keep_up)

    def _keep_up(self) -> None:
        """Do what is due between the tiers, and take note of the events."""
        self._has_news = False
        self._publish()
        if self.keeper is not None:
            self.keeper.poll(self._clock.now)
        if self.manager.wants_upkeep:
            batch = self.manager.plan_upkeep()
            for copy in batch.copies:
                self.worker.copy(copy)
            for drop in batch.drops:
                self.worker.drop(drop)
            if self.keeper is not None:
                self.keeper.directory.used(batch.touches.get(self.keeper.place, ()))
        self._publish()
        keeper = self.keeper
        if keeper is not None and keeper.is_asked and not keeper.was_full:
            self._poll_soon()

    def _poll_soon(self) -> None:
        if not self._is_poll_planned:
            self._is_poll_planned = True
            self._clock.plan(STEP_SECONDS, self._poll)

    def _poll(self) -> None:
        self._is_poll_planned = False
        self._note()

    def _publish(self) -> None:
        events = self.ledger.take()
        if self.keeper is not None and events:
            self.keeper.follow(events, self._clock.now)
        if self._listener is not None:
            events = [*self.cache.take(), *events]
            if events:
                self._listener.events(events)
