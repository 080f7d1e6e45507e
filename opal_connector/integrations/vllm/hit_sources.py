"""Where the tokens of a hit come from, in the terms of vLLM's own statistics."""

from collections.abc import Mapping

from vllm.v1.metrics.cache_hit_source import CacheHitSource

# What others run is "remote" to vLLM, which counts that as unspecified.
_SOURCES = {
    "CPUMemory": CacheHitSource.HOST,
    "LocalNVMe": CacheHitSource.DISK,
    "DistributedFS": CacheHitSource.DISK,
}


def hit_sources(tier_tokens: Mapping[str, int], external_tokens: int) -> dict[CacheHitSource, int]:
    """Tokens by source; they sum to `external_tokens`, also where it is not known of which tier."""
    sources: dict[CacheHitSource, int] = {}
    for tier, tokens in tier_tokens.items():
        source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
        sources[source] = sources.get(source, 0) + tokens
    if sum(sources.values()) != external_tokens:
        return {CacheHitSource.EXTERNAL_UNSPECIFIED: external_tokens}
    return sources
