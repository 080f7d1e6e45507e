"""A cluster in virtual time: the real router decides, simulated instances serve.

The router sees what it would see: events that have arrived, its own count of what is under way, and
speeds as the instances would measure them.
"""

import time
from collections.abc import Callable, Sequence

from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.places import HashedPrefix
from opal_connector.cluster.router.decide import RouteQuestion, Router
from opal_connector.config import EventsConfig
from opal_connector.events import KVCEvent
from opal_connector.simulated_cluster.feed import EventFeed
from opal_connector.simulated_cluster.introductions import MODEL, SHARED_TIER, describe, measure
from opal_connector.simulated_cluster.report import ClusterReport, RouterReport, balance
from opal_connector.simulation import ReplaySettings, Trace, TraceRequest
from opal_connector.simulation.device import SimulatedDevice
from opal_connector.simulation.directory import SimulatedDirectory
from opal_connector.simulation.instance import SimulatedInstance
from opal_connector.simulation.report import summary, window_rates
from opal_connector.simulation.run import TraceRun
from opal_connector.simulation.totals import totals


class ClusterSimulation:
    """One run of one trace by so many instances behind one router.

    An instance is made when the first request goes there. Mutable state: the run, the instances,
    the index and the router, the questions of requests under way, and what making it and decisions
    took and expected.
    """

    def __init__(
        self,
        trace: Trace,
        settings: ReplaySettings,
        *,
        instances: int,
        policy: str,
        is_shared: bool = False,
        seed: int = 42,
    ) -> None:
        """Prepare a run.

        Args:
            trace: The requests.
            settings: Of every instance.
            instances: How many.
            policy: The router's.
            is_shared: All instances mount one directory, whose capacity and device are one.
            seed: For what the policy draws.

        Raises:
            ValueError: There is no such policy.
        """
        began = time.perf_counter()
        self.kvbm = KVBM()
        self._router = Router(self.kvbm, policy, seed=seed)
        self._run = TraceRun(trace, settings)
        self._settings = settings
        self._names = tuple(f"instance-{number:04}" for number in range(instances))
        self._instances: dict[str, SimulatedInstance] = {}
        self._directory: SimulatedDirectory | None = None
        self._is_shared = is_shared
        if is_shared and instances > 1 and SHARED_TIER in settings.config.kvc_tiers:
            device = SimulatedDevice(settings.devices[SHARED_TIER], self._run.clock)
            self._directory = SimulatedDirectory(device)
        self._feed = EventFeed(
            self.kvbm,
            model=MODEL,
            block_tokens=trace.block_tokens,
            coalesce_seconds=settings.config.kvcevent_coalesce_time,
        )
        for name in self._names:
            shared_id = MODEL if self._directory is not None else ""
            self.kvbm.join(describe(name, settings, trace.block_tokens, shared_id=shared_id))
            self.kvbm.process_system_events(name, [measure(settings, trace.block_tokens)])
        [self._places] = self.kvbm.models()
        self._questions: dict[int, RouteQuestion] = {}
        self._figures = RouterReport()
        self._expected_tokens = 0
        self._setup_seconds = time.perf_counter() - began

    @property
    def instance_count(self) -> int:
        """How many instances were needed so far."""
        return len(self._instances)

    @property
    def now(self) -> float:
        """The virtual time, in seconds."""
        return self._run.clock.now

    def run(self, advance: Callable[[float], None] = lambda _count: None) -> ClusterReport:
        """Serve all requests and report; `advance` hears how many more have come."""
        began = time.perf_counter()
        self._run.serve(self._begin, advance)
        self._feed.deliver()
        return self._report(self._setup_seconds + time.perf_counter() - began)

    def check(self) -> None:
        """Audit all books at the end, and compare the index with the sum of them.

        Raises:
            AssertionError: They differ, or something was left behind.
        """
        self._run.check()
        self.kvbm.check()
        assert not self._questions, "the router was not told of an end"
        for name in self._names:
            said = {
                (tier, block)
                for group, tier in self.kvbm.workers[name].places
                for _, block in self.kvbm.contents(name, group, tier)
            }
            held: set[tuple[str, bytes]] = set()
            instance = self._instances.get(name)
            if instance is not None:
                instance.check()
                held = set(instance.blocks())
            assert said == held, f"the index is not what {name} holds"

    # ---- one request ----

    def _begin(self, place: int, request: TraceRequest) -> None:
        now = self._run.clock.now
        self._feed.deliver(float("inf") if self._settings.is_sequential else now)
        began = time.perf_counter()
        question = RouteQuestion(
            request_id=str(place),
            prompt_tokens=request.input_tokens,
            prefixes=(HashedPrefix(self._places, request.hashes, -1),),
        )
        decision = self._router.decide(question, self._names, now)
        assert decision is not None, "there is an instance"
        self._router.begin(question, decision, now)
        figures = self._figures
        figures.decide_seconds += time.perf_counter() - began
        figures.index_bytes = max(figures.index_bytes, self.kvbm.used_bytes)
        figures.index_blocks = max(figures.index_blocks, self.kvbm.entry_count)
        self._expected_tokens += decision.expected_tokens
        self._questions[place] = question
        self._instance(decision.worker_id).begin(place, request)

    def _instance(self, name: str) -> SimulatedInstance:
        instance = self._instances.get(name)
        if instance is None:
            instance = self._instances[name] = SimulatedInstance(
                self._run,
                listener=_Link(self, name),
                directory=self._directory,
            )
        return instance

    def heard(self, name: str, events: Sequence[KVCEvent]) -> None:
        """An instance has told what has come and gone."""
        self._feed.hear(name, events, self._run.clock.now)

    def first_token(self, place: int) -> None:
        """The answer to a request has begun."""
        self._router.first_token(str(place))

    def ended(self, place: int) -> None:
        """The answer to a request is whole, and says how much was cached."""
        question = self._questions.pop(place)
        self._router.cached(question, self._run.hit_tokens[place])
        self._router.end(question.request_id, self._run.clock.now, is_computed=True)

    # ---- the end ----

    def _report(self, wall_seconds: float) -> ClusterReport:
        run, trace = self._run, self._run.trace
        made = [self._instances[name] for name in self._names if name in self._instances]
        idle = [0] * (len(self._names) - len(made))
        found = totals(run, made, instance_count=len(self._names), directory=self._directory)
        duration_seconds = run.clock.now - run.began
        events = self._settings.config.events or EventsConfig()
        self._feed.count_heartbeats(
            {
                name: measure(self._settings, trace.block_tokens, self._instances.get(name))
                for name in self._names
            },
            duration_seconds=duration_seconds,
            heartbeat_seconds=events.heartbeat_seconds,
        )
        self._feed.traffic.bytes_per_request = self._feed.traffic.bytes / len(trace.requests)
        self._figures.ingest_seconds = self._feed.ingest_seconds
        self._figures.expected_hit_rate = self._expected_tokens / trace.input_tokens
        return ClusterReport(
            instances=len(self._names),
            policy=self._router.policy_name,
            is_shared=self._is_shared,
            requests=len(trace.requests),
            input_tokens=trace.input_tokens,
            output_tokens=sum(request.output_tokens for request in trace.requests),
            unique_chunks=found.unique_chunks,
            duration_seconds=duration_seconds,
            tier_tokens=found.tier_tokens,
            hit_rate=found.hit_rate,
            tiers=found.tiers,
            events=found.events,
            dropped_stores=found.dropped_stores,
            ttft_seconds=summary(run.ttft_seconds),
            hit_rate_windows=window_rates(
                run.hit_tokens, [request.input_tokens for request in trace.requests]
            ),
            balance=balance(
                [*(instance.computed_tokens for instance in made), *idle],
                [*(instance.request_count for instance in made), *idle],
            ),
            traffic=self._feed.traffic,
            router=self._figures,
            wall_seconds=wall_seconds,
            requests_per_wall_second=len(trace.requests) / wall_seconds,
        )


class _Link:
    """Tells a cluster whose news it is."""

    def __init__(self, cluster: ClusterSimulation, name: str) -> None:
        self._cluster = cluster
        self._name = name

    def events(self, events: Sequence[KVCEvent]) -> None:
        self._cluster.heard(self._name, events)

    def first_token(self, place: int) -> None:
        self._cluster.first_token(place)

    def end(self, place: int) -> None:
        self._cluster.ended(place)
