"""What vLLM's configuration says about an engine, in Opal's terms."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from vllm.config import VllmConfig

from opal_connector.config import OpalConfig
from opal_connector.integrations.vllm.groups import ServedGroups
from opal_connector.integrations.vllm.layout import LayerCache
from opal_connector.integrations.vllm.messages import WorkerFacts
from opal_connector.keys import (
    AttentionKind,
    AttentionLayout,
    OpalEngineMetadata,
    weights_fingerprint,
)


def attention_names(vllm_config: VllmConfig, served: ServedGroups) -> tuple[str, str]:
    """The backends of the served layers, and the CPU instruction set that shapes their blocks.

    Several are joined by "+". One layer stands for its kv group, and of a group of states, which
    are not laid out by instruction set, only the backend is named.
    """
    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    on_cpu = vllm_config.device_config.device_type == "cpu"
    backends: dict[str, None] = {}
    sets: dict[str, None] = {}
    for group in served.layout.groups:
        for kv_group in group.kv_groups:
            layer = layers.get(next(iter(served.page_bytes[kv_group]), ""))
            backends[_backend_name(layer)] = None
            if on_cpu and group.kind != AttentionKind.MAMBA:
                tokens = vllm_config.cache_config.block_size if served.is_plain else None
                sets[_cpu_isa(vllm_config, layer, tokens or group.block_tokens)] = None
    return "+".join(backends), "+".join(sets) or "none"


def _backend_name(layer: Any) -> str:
    backend = getattr(layer, "attn_backend", None)
    if backend is None and hasattr(layer, "get_attn_backend"):
        backend = layer.get_attn_backend()
    return str(backend.get_name()) if backend is not None else "unknown"


def _cpu_isa(vllm_config: VllmConfig, layer: Any, block_tokens: int) -> str:
    # The kernel packs keys differently per instruction set: bytes of one mean nothing to another.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa: str = _get_attn_isa(
        vllm_config.model_config.dtype,
        block_tokens,
        getattr(layer, "head_size", None),
        vllm_config.cache_config.cache_dtype,
    )
    return isa


def engine_metadata(
    vllm_config: VllmConfig,
    layout: AttentionLayout,
    workers: list[WorkerFacts],
    config: OpalConfig,
    chunk_tokens: int,
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
        block_tokens=layout.hash_block_tokens,
        chunk_tokens=chunk_tokens,
        group_page_bytes=tuple(worker.row_bytes for worker in workers),
        quantization=str(model.quantization or "none"),
        attention_backend=workers[0].attention_backend,
        cpu_isa=workers[0].cpu_isa,
        kv_layout=workers[0].kv_layout,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        context_parallel_size=parallel.decode_context_parallel_size,
        page_formats=tuple(worker.page_format for worker in workers if worker.page_format),
        storage_ranks=()
        if all(worker.is_holder for worker in workers)
        else tuple(worker.storage_rank for worker in workers),
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


def device_of(kv_caches: Mapping[str, LayerCache]) -> torch.device:
    """The device of the KV tensors."""
    cache = next(iter(kv_caches.values()))
    return cache.device if isinstance(cache, torch.Tensor) else cache[0].device
