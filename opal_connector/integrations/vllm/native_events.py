"""Opal's own event channel of a vLLM engine: who it is, how it is, what it holds."""

from collections.abc import Callable, Iterable
from hashlib import sha256

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput

from opal_connector.cluster.curve import CurveServer
from opal_connector.cluster.publisher import ChannelSettings, Publisher
from opal_connector.config import (
    EngineTierConfig,
    EventsConfig,
    OpalConfig,
    parse_endpoint,
    parse_size_bytes,
)
from opal_connector.config.endpoints import PORTS_PER_RANK
from opal_connector.events import DEVICE_TIER, EventLog
from opal_connector.events.channel import (
    InstanceDescription,
    SystemEvent,
    TierDescription,
    TierLoad,
    describe_layout,
)
from opal_connector.integrations.vllm.book_facts import BookFacts
from opal_connector.integrations.vllm.books import Books
from opal_connector.integrations.vllm.device_tap import AdapterSeen, DeviceFacts, DeviceTap
from opal_connector.integrations.vllm.guard import contained
from opal_connector.integrations.vllm.kv_events import host_events
from opal_connector.integrations.vllm.load_meter import LoadMeter
from opal_connector.keys import LoraIdentity
from opal_connector.managers.jobs import OpenJob
from opal_connector.sharing import SharedTierLink
from opal_connector.transfers import JobResult

_ADAPTERS = 4_096  # that a description may name


class EngineFacts(BookFacts):
    """What the publisher's thread may ask of an engine.

    Mutable state: the adapters seen, written by the engine core's thread; what a shared tier was
    announced as, which never changes.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: OpalConfig,
        books: Books,
        pool: BlockPool,
        shared: SharedTierLink | None,
    ) -> None:
        super().__init__(books.manager, range(len(books.layout.groups)))
        self._config = config
        self._books = books
        self._pool = pool
        self._shared = shared
        self._announced: tuple[TierDescription, ...] | None = None
        names = vllm_config.model_config.served_model_name
        self.model: str = names if isinstance(names, str) else names[0]
        self.layout = books.layout
        self.block_tokens = books.layout.hash_block_tokens
        self.meter = LoadMeter(len(books.manager.storage.tiers))
        self.adapters: dict[str, LoraIdentity] = {}

    @property
    def is_ready(self) -> bool:
        """Whether a shared directory's name is known, if there is one."""
        return self._shared is None or self._shared.identity is not None

    def describe(self, instance_id: str, incarnation: int) -> InstanceDescription:
        """The engine as it is now. What a tier was announced as it stays."""
        if self._announced is None:
            self._announced = (TierDescription(DEVICE_TIER), *self._tiers_now())
        return InstanceDescription(
            instance_id=instance_id,
            incarnation=incarnation,
            model=self.model,
            block_tokens=self.block_tokens,
            chunk_blocks=self._books.manager.database.chunk_blocks,
            namespace=self._books.metadata.namespace,
            tiers=self._announced,
            groups=describe_layout(self.layout),
            adapters=tuple(self.adapters.copy().values()),
        )

    def system(self) -> SystemEvent:
        """The load now, from single numbers."""
        meter, manager = self.meter, self._books.manager
        queue_depth, running = meter.queue_depth, meter.running
        return SystemEvent(
            queue_depth=queue_depth,
            running=running,
            waiting=max(0, queue_depth - running),
            device_usage=self._pool.get_usage(),
            prefill_tokens_per_second=meter.prefill.value,
            chunk_bytes=self._books.chunk_bytes,
            tiers=tuple(
                TierLoad(
                    tier.tier,
                    tier.used_bytes,
                    0 if self._limits_itself(tier.tier) else tier.capacity_bytes,
                    loads.value,
                    stores.value,
                )
                for tier, loads, stores in zip(
                    manager.storage.tiers, meter.loads, meter.stores, strict=True
                )
            ),
        )

    def _limits_itself(self, name: str) -> bool:
        """Whether there is no capacity to speak of."""
        return isinstance(self._config.tier(name), EngineTierConfig)

    def _tiers_now(self) -> Iterable[TierDescription]:
        for tier in self._books.manager.storage.tiers:
            is_lasting = self._config.keyed_tier(tier.tier) is not None
            shared_id = ""
            if tier.space.is_shared and self._shared is not None and self._shared.identity:
                # Others who mount the directory may run another model in it.
                name = self._shared.identity.encode() + self._books.metadata.namespace
                shared_id = sha256(name).hexdigest()[:32]
            yield TierDescription(tier.tier, is_lasting, shared_id)


