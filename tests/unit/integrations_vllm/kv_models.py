"""KV caches of models of every kind, grouped and allocated by vLLM itself from hand-made specs."""

from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.utils import allocate_kv_cache

BLOCKS = 24
FIELDS: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 1,
    "head_size": 4,
    "dtype": torch.float32,
}
WINDOW, CHUNK = 64, 128
Specs = Mapping[str, KVCacheSpec]


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{**FIELDS, **changes})


def window(**changes: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**{**FIELDS, "sliding_window": WINDOW, **changes})


def chunked(**changes: Any) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(**{**FIELDS, "attention_chunk_size": CHUNK, **changes})


def mamba(**changes: Any) -> MambaSpec:
    """States of 100 bytes, padded to the page of `full()`."""
    values: dict[str, Any] = {
        "block_size": 32,
        "shapes": ((3, 5), (2, 10)),
        "dtypes": (torch.float32, torch.bfloat16),
        "mamba_cache_mode": "align",
        "page_size_padded": full().page_size_bytes,
        **changes,
    }
    return MambaSpec(**values)


def mla(**changes: Any) -> MLAAttentionSpec:
    values = {**FIELDS, "head_size": 20, "dtype": torch.bfloat16, **changes}
    return MLAAttentionSpec(**values)


def pattern(*kinds: KVCacheSpec, repeats: int) -> dict[str, KVCacheSpec]:
    """Layers of these kinds in turn."""
    return {
        f"layers.{turn * len(kinds) + place:02}": kind
        for turn in range(repeats)
        for place, kind in enumerate(kinds)
    }


MODELS: dict[str, dict[str, KVCacheSpec]] = {
    "dense": pattern(full(), repeats=3),
    "two_sizes": pattern(full(), full(head_size=8), repeats=2),
    "mla": pattern(mla(), repeats=2),
    "window_only": pattern(window(), repeats=3),
    "gemma3": pattern(*[window()] * 5, full(), repeats=2),
    "gpt_oss": pattern(window(), full(), repeats=2),
    "llama4": pattern(chunked(), chunked(), chunked(), full(), repeats=2),
    "mamba": pattern(mamba(), mamba(), full(), repeats=2),
    "differing_blocks": pattern(full(), window(num_kv_heads=2), window(num_kv_heads=2), repeats=1),
}


@cache
def _real_config() -> VllmConfig:
    return VllmConfig()


def grouped(
    specs: Specs, *, layout: str = "LBHNC", blocks: int = BLOCKS, hybrid_manager: bool = True
) -> KVCacheConfig:
    """The worker's kv groups and tensors, as vLLM makes them."""
    config = _real_config()
    config.cache_config.kv_cache_layout = layout
    config.cache_config.num_gpu_blocks_override = blocks
    config.scheduler_config.disable_hybrid_kv_cache_manager = not hybrid_manager
    groups = get_kv_cache_groups(config, dict(specs))
    return get_kv_cache_config_from_groups(config, groups, available_memory=1 << 30)


def by_hand(*specs: KVCacheSpec, **changes: Any) -> KVCacheConfig:
    """One kv group of two layers per spec; `changes` are of every group."""
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"g{number}.a", f"g{number}.b"], spec, **changes)
            for number, spec in enumerate(specs)
        ],
    )


def allocated(config: KVCacheConfig, layout: str = "LBHNC") -> dict[str, torch.Tensor]:
    """The tensors of `grouped`, with random bytes in all of their memory, padding too."""
    _real_config().cache_config.kv_cache_layout = layout
    resolved = _real_config().cache_config.get_resolved_kv_cache_layout()
    caches = allocate_kv_cache(config, torch.device("cpu"), resolved)
    spoil(caches, seed=0)
    return caches


def memory(caches: Mapping[str, torch.Tensor]) -> np.ndarray:
    """All bytes that the tensors lie in, to read and to write."""
    storage = next(iter(caches.values())).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def spoil(caches: Mapping[str, torch.Tensor], seed: int) -> None:
    """Other random bytes everywhere."""
    held = memory(caches)
    held[...] = np.random.default_rng(seed).integers(0, 256, held.size, dtype=np.uint8)


def vllm_config(**changes: Any) -> Any:
    """The parts of a VllmConfig that decide what is served."""
    values: dict[str, Any] = {
        "dcp": 1,
        "pcp": 1,
        "is_encoder_decoder": False,
        "enable_prefix_caching": True,
        "drops_draft_blocks": None,
        "hybrid_manager": True,
        "layer_types": None,
        "layers": {},
        "device": "cpu",
        **changes,
    }
    drops = values["drops_draft_blocks"]
    return SimpleNamespace(
        model_config=SimpleNamespace(
            is_encoder_decoder=values["is_encoder_decoder"],
            hf_text_config=SimpleNamespace(layer_types=values["layer_types"]),
            dtype=torch.float32,
            use_mla=False,
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=values["enable_prefix_caching"],
            block_size=32,
            cache_dtype="auto",
            kv_cache_layout="LBHNC",
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=values["dcp"],
            prefill_context_parallel_size=values["pcp"],
            rank=0,
            world_size=1,
            tensor_parallel_size=1,
        ),
        speculative_config=None
        if drops is None
        else SimpleNamespace(use_eagle_block_drop=lambda: drops),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=not values["hybrid_manager"]
        ),
        compilation_config=SimpleNamespace(static_forward_context=values["layers"]),
        device_config=SimpleNamespace(device_type=values["device"]),
    )
