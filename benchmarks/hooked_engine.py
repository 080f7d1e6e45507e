"""The connector in its scheduler role over real vLLM requests, with a loop for vLLM's scheduler."""

import random
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    SchedulerOutput,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from opal_connector.integrations.vllm.connector import OpalConnector
from opal_connector.integrations.vllm.messages import (
    OpalHandshake,
    OpalStepJobs,
    OpalStepResults,
    WorkerFacts,
)
from opal_connector.keys import HASH_BYTES
from opal_connector.managers import OpalKVCacheManager, OpalRequest, one_table
from opal_connector.transfers import JobResult

BLOCK_TOKENS = 32
ROW_BYTES = 1_474_560  # SmolLM2 in float32
PROMPT_TOKENS = 8192
RUNNING = 64
VOCABULARY = 49152
RESULT_STEPS = 2  # a store's result comes back that many steps later
OUTPUT_TOKENS = 4096
TURNOVER_STEPS = 8  # 64 requests of 512 tokens each: one ends every eighth step
COMMON = random.Random(2).randbytes(64 * HASH_BYTES)
# shape of the books: chunks per chain, blocks that all chains share, times each is used again
BOOKS = {
    "distinct": (32, 0, 0),
    "deep": (512, 0, 0),
    "shared_prompt": (32, 4, 0),
    "reused": (32, 0, 1),
}


@dataclass
class Live:
    """A running request: vLLM's object and its block table."""

    request: Request
    block_ids: list[int]


