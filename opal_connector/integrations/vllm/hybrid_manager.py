"""Whether vLLM's hybrid memory manager is at work for a model that needs it: its end is silent."""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from opal_connector.integrations.vllm.groups import layer_specs

_COST = (
    "their layers keep every block as if they looked back on everything: the device holds fewer "
    "tokens, and Opal stores and loads more than such layers need"
)
_LOCAL_LAYERS = ("sliding_attention", "chunked_attention")  # in a model's own `layer_types`


def hybrid_manager_warning(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """In one sentence that vLLM manages windows as full attention, and what that costs; or None."""
    found = _promoted_layers(kv_cache_config) or _forgotten_layers(vllm_config, kv_cache_config)
    if not found:
        return None
    return f"vLLM's hybrid memory manager is off, and this model has {found}: {_COST}"


def _promoted_layers(kv_cache_config: KVCacheConfig) -> str:
    """Windows that vLLM has noted on a spec of full attention."""
    windows: set[int] = set()
    chunks: set[int] = set()
    for group in kv_cache_config.kv_cache_groups:
        for spec in layer_specs(group).values():
            if isinstance(spec, FullAttentionSpec):
                windows.update([spec.sliding_window] if spec.sliding_window else [])
                chunks.update([spec.attention_chunk_size] if spec.attention_chunk_size else [])
    found = [f"sliding windows of {window} tokens" for window in sorted(windows)]
    found += [f"chunked attention of {chunk} tokens" for chunk in sorted(chunks)]
    return " and ".join(found)


def _forgotten_layers(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Windows that only the model's configuration speaks of, where the manager was switched off."""
    scheduler: Any = getattr(vllm_config, "scheduler_config", None)
    if not getattr(scheduler, "disable_hybrid_kv_cache_manager", False):
        return ""
    if len(kv_cache_config.kv_cache_groups) != 1:
        return ""
    is_full = all(
        isinstance(spec, FullAttentionSpec)
        for spec in layer_specs(kv_cache_config.kv_cache_groups[0]).values()
    )
    text_config: Any = getattr(vllm_config.model_config, "hf_text_config", None)
    layer_types = getattr(text_config, "layer_types", None) or ()
    kinds = [kind for kind in _LOCAL_LAYERS if kind in layer_types]
    return f"layers of {' and '.join(kinds)}" if is_full and kinds else ""
