"""What vLLM's configuration says about an engine, in Opal's terms."""

import logging
from pathlib import Path
from typing import Any

import msgspec
import torch
from huggingface_hub import try_to_load_from_cache
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from opal_connector.config import OpalConfig
from opal_connector.integrations.vllm.messages import WorkerFacts
from opal_connector.keys import OpalEngineMetadata, weights_fingerprint

logger = logging.getLogger(__name__)

# Exactly these: subclasses change what a block means (sinks, recurrent windows, hidden states).
_FULL_ATTENTION = (FullAttentionSpec, MLAAttentionSpec)


class GroupFacts(msgspec.Struct, frozen=True):
    """The one kv group that this version serves."""

    block_tokens: int
    page_bytes: dict[str, int]
    kind: str
    is_eagle: bool


def group_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> GroupFacts | str:
    """The facts of the model's kv group, or in one sentence why Opal cannot serve the model."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism spreads a block over ranks, which this version does not store"
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "the model has no KV cache"
    if len(groups) > 1:
        names = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        return f"the model has {len(groups)} KV cache groups ({names}), this version serves one"
    group = groups[0]
    page_bytes: dict[str, int] = {}
    for name in group.layer_names:
        spec = layer_spec(group.kv_cache_spec, name)
        if type(spec) not in _FULL_ATTENTION:
            return f"KV cache group 0 is of kind {type(spec).__name__}, which is not served yet"
        if getattr(spec, "non_causal", False):
            return f"attention of {name} is not causal: what follows a prefix changes its KV"
        page_bytes[name] = spec.page_size_bytes
    return GroupFacts(
        block_tokens=group.kv_cache_spec.block_size,
        page_bytes=page_bytes,
        kind="full_attention",
        is_eagle=bool(getattr(group, "is_eagle_group", False)),
    )


def layer_spec(spec: KVCacheSpec, name: str) -> KVCacheSpec:
    """The spec of one layer in a group."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs[name]
    return spec


def attention_names(vllm_config: VllmConfig, layer_name: str) -> tuple[str, str]:
    """The attention backend of a layer, and the CPU instruction set that shapes its blocks."""
    layer: Any = vllm_config.compilation_config.static_forward_context.get(layer_name)
    backend = getattr(layer, "attn_backend", None)
    name = backend.get_name() if backend is not None else "unknown"
    if vllm_config.device_config.device_type != "cpu":
        return name, "none"
    # The kernel packs keys differently per instruction set: bytes of one mean nothing to another.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(
        vllm_config.model_config.dtype,
        vllm_config.cache_config.block_size,
        getattr(layer, "head_size", None),
        vllm_config.cache_config.cache_dtype,
    )
    return name, isa


def engine_metadata(
    vllm_config: VllmConfig,
    group: GroupFacts,
    workers: list[WorkerFacts],
    config: OpalConfig,
    chunk_blocks: int,
) -> OpalEngineMetadata:
    """Everything that decides whether two engines may share what they stored.

    Reads the weights of a local model that was not read before.
    """
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    if config.weights_id is not None:
        weights_id = f"configured:{config.weights_id}"
    else:
        weights_id = weights_fingerprint(_local_directory(model.model, model.revision))
    return OpalEngineMetadata(
        weights_id=weights_id,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=_cache_dtype(vllm_config),
        block_tokens=group.block_tokens,
        chunk_tokens=chunk_blocks * group.block_tokens,
        group_page_bytes=tuple(worker.row_bytes for worker in workers),
        quantization=str(model.quantization or "none"),
        attention_backend=workers[0].attention_backend,
        cpu_isa=workers[0].cpu_isa,
        kv_layout=workers[0].kv_layout,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        context_parallel_size=parallel.decode_context_parallel_size,
    )


def _local_directory(model: str, revision: str | None) -> str:
    """The snapshot directory of a hub name that has been downloaded; otherwise `model@revision`."""
    if Path(model).exists():
        return model
    config_file = try_to_load_from_cache(model, "config.json", revision=revision)
    if isinstance(config_file, str):
        return str(Path(config_file).parent)
    return f"{model}@{revision or 'main'}"


def _cache_dtype(vllm_config: VllmConfig) -> str:
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype == "auto":
        return str(vllm_config.model_config.dtype).removeprefix("torch.")
    return str(cache_dtype)


def device_of(kv_caches: dict[str, torch.Tensor]) -> torch.device:
    """The device of the KV tensors."""
    return next(iter(kv_caches.values())).device
