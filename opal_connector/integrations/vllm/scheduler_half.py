"""The scheduler half: asks the books, turns their plans into jobs, tells them what came of it.

It runs in the engine core's thread, inside `schedule()` and `update_from_output()`: nothing here
waits, and nothing touches a byte of KV.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from opal_connector.config import OpalConfig
from opal_connector.integrations.vllm.block_holds import BlockHolds
from opal_connector.integrations.vllm.books import Books, block_tables, build_books, describe_books
from opal_connector.integrations.vllm.groups import served_groups
from opal_connector.integrations.vllm.guard import contained
from opal_connector.integrations.vllm.hints import request_hints
from opal_connector.integrations.vllm.hit_sources import hit_sources
from opal_connector.integrations.vllm.identity import (
    LoraFingerprints,
    is_cacheable,
    request_identity,
)
from opal_connector.integrations.vllm.messages import OpalStepJobs, OpalStepResults, WorkerFacts
from opal_connector.integrations.vllm.native_events import EventOutlets
from opal_connector.integrations.vllm.news import News
from opal_connector.integrations.vllm.stats import OpalStats, levels
from opal_connector.integrations.vllm.store_planner import StorePlanner
from opal_connector.integrations.vllm.tracker import IDENTITY_WAIT_SECONDS, RequestTracker
from opal_connector.managers import LookupResult, LookupState, OpalRequest
from opal_connector.sharing import link_shared_tier
from opal_connector.transfers import NO_JOBS, JobBatch, LoadJob

logger = logging.getLogger(__name__)

_EXPIRY_SECONDS = 5.0
_HOLD_PATIENCE_SECONDS = 1.0
_NO_STEP_JOBS = OpalStepJobs()
_IDLE_STEP = OpalStepJobs(is_idle=True)
_UNKNOWN_BLOCKS = (0,)
_LOAD_RETRIES = 2  # of loads that brought nothing: computing is better than trying for ever
_UNBOOKED_JOB = 0  # the books number theirs from 1 and ignore answers to others
_MISS = (0, False)
_ASK_AGAIN = (None, False)


class SchedulerHalf:
    """The books of one engine, and the requests on their way through it.

    Mutable state: `_trackers` (one per live request), `_fetching` (requests between load and
    first step), the jobs not yet sent, the news not yet booked and the blocks held for stores;
    used by one thread.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: OpalConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._clock = clock
        self._served = served_groups(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._may_load = bool(transfer.is_kv_consumer)
        self._may_store = bool(transfer.is_kv_producer)
        self.events = EventOutlets(vllm_config, config, lambda: self._clock())
        self._pool: BlockPool | None = None
        self.books: Books | None = None
        self.holds: BlockHolds | None = None
        self._loras = LoraFingerprints()
        self._trackers: dict[str, RequestTracker] = {}
        self._fetching: set[str] = set()
        self._loads: list[LoadJob] = []
        self._stores: StorePlanner | None = None
        self._news: News | None = None
        self._workers: list[WorkerFacts] = []
        self._namespace = b""  # to be sent to the workers
        self._next_expiry = 0.0
        if transfer.kv_load_failure_policy != "recompute":
            logger.warning(
                'kv_load_failure_policy is "%s": a chunk that cannot be loaded fails its request; '
                'set it to "recompute" to make it a miss',
                transfer.kv_load_failure_policy,
            )

    # ---- coming up ----

    def bind_block_pool(self, pool: BlockPool) -> None:
        """The device's blocks, whose owners stores must outlive."""
        self.holds = BlockHolds(pool)
        self._pool = pool

    def start(self, workers: list[WorkerFacts]) -> None:
        """Build the books from what the workers have. Until then nothing hits or is stored.

        vLLM may say it again when it wakes up; the books then stay as they are.
        """
        if self.books is not None:
            if workers != self._workers:
                logger.warning("the workers have changed; Opal goes on as it began")
            return
        self._workers = workers
        refusals = sorted({worker.refusal for worker in workers if worker.refusal})
        if isinstance(self._served, str):
            refusals = [self._served]
        if refusals or isinstance(self._served, str):
            logger.warning("Opal is off, the model runs uncached: %s", "; ".join(refusals))
            return
        if not self._config.kvc_tiers:
            logger.warning("Opal is off: kvc_tiers is empty")
            return
        self.books = build_books(
            vllm_config=self._vllm_config,
            layout=self._served.layout,
            workers=workers,
            config=self._config,
            log=self.events.log,
            warn=logger.warning,
        )
        self._namespace = self.books.metadata.namespace
        shared = link_shared_tier(
            self._config,
            self.books.manager,
            namespace=self._namespace,
            ranks=self.books.storing_ranks,
            clock=self._clock,
        )
        self.events.start(self.books, self._pool, shared)
        self._news = News(
            self.books.manager, self.holds, shared, self._clock, job_ended=self.events.end_job
        )
        if self._may_store and self.holds is not None:
            self._stores = StorePlanner(
                self.books, self.holds, self._identified, ranks=len(workers)
            )
        logger.info("Opal is on: %s", describe_books(self.books, self._config, workers))

    # ---- one request ----

    def add_request(self, request: Request) -> None:
        """Begin to follow a request. Its adapter, if any, is read in the background."""
        self.events.begin_request(request.request_id)
        if self.books is None or not is_cacheable(request):
            return
        tracker = RequestTracker(request)
        self._trackers[request.request_id] = tracker
        if request.lora_request is not None:
            tracker.lora_fingerprint = self._loras.start(request.lora_request.lora_path)
        else:
            self._identify(tracker, None)

    def match(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that a load could add to `computed_tokens`; None asks vLLM to come again.

        At least the last token is left to compute, in whole blocks.
        """
        tracker = self._trackers.get(request.request_id)
        if self.books is None or tracker is None or request.skip_reading_prefix_cache:
            return _MISS
        now = self._clock()
        opal = self._identified(tracker)
        if opal is None:
            return _ASK_AGAIN if self._may_wait_for_adapter(tracker, now) else _MISS
        block_tokens = self.books.manager.database.block_tokens
        tracker.computed_blocks = computed_tokens // block_tokens
        tracker.lookup_tokens = request.num_tokens - computed_tokens
        tracker.tier_tokens = {}
        if not (self._may_load and tracker.may_load) or opal.failed_loads > _LOAD_RETRIES:
            return _MISS
        if computed_tokens % self.books.layout.alignment_tokens:
            return _MISS  # vLLM has a part of a block, which a load would have to begin before
        opal.extend(request.all_token_ids)
        if self._news is not None:
            self._news.poll_shared()
        result = self._lookup(tracker, (request.num_tokens - 1) // block_tokens, now)
        if result.state is LookupState.MISS:
            return _MISS
        if result.state is LookupState.WAIT or self._is_gate_closed(request.request_id):
            return _ASK_AGAIN
        tracker.tier_tokens = result.tier_tokens
        return result.block_count * block_tokens, True

    def allocated(
        self, request: Request, block_ids: tuple[Sequence[int], ...], external_tokens: int
    ) -> None:
        """Take note that vLLM has admitted the request, and wants `external_tokens` of it loaded.

        `block_ids` are its blocks by kv group; those to fill lie behind the last lookup's computed.
        """
        tracker = self._trackers.get(request.request_id)
        if self.books is None or tracker is None or tracker.opal is None:
            return
        if external_tokens == 0:
            self.books.manager.release(tracker.opal)
            tracker.tier_tokens = {}
        else:
            first = tracker.computed_blocks
            count = -(-external_tokens // self.books.manager.database.block_tokens)
            # vLLM waits for this load: without a plan its blocks are reported as not filled.
            unfilled = tuple(block_ids[0][first : first + count]) or _UNKNOWN_BLOCKS
            job = LoadJob(_UNBOOKED_JOB, request.request_id, (), unfilled)
            # What another length needs may not be leased, where it is not simply less.
            if self.books.layout.is_plain or external_tokens == sum(tracker.tier_tokens.values()):
                with contained("update_state_after_alloc"):
                    tables = block_tables(block_ids, self.books)
                    job = self.books.manager.plan_load(
                        tracker.opal, tables, first_block=first, block_count=count
                    )
            tracker.may_load = job.job_id != _UNBOOKED_JOB  # else it would be tried for ever
            self._loads.append(job)
            self._fetching.add(request.request_id)
            if not tracker.may_load:
                self.books.manager.release(tracker.opal)
                tracker.tier_tokens = {}  # nothing comes of it, so it is no hit
        if tracker.lookup_tokens is not None and request.num_preemptions == 0:
            self.books.manager.count_admission(tracker.tier_tokens, tracker.lookup_tokens)
        tracker.lookup_tokens = None

    def hit_sources(self, request: Request, external_tokens: int) -> dict[CacheHitSource, int]:
        """Where the tokens of the load just planned come from, in vLLM's terms."""
        tracker = self._trackers.get(request.request_id)
        return hit_sources(tracker.tier_tokens if tracker is not None else {}, external_tokens)

    def finish(
        self, request: Request, block_ids: tuple[Sequence[int], ...]
    ) -> dict[str, Any] | None:
        """The request has ended: store its tail, give back what it held, say what it had.

        Returns:
            What the response carries under `kv_transfer_params`.
        """
        self.events.end_request(request.request_id)
        tracker = self._trackers.pop(request.request_id, None)
        self._fetching.discard(request.request_id)
        if self.books is None or tracker is None or tracker.opal is None:
            return None
        with contained("request_finished"):
            if tracker.sure_tokens and self._stores is not None:
                self._stores.plan(tracker, block_ids, self._clock(), include_tail=True)
        self.books.manager.end_request(tracker.opal)
        hit_tokens = {tier: count for tier, count in tracker.opal.hit_tokens.items() if count}
        return {"opal": {"hit_tokens": hit_tokens, "stored_tokens": tracker.opal.stored_tokens}}

    # ---- one step ----

    def plan_step(self, output: SchedulerOutput) -> OpalStepJobs:
        """Plan what this step will surely have computed; hand over all new jobs."""
        if self.books is None:
            return _NO_STEP_JOBS
        self.events.begin_step(output)
        now = self._clock()
        if now >= self._next_expiry:
            self._next_expiry = now + _EXPIRY_SECONDS
            with contained("build_connector_meta"):
                self.books.manager.expire(now)
        if self._news is not None:
            self._news.catch_up()
        for request_id in output.preempted_req_ids or ():
            self._restart(request_id)
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            self._restart(request_id)
        self._fetching.difference_update(output.num_scheduled_tokens)
        if self._stores is not None:
            self._stores.plan_step(output, self._trackers, now)
        upkeep = NO_JOBS
        if self.books.manager.wants_upkeep:
            with contained("build_connector_meta"):
                upkeep = self.books.manager.plan_upkeep()
        namespace, self._namespace = self._namespace, b""
        is_idle = output.total_num_scheduled_tokens == 0
        if not (self._loads or self._stores or upkeep or namespace):
            return _IDLE_STEP if is_idle else _NO_STEP_JOBS
        loads, self._loads = tuple(self._loads), []
        stores = self._stores.take() if self._stores else ()
        batch = JobBatch(loads, stores, upkeep.copies, upkeep.drops, upkeep.touches)
        return OpalStepJobs(batch, namespace, is_idle)

    def take_output(self, output: KVConnectorOutput) -> None:
        """Commit what the workers report, before anything is looked up again."""
        meta = output.kv_connector_worker_meta
        if self._news is not None and isinstance(meta, OpalStepResults):
            self._news.take(meta)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Events for vLLM's stream; called once a step, when its output is known."""
        return self.events.take_host_events()

    def take_stats(self) -> OpalStats | None:
        """Numbers since the last call, None when nothing changed."""
        if self.books is None:
            return None
        manager = self.books.manager
        data: dict[str, Any] = manager.take_counters()
        if data:
            data |= levels(manager.storage.tiers)
        return OpalStats(data) if data else None

    def has_work(self) -> bool:
        """Whether the engine must step on although no request needs it."""
        if self.books is None:
            return False
        manager, has_news = self.books.manager, self._news is not None and self._news.has_more
        is_busy = manager.open_job_count or manager.storage.is_opening or manager.wants_upkeep
        return bool(is_busy or has_news or self._loads or self._stores or self.events.has_work)

    def frees_blocks_soon(self) -> bool:
        """Whether waiting a step gives vLLM blocks that a preemption would cost a request."""
        return self.holds is not None and self.holds.frees_soon(
            self._clock(), _HOLD_PATIENCE_SECONDS
        )

    def reset(self) -> bool:
        """Empty every tier."""
        if self.books is not None:
            self.books.manager.reset()
            logger.info("all tiers were emptied on request")
        return True

    def close(self) -> None:
        """End the background threads."""
        self.events.close()
        if self._news is not None:
            self._news.close()
        self._loras.close()

    # ---- inside ----

    def _lookup(self, tracker: RequestTracker, max_blocks: int, now: float) -> LookupResult:
        """Ask the books. A draft model must compute the last block of a hit again.

        Its KV of a block's last token depends on the token behind it, which no hash of ours covers.
        """
        assert self.books is not None
        assert tracker.opal is not None
        lookup = self.books.manager.lookup
        first = tracker.computed_blocks
        result = lookup(tracker.opal, computed_blocks=first, max_blocks=max_blocks, now=now)
        layout = self.books.layout
        if layout.is_plain and layout.groups[0].is_draft and result.state is LookupState.HIT:
            stop = first + result.block_count - 1
            result = lookup(tracker.opal, computed_blocks=first, max_blocks=stop, now=now)
        return result

    def _identify(self, tracker: RequestTracker, lora_fingerprint: str | None) -> None:
        assert self.books is not None
        request = tracker.request
        identity = request_identity(request, lora_fingerprint)
        self.events.see_adapter(identity.lora)
        tracker.opal = self.books.manager.new_request(
            request.request_id,
            identity,
            lora_name=request.lora_request.lora_name if request.lora_request else None,
            hints=request_hints(request),
        )

    def _identified(self, tracker: RequestTracker) -> OpalRequest | None:
        """The books' view of a request, as soon as its adapter has been read."""
        future = tracker.lora_fingerprint
        if future is not None and future.done():
            tracker.lora_fingerprint = None
            if future.exception() is None:
                self._identify(tracker, future.result())
        return tracker.opal

    def _may_wait_for_adapter(self, tracker: RequestTracker, now: float) -> bool:
        if tracker.lora_fingerprint is None:
            return False
        tracker.asked_at = now if tracker.asked_at is None else tracker.asked_at
        return now - tracker.asked_at < IDENTITY_WAIT_SECONDS

    def _is_gate_closed(self, request_id: str) -> bool:
        """Opal's gate: so many requests may be fetching, or fetched and not yet begun."""
        ahead = len(self._fetching) - (request_id in self._fetching)
        return ahead >= self._config.max_kvc_ready_requests

    def _restart(self, request_id: str) -> None:
        # It may be fetching again already: vLLM can preempt and admit it in one step.
        tracker = self._trackers.get(request_id)
        if tracker is not None:
            tracker.restart()


def facts_of(metadata: Mapping[Any, Any]) -> list[WorkerFacts]:
    """The workers' facts from vLLM's handshake, by rank."""
    return sorted((shake.facts for shake in metadata.values()), key=lambda facts: facts.rank)
