"""What `engine_without_model` needs of vLLM: a configuration, and the workers' order of hooks."""

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import ExternalBlockHash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker import kv_connector_model_runner_mixin as runner_mixin

from opal_connector.cli.models import ensure_tiny_llama
from opal_connector.integrations.vllm.connector import OpalConnector
from opal_connector.integrations.vllm.kv_events import external_hash

Mixin = runner_mixin.KVConnectorModelRunnerMixin


class Result:
    """What the client of one request has received."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.params: dict[str, Any] = {}
        self.prefill: PrefillStats | None = None

    @property
    def hit_tokens(self) -> int:
        """Tokens that came from Opal's tiers."""
        return sum(self.params["opal"]["hit_tokens"].values())

    @property
    def stored_tokens(self) -> int:
        """Tokens that were on their way to a tier when the request ended."""
        return int(self.params["opal"]["stored_tokens"])


class Lookup(NamedTuple):
    """One question of vLLM to the connector, and the answer."""

    request_id: str
    computed_tokens: int
    matched_tokens: int | None
    is_async: bool


class Clock:
    """The time that a connector's scheduler half sees: it stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def prompt(seed: int, length: int) -> list[int]:
    """Tokens that no prompt of another seed begins with."""
    return [(seed * 7919 + position * 31) % 30000 + 1 for position in range(length)]


def announced(digests: Iterable[bytes]) -> set[ExternalBlockHash]:
    """Blocks by the names that vLLM's event stream has for them."""
    return {external_hash(digest) for digest in digests}


def replay(events: list[KVCacheEvent], medium: str = "CPU") -> set[ExternalBlockHash]:
    """The block hashes that a tier holds after these events, each announced exactly once."""
    held: set[ExternalBlockHash] = set()
    for event in events:
        if not isinstance(event, BlockStored | BlockRemoved) or event.medium != medium:
            continue
        hashes = set(event.block_hashes)
        assert len(hashes) == len(event.block_hashes)
        if isinstance(event, BlockStored):
            assert not hashes & held, "a block was announced twice"
            held |= hashes
        else:
            assert hashes <= held, "a block was withdrawn that was never announced"
            held -= hashes
    return held


@functools.cache
def _model_config() -> ModelConfig:
    return ModelConfig(
        model=str(ensure_tiny_llama()),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=2048,
    )


def vllm_config(
    *,
    block_tokens: int,
    num_blocks: int,
    batch_tokens: int,
    max_requests: int,
    prefix_caching: bool,
    spec_tokens: int,
    async_steps: bool,
) -> VllmConfig:
    """A checked configuration for a tiny model, still without a connector."""
    speculative = None
    if spec_tokens:
        speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=spec_tokens)
    config = VllmConfig(
        model_config=_model_config(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_requests,
            max_num_batched_tokens=batch_tokens,
            max_model_len=2048,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=True,
        ),
        cache_config=CacheConfig(block_size=block_tokens, enable_prefix_caching=prefix_caching),
        device_config=DeviceConfig("cpu"),
        speculative_config=speculative,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    config.cache_config.num_gpu_blocks = num_blocks
    # The CPU platform turns it off; a GPU has it on by default.
    config.scheduler_config.async_scheduling = async_steps
    return config


@contextlib.contextmanager
def connector_step(
    worker: OpalConnector, output: SchedulerOutput, *, is_deferred: bool
) -> Iterator[KVConnectorOutput]:
    """VLLM's own context around a forward pass, under this worker."""
    context = Mixin._get_kv_connector_output(output, defer_finalize=is_deferred)
    with _as_process_connector(worker):
        entered = context.__enter__()
    yield entered
    with _as_process_connector(worker):
        context.__exit__(None, None, None)


def finish_connector_step(worker: OpalConnector) -> None:
    """What vLLM does behind the draft model's forward pass."""
    with _as_process_connector(worker):
        Mixin.finalize_kv_connector()


@contextlib.contextmanager
def _as_process_connector(worker: OpalConnector) -> Iterator[None]:
    """Make `worker` the process's connector, as it is where it has a process of its own."""
    with (
        mock.patch.object(runner_mixin, "get_kv_transfer_group", return_value=worker),
        mock.patch.object(runner_mixin, "has_kv_transfer_group", return_value=True),
        mock.patch.object(runner_mixin, "get_forward_context", return_value=None),
    ):
        yield


def runner_answer(sampled: dict[str, list[int]], kv_output: KVConnectorOutput) -> ModelRunnerOutput:
    """A worker's answer to one step."""
    if not sampled:
        return ModelRunnerOutput.with_kv_conn_output_only(kv_output)
    return ModelRunnerOutput(
        req_ids=list(sampled),
        req_id_to_index={request_id: index for index, request_id in enumerate(sampled)},
        sampled_token_ids=list(sampled.values()),
        kv_connector_output=kv_output,
    )