class NativeChannel:
    """The channel of an engine with books: the tap, the facts, the publisher.

    Mutable state: none of its own. The hooks below cost a few operations each.
    """

    def __init__(
        self, facts: EngineFacts, pool: BlockPool, log: EventLog, settings: ChannelSettings
    ) -> None:
        self._log = log
        self.facts = facts
        self.device = DeviceFacts(pool.medium, facts.adapters.get, facts.layout)
        self.publisher = Publisher(settings, facts, self.device, detach=self._detach)
        self.tap = DeviceTap(pool, self.publisher.hear_device)
        log.listener = self.publisher.hear
        self.publisher.start()

    def see_adapter(self, identity: LoraIdentity) -> None:
        """A request has named an adapter whose identity is known."""
        adapters = self.facts.adapters
        if adapters.get(identity.name) != identity:
            adapters[identity.name] = identity
            if len(adapters) > _ADAPTERS:
                del adapters[next(iter(adapters))]
            self.publisher.hear_device(AdapterSeen(identity.name))

    def close(self) -> None:
        """Publish what is left and end."""
        self.tap.remove()
        self.publisher.close()

    def _detach(self) -> None:
        """Nobody hears any more. Called by the publisher's thread."""
        self._log.listener = None
        self.tap.is_wanted = False


class EventOutlets:
    """Where the facts of a scheduler half go: vLLM's stream, and Opal's channel if it is on.

    A fault of what is only counted must not cost the hook its work, so none leaves here. Mutable
    state: the log, when vLLM's stream gets the next events, and the channel; used by the engine
    core's thread.
    """

    def __init__(
        self, vllm_config: VllmConfig, config: OpalConfig, clock: Callable[[], float]
    ) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._clock = clock
        events = vllm_config.kv_events_config
        self.log = EventLog(enabled=bool(events and events.enable_kv_cache_events))
        self._due: float | None = None
        self._books: Books | None = None
        self.channel: NativeChannel | None = None

    @property
    def has_work(self) -> bool:
        """Whether events wait for a step."""
        return bool(len(self.log)) or (self.channel is not None and self.channel.tap.has_events)

    def start(self, books: Books, pool: BlockPool | None, shared: SharedTierLink | None) -> None:
        """The books exist: what they write is heard from here on."""
        self._books = books
        if self._config.events is None or pool is None:
            return
        with contained("set_xfer_handshake_metadata"):
            facts = EngineFacts(self._vllm_config, self._config, books, pool, shared)
            rank = self._vllm_config.parallel_config.data_parallel_rank
            settings = _settings(self._config, self._config.events, rank)
            self.channel = NativeChannel(facts, pool, self.log, settings)

    def take_host_events(self) -> Iterable[KVCacheEvent]:
        """Events for vLLM's stream, at most every `kvcevent_coalesce_time` seconds."""
        if self.channel is not None:
            with contained("take_events"):
                self.channel.facts.meter.end_step()
        if self._books is None or not len(self.log):
            return ()
        now = self._clock()
        if self._due is None:
            self._due = now + self._config.kvcevent_coalesce_time
        if now < self._due:
            return ()
        self._due = None
        return host_events(self._books.manager.take_events(), self._books.layout)

    def begin_request(self, request_id: str) -> None:
        """A request has come."""
        if self.channel is not None:
            with contained("on_new_request"):
                self.channel.facts.meter.begin_request(request_id)

    def end_request(self, request_id: str) -> None:
        """A request has ended."""
        if self.channel is not None:
            with contained("request_finished"):
                self.channel.facts.meter.end_request(request_id)

    def begin_step(self, output: SchedulerOutput) -> None:
        """A step is planned."""
        if self.channel is not None:
            with contained("build_connector_meta"):
                self.channel.facts.meter.begin_step(output)

    def end_job(self, job: OpenJob, result: JobResult) -> None:
        """The last rank has answered a job."""
        if self.channel is not None:
            with contained("update_connector_output"):
                self.channel.facts.meter.end_job(job, result)

    def see_adapter(self, identity: LoraIdentity | None) -> None:
        """A request's adapter, if it has one, is known."""
        if self.channel is not None and identity is not None:
            with contained("on_new_request"):
                self.channel.see_adapter(identity)

    def close(self) -> None:
        """End the channel."""
        if self.channel is not None:
            self.channel.close()


def _settings(config: OpalConfig, events: EventsConfig, rank: int) -> ChannelSettings:
    publish = events.publish_endpoint
    shift = PORTS_PER_RANK * rank
    return ChannelSettings(
        endpoint=parse_endpoint(events.endpoint).next_to(shift),
        publish_endpoint=parse_endpoint(publish).next_to(shift) if publish is not None else None,
        instance_id=config.instance_id,
        id_suffix=f"/dp{rank}" if rank else "",
        coalesce_seconds=config.kvcevent_coalesce_time,
        heartbeat_seconds=events.heartbeat_seconds,
        replay_bytes=parse_size_bytes(events.replay_size),
        curve=None
        if events.curve is None
        else CurveServer(
            secret_key_file=events.curve.secret_key_file,
            client_key_files=events.curve.client_key_files,
        ),
    )
