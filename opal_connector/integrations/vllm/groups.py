"""What of a model's KV cache Opal serves: vLLM's kv groups as an `AttentionLayout`, or why not."""

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from math import lcm
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)

from opal_connector.keys import AttentionGroup, AttentionLayout


class ServedGroups(msgspec.Struct, frozen=True):
    """The kv groups that are cached, and what a block of each of their layers holds.

    Attributes:
        layout: The same in the scheduler and in every worker that has layers of all groups; a
            stage of a pipeline may see fewer draft groups. All agree on `is_plain`.
        page_bytes: vLLM's number of a kv group to layer name to the bytes of one block. The
            scheduler may know one layer's spec for all layers of a group; workers know each.
        page_format: A digest of what the bytes of these pages mean, empty for a dense model, of
            which other facts say it.
    """

    layout: AttentionLayout
    page_bytes: dict[int, dict[str, int]]
    page_format: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether what a load could not fill is said in blocks; else in whole requests."""
        return self.layout.is_plain


def _no_tokens(spec: Any) -> int:
    del spec
    return 0


def _no_fault(spec: Any, config: VllmConfig) -> str:
    del spec, config
    return ""


class ServedSpec(NamedTuple):
    """How a kind of spec becomes an `AttentionGroup`, and when it cannot."""

    spec_type: type[KVCacheSpec]  # exactly: a subclass changes what a block means
    span_tokens: Callable[[Any], int] = _no_tokens
    extra_tokens: Callable[[Any], int] = _no_tokens
    fault: Callable[[Any, VllmConfig], str] = _no_fault


def _causal(spec: Any, config: VllmConfig) -> str:
    del config
    if spec.non_causal:
        return "its attention is not causal: what follows a prefix changes its KV"
    return ""


def _aligned_states(spec: Any, config: VllmConfig) -> str:
    cache = config.cache_config
    if not cache.enable_prefix_caching:
        return "prefix caching is off, so that vLLM keeps no state of a prefix"
    if spec.mamba_cache_mode != "align":
        return (
            f'mamba_cache_mode is "{spec.mamba_cache_mode}", and only with "align" does vLLM keep '
            "the states at which blocks end"
        )
    return ""


# Another kind of spec is another entry here and in `keys.attention.RETENTIONS`.
SERVED_SPECS: dict[KVCacheSpecKind, ServedSpec] = {
    KVCacheSpecKind.FULL_ATTENTION: ServedSpec(FullAttentionSpec, fault=_causal),
    KVCacheSpecKind.MLA_ATTENTION: ServedSpec(MLAAttentionSpec, fault=_causal),
    KVCacheSpecKind.SLIDING_WINDOW: ServedSpec(
        SlidingWindowSpec, attrgetter("sliding_window"), attrgetter("extra_retained_tokens")
    ),
    KVCacheSpecKind.SLIDING_WINDOW_MLA: ServedSpec(
        SlidingWindowMLASpec, attrgetter("sliding_window"), attrgetter("extra_retained_tokens")
    ),
    KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION: ServedSpec(
        ChunkedLocalAttentionSpec, attrgetter("attention_chunk_size")
    ),
    KVCacheSpecKind.MAMBA: ServedSpec(MambaSpec, fault=_aligned_states),
}
_REFUSED_SPECS: dict[KVCacheSpecKind, str] = {
    KVCacheSpecKind.SINK_FULL_ATTENTION: "this vLLM cannot run sink attention",
    KVCacheSpecKind.CROSS_ATTENTION: "this vLLM runs no encoder-decoder model with a KV connector",
    KVCacheSpecKind.ENCODER_ONLY_ATTENTION: "an encoder has no KV that another request could use",
}


def served_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> ServedGroups | str:
    """What is served of this model, or in one sentence everything that speaks against it."""
    groups = kv_cache_config.kv_cache_groups
    numbers = kv_cache_config.prefix_cacheable_group_ids
    reasons = list(_model_faults(vllm_config))
    if not groups:
        reasons.append("the model has no KV cache")
    elif not numbers:
        reasons.append("no kv group of the model can be cached by its prefix")
    reasons += _group_faults(vllm_config, kv_cache_config)
    if reasons:
        return "; ".join(reasons)
    scratch = [
        group.kv_cache_spec.block_size
        for number, group in enumerate(groups)
        if number not in numbers
    ]
    layout = AttentionLayout(
        _attention_groups(vllm_config, kv_cache_config),
        scratch_tokens=lcm(*scratch) if scratch else 0,
    )
    is_plain = layout.is_plain
    return ServedGroups(
        layout=layout,
        page_bytes={number: _page_bytes(groups[number], whole=is_plain) for number in numbers},
        page_format="" if is_plain else _page_format(layout, kv_cache_config),
    )


def layer_specs(group: KVCacheGroupSpec) -> dict[str, KVCacheSpec]:
    """The spec of every layer that has a page of its own in the group, by name."""
    spec = group.kv_cache_spec
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return dict.fromkeys(group.layer_names, spec)
    # A layer without a spec of its own reads another's page.
    return {
        name: spec.kv_cache_specs[name] for name in group.layer_names if name in spec.kv_cache_specs
    }


def _model_faults(vllm_config: VllmConfig) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism spreads a block over ranks, which this version does not store"
    if getattr(vllm_config.model_config, "is_encoder_decoder", False):
        yield "the model has an encoder and a decoder, which no kv connector is let near"


def _group_faults(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    """Which kv groups cannot be served and why; what is said of several is said once."""
    found: dict[tuple[str, str], list[str]] = {}
    for number in kv_cache_config.prefix_cacheable_group_ids:
        group = kv_cache_config.kv_cache_groups[number]
        fault = _group_fault(group, vllm_config)
        if fault:
            names = "/".join(_spec_names(group.kv_cache_spec))
            found.setdefault((names, fault), []).append(str(number))
    for (names, fault), numbers in found.items():
        yield f"kv group{'s' * (len(numbers) > 1)} {', '.join(numbers)} ({names}): {fault}"


def _group_fault(group: KVCacheGroupSpec, vllm_config: VllmConfig) -> str:
    if group.host_resident or group.role is not KVCacheGroupRole.DEFAULT:
        return "its blocks are in a pool of their own"
    faults: dict[str, None] = {}
    for spec in layer_specs(group).values():
        kind = get_kv_cache_spec_kind(spec)
        served = SERVED_SPECS.get(kind)
        if served is None:
            faults[_REFUSED_SPECS.get(kind, "its kind is not known")] = None
        elif type(spec) is not served.spec_type:
            faults[f"its blocks are not those of {served.spec_type.__name__}"] = None
        elif fault := served.fault(spec, vllm_config):
            faults[fault] = None
    return ", and ".join(faults)


def _spec_names(spec: KVCacheSpec) -> list[str]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return sorted({type(inner).__name__ for inner in spec.kv_cache_specs.values()})
    return [type(spec).__name__]


def _scheduler_spec(group: KVCacheGroupSpec) -> KVCacheSpec:
    """The spec as vLLM's scheduler has it: the first layer's where layers differ in size."""
    spec = group.kv_cache_spec
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _attention_groups(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> tuple[AttentionGroup, ...]:
    """Equal specs as one, as vLLM's coordinator looks them up, full attention first."""
    drafts = _draft_groups(vllm_config, kv_cache_config)
    merged: list[tuple[KVCacheSpec, list[int]]] = []
    for number in kv_cache_config.prefix_cacheable_group_ids:
        spec = _scheduler_spec(kv_cache_config.kv_cache_groups[number])
        for known, numbers in merged:
            if known == spec:
                numbers.append(number)
                break
        else:
            merged.append((spec, [number]))
    merged.sort(key=lambda group: not isinstance(group[0], FullAttentionSpec))
    return tuple(
        attention_group(spec, numbers, is_draft=not drafts.isdisjoint(numbers))
        for spec, numbers in merged
    )


