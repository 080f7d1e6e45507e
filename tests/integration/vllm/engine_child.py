"""One engine in a process of its own: what a test may ask it, answered in plain data.

vLLM keeps the worker's connector once per process, so every configuration needs a process. With
`VLLM_ENABLE_V1_MULTIPROCESSING=0` scheduler and worker live in it too, where a test can look into
the books, break bytes in the pool and step the engine by hand.
"""

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_SETTLE_SECONDS = 60.0

Sample = tuple[str, dict[str, str], float]


def run(calls: Connection, log_path: str, settings: dict[str, Any]) -> None:
    """Serve calls until the other end says stop or goes away."""
    with Path(log_path).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        engine = EngineCalls(settings)
    except BaseException:
        calls.send((False, traceback.format_exc()))
        raise
    calls.send((True, None))
    with contextlib.suppress(EOFError):
        while (call := calls.recv()) is not None:
            name, arguments = call
            try:
                answer = (True, getattr(engine, name)(**arguments))
            except Exception:  # noqa: BLE001 - the other end raises it again
                answer = (False, traceback.format_exc())
            calls.send(answer)
    engine.shutdown()
    calls.send((True, None))
    os._exit(0)


class EngineCalls:
    """The calls. Every argument and every answer is plain data that can cross a pipe."""

    def __init__(self, settings: dict[str, Any]) -> None:
        if settings.get("tensor_parallel_size", 1) > 1:  # a core for each of the two ranks
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        from vllm import LLM

        self._llm = LLM(**settings)
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._events: list[Any] = []
        self._gates: dict[str, threading.Event] = {}
        self._undo: list[Any] = []
        self._finished: dict[str, dict[str, Any]] = {}
        if self._scheduler.kv_event_publisher is not None:
            self._record_events()

    # ---- serving ----

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text."""
        tokens: list[int] = self._llm.get_tokenizer().encode(text)
        return tokens

    def chat_tokens(self, messages: list[dict[str, str]]) -> list[int]:
        """The prompt that a chat becomes."""
        tokenizer = self._llm.get_tokenizer()
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def text_of(self, token_ids: list[int]) -> str:
        """The text of an answer, without control tokens."""
        text: str = self._llm.get_tokenizer().decode(token_ids, skip_special_tokens=True)
        return text

    def generate(self, requests: list[dict[str, Any]], settle: bool = True) -> list[dict[str, Any]]:
        """Serve requests at once. Each has `tokens` and may have `salt` and `sampling`."""
        prompts = [_prompt(request) for request in requests]
        sampling = [_sampling(request) for request in requests]
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        if settle:
            self.settle()
        return [_answer(output) for output in outputs]

    def start(self, request_id: str, request: dict[str, Any]) -> None:
        """Add a request and come back at once; `step` and `finished` follow."""
        self._engine.add_request(request_id, _prompt(request), _sampling(request))

    def step(self, count: int = 1) -> None:
        """Run the engine for some steps."""
        for _ in range(count):
            for output in self._engine.step():
                if output.finished:
                    self._finished[output.request_id] = _answer(output)

    def step_until(self, status: str, request_id: str) -> None:
        """Run the engine until a request has that status."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while self.status_of(request_id) != status:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{request_id} is {self.status_of(request_id)}, not {status}")
            self.step()

    def status_of(self, request_id: str) -> str:
        """The scheduler's name for where a request is; `GONE` once it has let go of it."""
        for name, request in self._scheduler.requests.items():
            if name.startswith(request_id):
                return str(request.status.name)
        return "GONE"

    def output_count(self, request_id: str) -> int:
        """Tokens generated so far."""
        for name, request in self._scheduler.requests.items():
            if name.startswith(request_id):
                return int(request.num_output_tokens)
        return -1

    def finished(self, request_id: str) -> dict[str, Any]:
        """The answer of a request that `start` began."""
        return self._finished[request_id]

    def abort(self, request_ids: list[str]) -> None:
        """Abort requests that `start` began."""
        self._engine.abort_request(request_ids)

    def settle(self) -> None:
        """Run the engine until nobody wants another step: no request, no job, no event."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while self._engine.has_unfinished_requests() or self._scheduler.has_requests():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine does not come to rest: {self.books()}")
            self.step()

    def channel(self) -> dict[str, Any]:
        """Where the event channel is, vLLM's hashes on the device, and the tiers' runs."""
        from vllm.v1.core.kv_cache_utils import get_block_hash

        publisher = self._half.events.channel.publisher
        cached = self._scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
        return {
            "endpoint": str(publisher.endpoint.port),
            "publish_endpoint": str(publisher.publish_endpoint.port),
            "device": [bytes(get_block_hash(key)) for key in cached],
            "tiers": {
                tier.tier: [
                    record.run for record in tier.index.records.values() if record.is_readable
                ]
                for tier in self._half.books.manager.storage.tiers
            },
        }

    def reset_device(self) -> None:
        """Empty the device's prefix cache, so that what hits now comes from a tier."""
        self.settle()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("blocks are still held although nothing is in motion")

    def reset_tiers(self) -> bool:
        """Empty device and tiers at once, as `/reset_prefix_cache?reset_external=true` does."""
        return bool(self._llm.reset_prefix_cache(reset_connector=True))

    def shutdown(self) -> None:
        """Shut down as a program that ends would."""
        for gate in self._gates.values():
            gate.set()
        self._engine.engine_core.shutdown()

    # ---- looking ----

    def metrics(self) -> list[Sample]:
        """Every sample of vLLM's Prometheus registry that this process feeds."""
        from prometheus_client import REGISTRY

        return [
            (sample.name, dict(sample.labels), float(sample.value))
            for metric in REGISTRY.collect()
            if metric.name.startswith("vllm:")
            for sample in metric.samples
        ]

    def books(self) -> dict[str, Any]:
        """Audit the books and say what they hold. Also what the scheduler half still remembers."""
        from opal_connector.integrations.vllm.guard import hook_faults

        half = self._half
        manager = half.books.manager
        manager.check()
        tier = manager.storage.tiers[0]
        return {
            "jobs": manager.open_job_count,
            "leases": manager.lease_count,
            "trackers": len(half._trackers),
            "fetching": len(half._fetching),
            "held_blocks": len(half.holds),
            "requests": len(self._scheduler.requests),
            "device_blocks_in_use": self._device_blocks_in_use(),
            "objects": len(tier),
            "used_bytes": tier.used_bytes,
            "capacity_bytes": tier.capacity_bytes,
            "row_bytes": half.books.row_bytes,
            "chunk_blocks": manager.database.chunk_blocks,
            "hook_faults": dict(hook_faults),
        }

    def tier_blocks(self, place: int = 0) -> set[int | bytes]:
        """Every block that can be read from the tier at that place, as events name it."""
        from opal_connector.integrations.vllm.kv_events import external_hash

        tier = self._half.books.manager.storage.tiers[place]
        found: set[int | bytes] = set()
        for key in tier.index.readable_keys():
            run = tier.get(key).run
            found.update(external_hash(run[at : at + 32]) for at in range(0, len(run), 32))
        return found

    def replayed_blocks(self, tier: str = "CPUMemory") -> set[int | bytes]:
        """What a consumer of the engine's event stream believes a tier to hold.

        Raises an error on an event that no consumer could make sense of: a block that is stored
        twice, removed without having been stored, or that follows a parent that is not there.
        """
        from opal_connector.integrations.vllm.kv_events import tier_name

        held: dict[tuple[str | None, ...], set[int | bytes]] = {}
        for event in self._events:
            kind = type(event).__name__
            if getattr(event, "medium", None) not in {"CPU", "STORAGE"}:
                continue
            here = held.setdefault((event.medium, event.locality, event.ownership), set())
            hashes = set(event.block_hashes)
            assert len(hashes) == len(event.block_hashes), event
            if kind == "BlockStored":
                assert not hashes & here, f"stored twice: {event}"
                assert len(event.token_ids) == event.block_size * len(hashes), event
                parent = event.parent_block_hash
                # It may lie in another tier: lookups go over all of them.
                is_known = any(parent in tier_held for tier_held in held.values())
                assert parent is None or is_known, f"parent unknown: {event}"
                here |= hashes
            else:
                assert hashes <= here, f"removed without having been there: {event}"
                here -= hashes
        return held.get(tier_name(tier), set())

    def event_counts(self) -> dict[str, int]:
        """Events of the tier by kind."""
        counts: dict[str, int] = {}
        for event in self._events:
            if getattr(event, "medium", None) == "CPU":
                counts[type(event).__name__] = counts.get(type(event).__name__, 0) + 1
        return counts

    def kv_groups(self) -> list[str]:
        """The kinds of the KV cache groups that the engine runs with."""
        return [
            type(group.kv_cache_spec).__name__
            for group in self._scheduler.kv_cache_config.kv_cache_groups
        ]

    def has_prefix_caching(self) -> bool:
        """Whether vLLM has a prefix cache of its own."""
        return bool(self._scheduler.kv_cache_manager.enable_caching)

    # ---- breaking ----

    def damage_tier(self, tokens: list[int], blocks: list[int] | None = None) -> None:
        """Flip a byte in the pool's rows of these blocks of a prompt, or of all that are there."""
        manager = self._half.books.manager
        chain = manager.database.chain()
        chain.extend(tokens)
        places = {block_hash: place for place, block_hash in enumerate(chain.hashes)}
        wanted = set(places.values()) if blocks is None else set(blocks)
        backend = manager.storage.tiers[0]
        rows = self._tier_store.rows
        for key in backend.index.readable_keys():
            record = backend.get(key)
            for place, row in enumerate(record.rows):
                if places.get(record.run[place * 32 : place * 32 + 32]) in wanted:
                    rows[row, rows.shape[1] // 2] ^= 0xFF

    def damage_group(self, group: int) -> None:
        """Flip a byte in every row of every object of one attention group."""
        backend = self._half.books.manager.storage.tiers[0]
        rows = self._tier_store.rows
        damaged = 0
        for key in backend.index.readable_keys():
            record = backend.get(key)
            if record.group == group:
                damaged += 1
                rows[list(record.rows), 0] ^= 0xFF
        assert damaged, f"nothing is stored of group {group}"

    def fail(self, verb: str, times: int = 1 << 30) -> None:
        """Make the tier's `read` or `write` raise, so many times."""
        tier = self._tier_store
        original = getattr(tier, verb)
        left = [times]

        def failing(*arguments: Any) -> int:
            if left[0] <= 0:
                return int(original(*arguments))
            left[0] -= 1
            raise OSError("the test unplugged this tier")

        setattr(tier, verb, failing)
        self._undo.append(lambda: setattr(tier, verb, original))

    def hold_back(self, verb: str) -> None:
        """Make the tier's `read` or `write` wait until `let_go`."""
        tier = self._tier_store
        original = getattr(tier, verb)
        gate = self._gates[verb] = threading.Event()

        def waiting(*arguments: Any) -> int:
            gate.wait(_SETTLE_SECONDS)
            return int(original(*arguments))

        setattr(tier, verb, waiting)
        self._undo.append(lambda: setattr(tier, verb, original))

    def let_go(self) -> None:
        """End what `hold_back` began."""
        for gate in self._gates.values():
            gate.set()
        self._gates.clear()

    def mend(self) -> None:
        """Undo `fail` and `hold_back`."""
        self.let_go()
        while self._undo:
            self._undo.pop()()

    # ---- inside ----

    @property
    def _half(self) -> Any:
        return self._scheduler.connector.scheduler_half

    @property
    def _tier_store(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_half._mover._tiers[0]

    def _device_blocks_in_use(self) -> int:
        pool = self._scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def _record_events(self) -> None:
        publisher = self._scheduler.kv_event_publisher
        publish = publisher.publish

        def recording(batch: Any) -> None:
            self._events.extend(batch.events)
            publish(batch)

        publisher.publish = recording


def _prompt(request: dict[str, Any]) -> Any:
    prompt: dict[str, Any] = {"prompt_token_ids": request["tokens"]}
    if "salt" in request:
        prompt["cache_salt"] = request["salt"]
    return prompt


def _sampling(request: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    settings = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "logprobs": 0}
    return SamplingParams(**{**settings, **request.get("sampling", {})})


def _answer(output: Any) -> dict[str, Any]:
    first = output.outputs[0]
    chosen = zip(first.token_ids, first.logprobs or (), strict=False)
    return {
        "tokens": list(first.token_ids),
        "logprobs": [candidates[token].logprob for token, candidates in chosen],
        "all_tokens": [list(one.token_ids) for one in output.outputs],
        "finish_reason": first.finish_reason,
        "cached_tokens": output.num_cached_tokens or 0,
        "opal": (output.kv_transfer_params or {}).get("opal"),
        "has_prompt_logprobs": output.prompt_logprobs is not None,
    }


def heavy_modules() -> Iterator[str]:
    """What a child would spend most of its start on importing."""
    yield "vllm.entrypoints.llm"
    yield "vllm.v1.engine.core"
    yield "vllm.v1.worker.cpu_worker"
    yield "vllm.v1.executor.uniproc_executor"
    yield "vllm.model_executor.models.llama"
    yield "opal_connector.integrations.vllm.connector"
