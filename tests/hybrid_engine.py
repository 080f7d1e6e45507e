"""vLLM's own KV cache manager of hybrid models, driven at random, without a model."""

import random

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from opal_connector.keys import RequestIdentity, TokenChain
from opal_connector.keys.attention import AttentionGroup, AttentionLayout

UNIT = 16
FIELDS = {"num_kv_heads": 1, "head_size": 4, "dtype": torch.float32}


def full(size: int = UNIT) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=size, **FIELDS)


def window(span: int, size: int = UNIT) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=size, sliding_window=span, **FIELDS)


def chunked(span: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size=UNIT, attention_chunk_size=span, **FIELDS)


def state(size: int = UNIT) -> MambaSpec:
    return MambaSpec(
        block_size=size, shapes=((3, 5),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )


# kv groups, and the attention groups that they are: kind, kv groups, span.
Model = tuple[list[KVCacheSpec], list[tuple[str, tuple[int, ...], int]]]
MODELS: dict[str, Model] = {
    "dense": ([full()], [("full_attention", (0,), 0)]),
    "gemma": (
        [window(40), window(40), full()],
        [("full_attention", (2,), 0), ("sliding_window", (0, 1), 40)],
    ),
    "windows": (
        [window(40), window(90)],
        [("sliding_window", (0,), 40), ("sliding_window", (1,), 90)],
    ),
    "one window": ([window(40)], [("sliding_window", (0,), 40)]),
    "chunks": (
        [chunked(64), full()],
        [("full_attention", (1,), 0), ("chunked_local_attention", (0,), 64)],
    ),
    "sizes": (
        [window(70, 2 * UNIT), full()],
        [("full_attention", (1,), 0), ("sliding_window", (0,), 70)],
    ),
    "large chain": (
        [full(4 * UNIT), window(40)],
        [("full_attention", (0,), 0), ("sliding_window", (1,), 40)],
    ),
    "states": (
        [state(), state(), full()],
        [("full_attention", (2,), 0), ("mamba", (0, 1), 0)],
    ),
    "large states": (
        [full(2 * UNIT), state(4 * UNIT)],
        [("full_attention", (0,), 0), ("mamba", (1,), 0)],
    ),
    "scratch": ([full(), full(2 * UNIT)], [("full_attention", (0,), 0)]),
}


class HybridEngine:
    """A device of a few blocks, and prompts that begin alike."""

    def __init__(self, name: str, rng: random.Random, *, publishes: bool = False) -> None:
        specs, groups = MODELS[name]
        self.rng = rng
        self.layout = AttentionLayout(
            tuple(
                AttentionGroup(
                    kind=kind,
                    block_tokens=specs[kv_groups[0]].block_size,
                    kv_groups=kv_groups,
                    span_tokens=span,
                )
                for kind, kv_groups, span in groups
            )
        )
        config = KVCacheConfig(
            num_blocks=rng.choice([60, 200]),
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs)
            ],
        )
        self.step_tokens = max(spec.block_size for spec in specs)
        self.manager = KVCacheManager(
            config,
            max_model_len=4096,
            scheduler_block_size=self.step_tokens,
            hash_block_size=UNIT,
            enable_kv_cache_events=publishes,
        )
        self.pool = self.manager.block_pool
        self.names: dict[bytes, bytes] = {}  # vLLM's hash to ours
        self.ends: dict[bytes, int] = {}
        self.running: list[Request] = []
        shared = [rng.randrange(50) for _ in range(12 * UNIT)]
        self.prompts = [
            shared[: rng.randint(1, len(shared))] + [place] * rng.randint(1, 6 * UNIT)
            for place in range(3)
        ]

    def begin(self) -> None:
        init_none_hash(sha256)
        tokens = self.rng.choice(self.prompts)
        request = Request(
            f"{self.rng.random()}",
            tokens,
            SamplingParams(max_tokens=1),
            None,
            block_hasher=get_request_block_hasher(UNIT, sha256),
        )
        chain = TokenChain(RequestIdentity(), self.layout.hash_block_tokens)
        chain.extend(tokens)
        step = self.layout.hash_block_tokens // UNIT
        for place, name in enumerate(chain.hashes):
            self.names[bytes(request.block_hashes[(place + 1) * step - 1])] = name
        for place, engine_hash in enumerate(request.block_hashes):
            self.ends[bytes(engine_hash)] = (place + 1) * UNIT
        computed, count, _ = self.manager.get_computed_blocks(request)
        new = min(len(tokens) - count, self.rng.choice([1, 2, 100]) * self.step_tokens)
        if self.manager.allocate_slots(request, new, count, computed) is None:
            return
        request.num_computed_tokens = count + new
        self.running.append(request)

    def go_on(self) -> None:
        if not self.running:
            return
        request = self.rng.choice(self.running)
        left = request.num_tokens - request.num_computed_tokens
        new = min(left, self.rng.choice([1, 3]) * self.step_tokens)
        if new and self.manager.allocate_slots(request, new) is not None:
            request.num_computed_tokens += new
        else:
            self.running.remove(request)
            self.manager.free(request)

    def clear(self) -> None:
        """Everything ends, and vLLM empties its cache."""
        for request in self.running:
            self.manager.free(request)
        self.running.clear()
        assert self.manager.reset_prefix_cache()

    def live(self) -> None:
        """One thing that an engine does."""
        what = self.rng.random()
        if what < 0.4:
            self.begin()
        elif what < 0.97:
            self.go_on()
        else:
            self.clear()

    def held(self, kv_group: int) -> set[bytes]:
        """The whole blocks that vLLM has cached of a kv group, by Opal's names."""
        size = self.manager.kv_cache_config.kv_cache_groups[kv_group].kv_cache_spec.block_size
        blocks = {
            bytes(get_block_hash(key))
            for key in self.pool.cached_block_hash_to_block._cache
            if get_group_id(key) == kv_group
        }
        return {self.names[block] for block in blocks if not self.ends[block] % size}