def attention_group(
    spec: KVCacheSpec, kv_groups: list[int], *, is_draft: bool = False
) -> AttentionGroup:
    """What vLLM's groups of this spec, of a kind that is served, are in Opal's terms."""
    kind = get_kv_cache_spec_kind(spec)
    served = SERVED_SPECS[kind]
    return AttentionGroup(
        kind=kind.value,
        block_tokens=spec.block_size,
        kv_groups=tuple(kv_groups),
        span_tokens=served.span_tokens(spec),
        extra_tokens=served.extra_tokens(spec),
        is_draft=is_draft and kind is not KVCacheSpecKind.MAMBA,  # drafts read no states
    )


def _draft_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> set[int]:
    """The kv groups whose last block vLLM drops from a hit: all, if it does not know which."""
    groups = kv_cache_config.kv_cache_groups
    drafts = {number for number, group in enumerate(groups) if group.is_eagle_group}
    speculative = getattr(vllm_config, "speculative_config", None)
    if not drafts and speculative is not None and speculative.use_eagle_block_drop():
        return set(range(len(groups)))
    return drafts


def _page_bytes(group: KVCacheGroupSpec, *, whole: bool) -> dict[str, int]:
    """Bytes of a block of each layer: the `whole` page, or what is in it without padding.

    The pages of several kv groups are padded to one size, and the padding of one may be another's
    content.
    """
    return {
        name: spec.page_size_bytes if whole else content_bytes(spec)
        for name, spec in layer_specs(group).items()
    }


def content_bytes(spec: KVCacheSpec) -> int:
    """Bytes of a page that mean something."""
    assert hasattr(spec, "real_page_size_bytes")
    return int(spec.real_page_size_bytes)


def _page_format(layout: AttentionLayout, kv_cache_config: KVCacheConfig) -> str:
    """A digest of all that decides what the bytes of a row mean, on this rank."""
    groups = {
        str(number): {
            name: _spec_facts(spec)
            for name, spec in layer_specs(kv_cache_config.kv_cache_groups[number]).items()
        }
        for number in kv_cache_config.prefix_cacheable_group_ids
    }
    facts = {"layout": msgspec.to_builtins(layout), "kv_groups": groups}
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _spec_facts(spec: KVCacheSpec) -> dict[str, object]:
    facts: dict[str, object] = {
        "kind": get_kv_cache_spec_kind(spec).value,
        "block_tokens": spec.block_size,
        "content_bytes": content_bytes(spec),
    }
    if isinstance(spec, MambaSpec):
        facts["shapes"] = [list(shape) for shape in spec.shapes]
        facts["dtypes"] = [str(dtype) for dtype in spec.dtypes]
        facts["cache_mode"] = spec.mamba_cache_mode
        facts["mamba_type"] = spec.mamba_type.name
        return facts
    for name in ("num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode"):
        facts[name] = str(getattr(spec, name, None))
    facts["tokens_per_state"] = str(getattr(spec, "tokens_per_state", 1))
    return facts