class Engine:
    """A connector in its scheduler role with as much of vLLM around it as its hooks touch."""

    def __init__(self, *, chunk_tokens: int, chunk_count: int) -> None:
        self.random = random.Random(1)
        self.chunk_blocks = chunk_tokens // BLOCK_TOKENS
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=3, head_size=64, dtype=torch.float32
        )
        names = [f"layers.{index}" for index in range(30)]
        request_blocks = (PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_TOKENS + 1
        block_count = (RUNNING + 2) * request_blocks
        own_chunks = (RUNNING + 2) * (PROMPT_TOKENS // chunk_tokens + 2)
        kv_config = KVCacheConfig(block_count, [], [KVCacheGroupSpec(names, spec)])
        self.connector = OpalConnector(
            _vllm_config(chunk_tokens), KVConnectorRole.SCHEDULER, kv_config
        )
        self.pool = BlockPool(block_count, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.connector.bind_gpu_block_pool(self.pool)
        facts = WorkerFacts(
            rank=0,
            block_count=block_count,
            row_bytes=ROW_BYTES,
            tier_bytes={"CPUMemory": (chunk_count + own_chunks) * self.chunk_blocks * ROW_BYTES},
            kv_layout="LBHNC",
            attention_backend="CPU_ATTN",
            cpu_isa="amx",
        )
        self.connector.set_xfer_handshake_metadata({0: OpalHandshake(facts)})
        half = self.connector.scheduler_half
        assert half is not None
        assert half.books is not None
        self.manager: OpalKVCacheManager = half.books.manager
        self.tier = self.manager.storage.tiers[0]
        self.step_number = 0
        self.request_number = 0
        self.running: dict[str, Live] = {}
        self.results: dict[int, list[JobResult]] = {}
        self.hook_seconds: dict[str, float] = {}
        self._step_seconds = self._step_wall_seconds = 0.0

    # ---- the books ----

    def fill(self, chunk_count: int, shape: str) -> None:
        """Store chains of chunks, each by a request that then ends."""
        chain_chunks, common_blocks, uses = BOOKS[shape]
        stored_chains: list[OpalRequest] = []
        for stored in range(0, chunk_count, chain_chunks):
            count = min(chain_chunks, chunk_count - stored)
            chain = self.store_chain(count * self.chunk_blocks, common_blocks)
            if uses:
                stored_chains.append(chain)
        for _ in range(uses):
            for chain in stored_chains:
                self.manager.end_request(chain)
        assert len(self.tier) == chunk_count

    def store_request(self, request: Request) -> None:
        """Put a whole prompt into the books."""
        opal = self.manager.new_request("stored")
        opal.extend(request.all_token_ids)
        self._store(opal, len(opal.chain.hashes))

    def first_eviction(self) -> float:
        """Fill what room is left; the seconds of the first store that has to evict."""
        while True:
            free_bytes = self.tier.capacity_bytes - self.tier.used_bytes
            has_room = free_bytes >= self.chunk_blocks * ROW_BYTES
            began = time.thread_time()
            self.store_chain(self.chunk_blocks, 0)
            if not has_room:
                return time.thread_time() - began

    def store_chain(self, block_count: int, common_blocks: int) -> OpalRequest:
        """Store one chain that nobody had before, but for its common beginning."""
        request = self.manager.new_request("stored")
        common_blocks = min(common_blocks, self.chunk_blocks - 1)
        digests = COMMON[: common_blocks * HASH_BYTES]
        digests += self.random.randbytes((block_count - common_blocks) * HASH_BYTES)
        request.chain.hashes.extend(
            digests[start : start + HASH_BYTES] for start in range(0, len(digests), HASH_BYTES)
        )
        self._store(request, block_count)
        return request

    def _store(self, request: OpalRequest, block_count: int) -> None:
        job = self.manager.plan_store(
            request,
            full_blocks=block_count,
            tables=one_table(range(block_count)),
            include_tail=True,
        )
        assert job is not None
        self.manager.commit(JobResult(job.job_id, 0))
        self.manager.end_request(request)

    # ---- the scheduler's part ----

    def admit(self, *, phase: int) -> None:
        """Start a request that has `phase` tokens generated; its prompt counts as computed."""
        live = Live(self.new_request(), [])
        request = live.request
        request.append_output_token_ids([self.random.randrange(VOCABULARY) for _ in range(phase)])
        self.running[request.request_id] = live
        self._grow(live, request.num_tokens)
        self._timed("on_new_request", self.connector.on_new_request, request)
        self._timed(
            "get_num_new_matched_tokens", self.connector.get_num_new_matched_tokens, request, 0
        )
        blocks = SimpleNamespace(get_block_ids=lambda: (live.block_ids,))
        self._timed(
            "update_state_after_alloc", self.connector.update_state_after_alloc, request, blocks, 0
        )
        request.num_computed_tokens = request.num_tokens - 1

    def new_request(self) -> Request:
        """A request with a prompt that nobody had before."""
        self.request_number += 1
        prompt = [self.random.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        params = SamplingParams(max_tokens=OUTPUT_TOKENS)
        return Request(f"request-{self.request_number}", prompt, params, None)

    def step(self, waiting: Request | None = None) -> None:
        """One decode step: a lookup that leads to nothing, the plan, the results, the rest."""
        self.step_number += 1
        connector = self.connector
        if waiting is not None:
            answer = self._timed(
                "get_num_new_matched_tokens", connector.get_num_new_matched_tokens, waiting, 0
            )
            assert answer[0], "the waiting request hits"
        output = self._output()
        meta = self._timed("build_connector_meta", connector.build_connector_meta, output)
        assert isinstance(meta, OpalStepJobs)
        for job in meta.jobs.stores:
            result = JobResult(job.job_id, 0, {}, {0: (ROW_BYTES, 0.001)})
            self.results.setdefault(self.step_number + RESULT_STEPS, []).append(result)
        # Forward pass here; then what update_from_output() calls.
        for live in self.running.values():
            live.request.num_computed_tokens += 1
            live.request.append_output_token_ids(self.random.randrange(VOCABULARY))
        taken = self.results.pop(self.step_number, None)
        if taken is not None:
            answer = KVConnectorOutput(kv_connector_worker_meta=OpalStepResults(taken))
            self._timed("update_connector_output", connector.update_connector_output, answer)
        self._timed("take_events", connector.take_events)
        self._timed("get_kv_connector_stats", connector.get_kv_connector_stats)
        self._timed("has_pending_push_work", connector.has_pending_push_work)

    def finish_one(self) -> None:
        """End the oldest request and start another in its place."""
        request_id = next(iter(self.running))
        live = self.running.pop(request_id)
        self._timed(
            "request_finished", self.connector.request_finished, live.request, live.block_ids
        )
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(live.block_ids)])
        self.admit(phase=0)

    def end_step(self) -> tuple[float, float]:
        """The processor and wall seconds that the hooks took since the last call."""
        seconds = self._step_seconds, self._step_wall_seconds
        self._step_seconds = self._step_wall_seconds = 0.0
        return seconds

    def _grow(self, live: Live, tokens: int) -> None:
        missing = -(-tokens // BLOCK_TOKENS) - len(live.block_ids)
        if missing > 0:
            live.block_ids += [block.block_id for block in self.pool.get_new_blocks(missing)]

    def _output(self) -> SchedulerOutput:
        running = self.running
        for live in running.values():
            self._grow(live, live.request.num_computed_tokens + 1)
        cached = CachedRequestData(
            req_ids=list(running),
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(running),
            num_computed_tokens=[live.request.num_computed_tokens for live in running.values()],
            num_output_tokens=[live.request.num_output_tokens for live in running.values()],
        )
        # As KVCacheManager.get_block_ids does: a fresh list of the whole table on every access.
        state = KVConnectorBlockState(
            req_ids=set(running),
            resolve_block_ids=lambda request_id: (list(running[request_id].block_ids),),
            boundary_state_offloads={},
        )
        return SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict.fromkeys(running, 1),
            total_num_scheduled_tokens=len(running),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
            kv_connector_block_state=state,
        )

    def _timed(self, name: str, hook: Any, *arguments: Any) -> Any:
        began_wall = time.perf_counter()
        began = time.thread_time()
        answer = hook(*arguments)
        took = time.thread_time() - began
        self._step_wall_seconds += time.perf_counter() - began_wall
        self._step_seconds += took
        self.hook_seconds[name] = self.hook_seconds.get(name, 0.0) + took
        return answer


def _vllm_config(chunk_tokens: int) -> Any:
    """As much of vLLM's configuration as the connector reads."""
    transfer = KVTransferConfig(
        kv_connector="OpalConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"chunk_size": chunk_tokens, "weights_id": "benchmark"},
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        kv_events_config=None,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            model="benchmark", revision=None, dtype=torch.float32, quantization=None
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
