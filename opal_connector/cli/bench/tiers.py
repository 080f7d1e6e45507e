"""Which tier prompt tokens came from, by what the answers and the instances say. Pure."""

import math
from collections.abc import Sequence
from typing import Final, Self

import msgspec

from opal_connector.cli.bench.result import RequestRecord
from opal_connector.cli.prometheus import Sample, sum_by_label
from opal_connector.config import TIER_NAMES
from opal_connector.simulation import CACHE_MISS, DEVICE

CACHED: Final = "cached"  # somewhere: nobody says where
_DEVICE_SOURCE: Final = "device"


class CacheCounters(msgspec.Struct, frozen=True):
    """Prompt tokens that instances had cached since they began, or between two looks at them.

    Attributes:
        by_source: By vLLM's own kinds of caches.
        by_tier: By Opal's tiers; those without a token are there too.
    """

    by_source: dict[str, int] = {}
    by_tier: dict[str, int] = {}

    @classmethod
    def read(cls, samples: list[Sample]) -> Self:
        """Of one instance, from its /metrics."""
        samples = [one for one in samples if math.isfinite(one.value)]
        by_tier = dict.fromkeys(sum_by_label(samples, "vllm:opal_capacity_bytes", "tier"), 0)
        by_tier.update(sum_by_label(samples, "vllm:opal_hit_tokens_total", "tier"))
        by_source = sum_by_label(samples, "vllm:prompt_tokens_cached_by_source_total", "source")
        if not by_source:  # an older vLLM
            device = sum(one.value for one in samples if one.name == "vllm:prefix_cache_hits_total")
            by_source = {_DEVICE_SOURCE: round(device)}
        return cls(by_source, by_tier)

    def plus(self, other: "CacheCounters") -> "CacheCounters":
        """Both instances together."""
        return CacheCounters(
            _combine(self.by_source, other.by_source, 1), _combine(self.by_tier, other.by_tier, 1)
        )

    def since(self, before: "CacheCounters") -> "CacheCounters":
        """What was counted after `before`."""
        return CacheCounters(
            _combine(self.by_source, before.by_source, -1),
            _combine(self.by_tier, before.by_tier, -1),
        )

    @property
    def is_possible(self) -> bool:
        """Whether no counter went back, as those of a restarted instance do."""
        return min([*self.by_source.values(), *self.by_tier.values()], default=0) >= 0

    @property
    def device_tokens(self) -> int:
        """From the device's own prefix cache."""
        return self.by_source.get(_DEVICE_SOURCE, 0)

    @property
    def lower_tokens(self) -> dict[str, int]:
        """From what is below the device: Opal's tiers, else the caches of another connector."""
        if self.by_tier:
            known = {name: self.by_tier[name] for name in TIER_NAMES if name in self.by_tier}
            return {**known, **self.by_tier}
        others = {name: count for name, count in self.by_source.items() if name != _DEVICE_SOURCE}
        return {name: count for name, count in others.items() if count}

    @property
    def is_settled(self) -> bool:
        """Whether vLLM and Opal agree: Opal's counters follow an answer by a step."""
        external = sum(self.by_source.values()) - self.device_tokens
        return not self.by_tier or sum(self.by_tier.values()) == external


def _combine(left: dict[str, int], right: dict[str, int], sign: int) -> dict[str, int]:
    names = dict.fromkeys((*left, *right))
    return {name: left.get(name, 0) + sign * right.get(name, 0) for name in names}


class TierSplit(msgspec.Struct):
    """Tokens by where they came from, the misses last, or None; and what is to be said of it."""

    tier_tokens: dict[str, int] | None = None
    notes: list[str] = []


def split_tokens(records: Sequence[RequestRecord], counted: CacheCounters | None) -> TierSplit:
    """Where the prompt tokens of the successful `records` came from; the parts sum to them.

    Args:
        records: All requests of a run.
        counted: What the instances counted meanwhile, None if that is not known.
    """
    answered = [record for record in records if record.is_success]
    if not answered:
        return TierSplit()
    if any(record.prompt_tokens is None for record in answered):
        return TierSplit(
            notes=["Tokens per tier are left out: some answers do not say their prompt's tokens."]
        )
    prompt_tokens = sum(record.prompt_tokens or 0 for record in answered)
    is_said = all(record.cached_tokens is not None for record in answered)
    cached = sum(record.cached_tokens or 0 for record in answered) if is_said else None
    if cached is None:
        return _by_counters(prompt_tokens, counted)
    if counted is None:
        return TierSplit(_with_misses(prompt_tokens, {CACHED: cached}))
    lower = counted.lower_tokens
    device = cached - sum(lower.values())
    if device < 0 or not counted.is_possible:
        return TierSplit(
            _with_misses(prompt_tokens, {CACHED: cached}),
            [
                "Tokens are not split by tier: the instances' counters do not fit the answers "
                "(they served others too, or were restarted)."
            ],
        )
    notes = []
    if device != counted.device_tokens:
        notes.append(
            f"The instances counted {counted.device_tokens} tokens from their devices and the "
            f"answers leave {device}; others were served too, or requests failed."
        )
    return TierSplit(_with_misses(prompt_tokens, {DEVICE: device, **lower}), notes)


def _by_counters(prompt_tokens: int, counted: CacheCounters | None) -> TierSplit:
    """Without a word in the answers only the instances' counters are left."""
    said = "the answers do not say cached_tokens (vLLM does with --enable-prompt-tokens-details)"
    if counted is None:
        return TierSplit(notes=[f"Tokens per tier are left out: {said}."])
    parts = {DEVICE: counted.device_tokens, **counted.lower_tokens}
    if not counted.is_possible or sum(parts.values()) > prompt_tokens:
        return TierSplit(
            notes=[f"Tokens per tier are left out: {said}, and the instances' counters do not fit."]
        )
    return TierSplit(
        _with_misses(prompt_tokens, parts),
        [f"Tokens per tier are the instances' counters, whoever asked: {said}."],
    )


def _with_misses(prompt_tokens: int, parts: dict[str, int]) -> dict[str, int]:
    return {**parts, CACHE_MISS: prompt_tokens - sum(parts.values())}
