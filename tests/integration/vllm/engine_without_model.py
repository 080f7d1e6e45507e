"""vLLM's real scheduler and the real connector over small KV tensors; only the model is missing.

Every step runs what a step of an engine runs, in its order: `Scheduler.schedule`, pickled to the
workers, vLLM's own `KVConnectorModelRunnerMixin` around a forward pass of `FakeRunner`, pickled
back, `KVOutputAggregator`, `Scheduler.update_from_output`. Blocks that nobody may read any more
are overwritten after every step.
"""

import contextlib
import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from byte_model import LAYER_NAMES, SLOT_BYTES, ByteModel, FakeRunner, Identity, propose
from engine_view import EngineView
from transfer_fakes import ManualMover, WatchedMover
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm_parts import (
    Clock,
    Lookup,
    Result,
    connector_step,
    finish_connector_step,
    runner_answer,
    vllm_config,
)

from opal_connector.integrations.vllm import worker_half
from opal_connector.integrations.vllm.connector import OpalConnector
from opal_connector.tiers import TierStore


class Engine(EngineView):
    """One engine.

    Args:
        block_tokens: Tokens of a device block.
        num_blocks: Device blocks, the null block included.
        chunk_blocks: Blocks of a chunk.
        tier_blocks: Blocks that CPUMemory holds.
        transfers: "inline" (in the step that plans them), "manual" (when the test calls
            `run_transfers`), or "threads" (the real ones).
        wrap_tier: Wraps every rank's tier.
        spec_tokens: Drafted tokens a step.
        async_steps: Schedule a step before the output of the last one is known.
        v2_runner: Announce resumed requests as vLLM does for its second model runner.
        events: Whether vLLM publishes KV events.
        audit: Recompute the books after every step.
        extra: More of `kv_connector_extra_config`.
    """

    def __init__(
        self,
        *,
        block_tokens: int = 16,
        num_blocks: int = 65,
        chunk_blocks: int = 2,
        tier_blocks: int = 256,
        batch_tokens: int = 512,
        max_requests: int = 16,
        prefix_caching: bool = True,
        ranks: int = 1,
        policy: str = "recompute",
        role: str = "kv_both",
        transfers: str = "inline",
        wrap_tier: Callable[[TierStore], TierStore] | None = None,
        spec_tokens: int = 0,
        async_steps: bool = False,
        v2_runner: bool = False,
        is_eagle: bool = False,
        events: bool = True,
        audit: bool = True,
        **extra: Any,
    ) -> None:
        page_bytes = block_tokens * SLOT_BYTES
        extra.setdefault("weights_id", "bytes")
        extra.setdefault("chunk_size", chunk_blocks * block_tokens)
        extra.setdefault("kvcevent_coalesce_time", 0)
        extra.setdefault(
            "CPUMemory", {"capacity_GB": f"{tier_blocks * page_bytes * len(LAYER_NAMES)}B"}
        )
        self.config = vllm_config(
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            batch_tokens=batch_tokens,
            max_requests=max_requests,
            prefix_caching=prefix_caching,
            spec_tokens=spec_tokens,
            async_steps=async_steps,
        )
        self.config.kv_events_config.enable_kv_cache_events = events
        self.config.kv_transfer_config = KVTransferConfig(
            kv_connector="OpalConnector",
            kv_connector_module_path="opal_connector",
            kv_role=role,
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra,
        )
        spec = FullAttentionSpec(
            block_size=block_tokens, num_kv_heads=1, head_size=SLOT_BYTES // 2, dtype=torch.uint8
        )
        self.kv_cache_config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(list(LAYER_NAMES), spec, is_eagle_group=is_eagle)],
        )
        self.model = ByteModel(ranks)
        self.runner = FakeRunner(self.model, num_blocks=num_blocks, block_tokens=block_tokens)
        self.block_tokens = block_tokens
        self.results: dict[str, Result] = {}
        self.identities: dict[str, Identity] = {}
        self.requests: dict[str, Request] = {}
        self.lookups: list[Lookup] = []
        self.events: list[KVCacheEvent] = []
        self.steps: list[SchedulerOutput] = []
        self.stats: list[SchedulerStats] = []
        self.load_errors: list[set[int]] = []
        self.during_step: Callable[[SchedulerOutput], None] = lambda output: None
        self._audit = audit
        self._moved = threading.Event()
        self._spec_tokens = spec_tokens
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._depth = 2 if async_steps else 1
        self.workers = [self._make_worker(rank, transfers, wrap_tier) for rank in range(ranks)]
        self.scheduler = self._make_scheduler(v2_runner=v2_runner)
        self.clock = self.half._clock = Clock()
        self.shake_hands()
        self.aggregator = KVOutputAggregator.from_connector(self.connector, ranks)
        self._spy_on_lookups()

    # ---- building ----

    def _make_worker(
        self, rank: int, transfers: str, wrap_tier: Callable[[TierStore], TierStore] | None
    ) -> OpalConnector:
        self.config.parallel_config.rank = rank
        worker = OpalConnector(self.config, KVConnectorRole.WORKER, self.kv_cache_config)

        def make_mover(tiers: Sequence[TierStore], *args: Any, **kwargs: Any) -> Any:
            if wrap_tier is not None:
                tiers = [wrap_tier(tier) for tier in tiers]
            if transfers == "threads":
                return WatchedMover(tiers, *args, moved=self._moved, **kwargs)
            return ManualMover(tiers, *args, is_inline=transfers == "inline", **kwargs)

        with mock.patch.object(worker_half, "Mover", make_mover):
            worker.register_kv_caches(self.runner.kv_caches(rank))
        return worker

    def _make_scheduler(self, *, v2_runner: bool) -> Scheduler:
        self.config.parallel_config.rank = 0
        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(self.block_tokens, sha256_cbor)
        make = AsyncScheduler if self._depth > 1 else Scheduler
        scheduler = make(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=self.block_tokens,
            log_stats=True,
        )
        scheduler.use_v2_model_runner = v2_runner
        # The model's configuration is that of a text model; requests with images are welcome.
        scheduler.max_num_encoder_input_tokens = 1 << 20
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1 << 20)
        scheduler.kv_event_publisher = mock.Mock(publish=self._publish)
        return scheduler

    def shake_hands(self) -> None:
        """Tell the scheduler's connector what the workers have, as the engine does."""
        handshake = {
            (0, rank): pickle.loads(pickle.dumps(worker.get_handshake_metadata()))
            for rank, worker in enumerate(self.workers)
        }
        self.connector.set_xfer_handshake_metadata_pp_aware(handshake)

    def _publish(self, batch: Any) -> None:
        self.events += batch.events

    def _spy_on_lookups(self) -> None:
        ask = self.connector.get_num_new_matched_tokens

        def spy(request: Request, computed_tokens: int) -> tuple[int | None, bool]:
            answer = ask(request, computed_tokens)
            self.lookups.append(Lookup(request.request_id, computed_tokens, *answer))
            return answer

        self.connector.get_num_new_matched_tokens = spy

    # ---- driving ----

    def add(self, request_id: str, prompt: Sequence[int] | None, **options: Any) -> Request:
        """Hand a new request to the scheduler; `options` are those of `make_request`."""
        identity = options.get("identity") or Identity()
        request = self.make_request(request_id, prompt, **options)
        self.runner.salts[request_id] = identity.salt
        self.identities[request_id] = identity
        self.requests[request_id] = request
        self.results[request_id] = Result()
        self.scheduler.add_request(request)
        return request

    def make_request(
        self,
        request_id: str,
        prompt: Sequence[int] | None,
        *,
        max_tokens: int = 3,
        identity: Identity | None = None,
        lora_path: str = "/nowhere",
        skip_reading: bool | None = None,
        **options: Any,
    ) -> Request:
        """A request as the engine core makes it."""
        identity = identity or Identity()
        lora = None
        if identity.lora:
            number = int.from_bytes(identity.lora.encode(), "little") % 1000 + 1
            lora = LoRARequest(identity.lora, number, lora_path)
        return Request(
            request_id=request_id,
            prompt_token_ids=list(prompt) if prompt is not None else None,
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, skip_reading_prefix_cache=skip_reading
            ),
            pooling_params=None,
            lora_request=lora,
            cache_salt=identity.salt or None,
            mm_features=[
                MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
                for name, offset, length in identity.images
            ],
            block_hasher=self._hasher,
            **options,
        )

    def abort(self, request_id: str) -> None:
        """As a client that goes away."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """One step of the engine; in asynchronous mode the output of the one before is taken."""
        output = self.scheduler.schedule()
        self.steps.append(output)
        self._in_flight.append((output, self._execute(output)))
        if len(self._in_flight) >= self._depth or not output.total_num_scheduled_tokens:
            self._take_output(*self._in_flight.popleft())
        if self._audit:
            self.manager.check()
        if not output.total_num_scheduled_tokens and self.scheduler.has_requests():
            # As the engine's loop does when no model ran: let the transfer threads work.
            self._moved.wait(0.001)
            self._moved.clear()
        return output

    def run(self, *, max_steps: int = 2000) -> int:
        """Step until the engine would go idle; returns the number of steps."""
        for count in range(max_steps):
            if self.scheduler.has_requests():
                self.step()
            elif self._in_flight:
                self._take_output(*self._in_flight.popleft())
            else:
                return count
        raise AssertionError(f"not idle after {max_steps} steps: {self.half.books.manager!r}")

    def run_until(self, condition: Callable[[], bool], *, max_steps: int = 500) -> None:
        """Step until `condition` holds."""
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise AssertionError("the condition was not met")

    def generate(self, request_id: str, prompt: Sequence[int], **options: Any) -> Result:
        """Add a request and run until idle."""
        self.add(request_id, prompt, **options)
        self.run()
        return self.results[request_id]

    def answer(self, request_id: str, prompt: Sequence[int], **options: Any) -> Result:
        """Add a request and run until it is answered; transfers may still be pending."""
        self.add(request_id, prompt, **options)
        self.run_until(lambda: self.results[request_id].finish_reason is not None)
        return self.results[request_id]

    def run_transfers(self) -> int:
        """Run all pending manual transfers on every rank."""
        return sum(self.mover(rank).run() for rank in range(self.model.ranks))

    def forget_device(self) -> None:
        """Reset vLLM's own prefix cache, so that only the tiers can hit."""
        assert self.scheduler.reset_prefix_cache(), "blocks are still in use"

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """What every worker does, and what the executor makes of their answers."""
        wire = pickle.loads(pickle.dumps(output))
        sampled: dict[str, list[int]] = {}
        # With drafts, vLLM finishes the connector's step behind them.
        is_deferred = bool(self._spec_tokens and wire.total_num_scheduled_tokens)
        with contextlib.ExitStack() as stack:
            for worker in self.workers:
                worker.handle_preemptions(wire.kv_connector_metadata)
            kv_outputs = [
                stack.enter_context(connector_step(worker, wire, is_deferred=is_deferred))
                for worker in self.workers
            ]
            self.runner.update(wire)
            if wire.total_num_scheduled_tokens:
                sampled = self.runner.forward(wire)
                for worker in self.workers:
                    for name in LAYER_NAMES:
                        worker.wait_for_layer_load(name)
                        worker.save_kv_layer(name, torch.empty(0), None)
        if is_deferred:
            for worker in self.workers:
                finish_connector_step(worker)
        answers = [runner_answer(sampled, kv_output) for kv_output in kv_outputs]
        merged = self.aggregator.aggregate(pickle.loads(pickle.dumps(answers)))
        assert merged is not None
        return merged

    def _take_output(self, output: SchedulerOutput, answer: ModelRunnerOutput) -> None:
        self.during_step(output)
        if answer.kv_connector_output is not None and answer.kv_connector_output.invalid_block_ids:
            self.load_errors.append(answer.kv_connector_output.invalid_block_ids)
        for outputs in self.scheduler.update_from_output(output, answer).values():
            if outputs.scheduler_stats is not None:
                self.stats.append(outputs.scheduler_stats)
            for item in outputs.outputs:
                result = self.results[item.request_id]
                result.tokens += item.new_token_ids
                result.prefill = item.prefill_stats or result.prefill
                result.params = item.kv_transfer_params or result.params
                if item.finish_reason is not None:
                    result.finish_reason = str(item.finish_reason)
        if self._spec_tokens:
            self._draft()
        if not self._in_flight:
            self.runner.trash(
                [
                    block.block_id
                    for block in self.pool.blocks
                    if not block.ref_cnt and not block.is_null and block.block_hash is None
                ]
            )

    def _draft(self) -> None:
        running = {
            request.request_id: list(request.all_token_ids) for request in self.scheduler.running
        }
        drafts = propose(self.model, running, self._spec_tokens)
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def close(self) -> None:
        """End the threads."""
        for worker in self.workers:
            worker.shutdown()
        self.connector.shutdown()
