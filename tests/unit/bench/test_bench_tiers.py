"""Where prompt tokens came from: the parts sum to them, whatever was said and whatever was not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opal_connector.cli.bench import RequestRecord
from opal_connector.cli.bench.tiers import CacheCounters, split_tokens
from opal_connector.cli.prometheus import parse_prometheus

METRICS = """
# HELP vllm:opal_hit_tokens_total Prompt tokens served from a tier.
vllm:opal_hit_tokens_total{engine="0",model_name="m",tier="LocalNVMe"} 64.0
vllm:opal_hit_tokens_total{engine="0",model_name="m",tier="CPUMemory"} 32.0
vllm:opal_hit_tokens_total{engine="1",model_name="m",tier="CPUMemory"} 32.0
vllm:opal_capacity_bytes{engine="0",model_name="m",tier="DistributedFS"} 1e9
vllm:prompt_tokens_cached_by_source_total{engine="0",source="device"} 100.0
vllm:prompt_tokens_cached_by_source_total{engine="0",source="host"} 64.0
vllm:prompt_tokens_cached_by_source_total{engine="0",source="disk"} 64.0
"""


def records(*cached: int | None, **more: Any) -> list[RequestRecord]:
    return [
        RequestRecord(
            **{
                "conversation_id": "c",
                "turn": 0,
                "prompt_tokens": 100,
                "cached_tokens": one,
                **more,
            }
        )
        for one in cached
    ]


def counted(device: int, **tiers: int) -> CacheCounters:
    return CacheCounters({"device": device, "host": sum(tiers.values())}, tiers)


def test_metrics_are_read_over_all_engines_and_tiers() -> None:
    """Engines of an instance are summed; a tier that gave nothing yet is there with zero."""
    found = CacheCounters.read(parse_prometheus(METRICS))

    assert found.by_tier == {"DistributedFS": 0, "LocalNVMe": 64, "CPUMemory": 64}
    assert list(found.lower_tokens) == ["CPUMemory", "LocalNVMe", "DistributedFS"]
    assert found.device_tokens == 100
    assert found.is_settled


def test_older_vllm_says_what_the_device_had() -> None:
    """Without the counter by source, that of the prefix cache is the device's."""
    found = CacheCounters.read(parse_prometheus('vllm:prefix_cache_hits_total{engine="0"} 48\n'))

    assert found.device_tokens == 48
    assert found.lower_tokens == {}


def test_figure_that_is_no_number_is_left_out() -> None:
    """Else all that was measured would be lost by it at the end."""
    text = METRICS.replace("1e9", "NaN") + 'vllm:prefix_cache_hits_total{engine="0"} +Inf\n'

    found = CacheCounters.read(parse_prometheus(text))

    assert found.by_tier == {"LocalNVMe": 64, "CPUMemory": 64}
    assert found.device_tokens == 100


def test_only_what_was_counted_meanwhile_counts() -> None:
    """Two looks at two instances."""
    before = counted(10, CPUMemory=5).plus(counted(20, CPUMemory=5))
    after = counted(40, CPUMemory=7).plus(counted(30, CPUMemory=8, LocalNVMe=4))

    found = after.since(before)

    assert found.device_tokens == 40
    assert found.lower_tokens == {"CPUMemory": 5, "LocalNVMe": 4}
    assert found.is_possible
    assert not before.since(after).is_possible


def test_opal_that_lags_behind_vllm_is_waited_for() -> None:
    """Its counters follow the answers by a step."""
    assert not CacheCounters({"device": 1, "host": 32}, {"CPUMemory": 0}).is_settled
    assert CacheCounters({"device": 1, "host": 32}, {"CPUMemory": 32}).is_settled


def test_answers_and_counters_make_the_split() -> None:
    """The total is what the answers say, the tiers what instances say, the device the rest."""
    found = split_tokens(records(80, 60), counted(90, CPUMemory=30, LocalNVMe=20))

    assert found.tier_tokens == {"apc": 90, "CPUMemory": 30, "LocalNVMe": 20, "Cache Miss": 60}
    assert list(found.tier_tokens)[-1] == "Cache Miss"
    assert found.notes == []


def test_counters_of_other_requests_are_seen() -> None:
    """An instance that served others too does not make up tokens of this benchmark."""
    too_many = split_tokens(records(80, 60), counted(90, CPUMemory=300))
    restarted = split_tokens(records(80, 60), counted(-5, CPUMemory=30))
    a_bit = split_tokens(records(80, 60), counted(100, CPUMemory=50))

    assert too_many.tier_tokens == restarted.tier_tokens == {"cached": 140, "Cache Miss": 60}
    assert "do not fit" in too_many.notes[0]
    assert a_bit.tier_tokens == {"apc": 90, "CPUMemory": 50, "Cache Miss": 60}
    assert "others were served too" in a_bit.notes[0]


def test_without_metrics_only_the_total_is_known() -> None:
    """Cached, nobody says where."""
    assert split_tokens(records(80, 0), None).tier_tokens == {"cached": 80, "Cache Miss": 120}


def test_without_a_word_in_the_answers_the_counters_are_all() -> None:
    """Their owner is told what would say more; what is impossible is not shown."""
    found = split_tokens(records(None, None), counted(50, CPUMemory=30))
    nothing = split_tokens(records(None, 5), None)
    others = split_tokens(records(None), counted(500))

    assert found.tier_tokens == {"apc": 50, "CPUMemory": 30, "Cache Miss": 120}
    assert "--enable-prompt-tokens-details" in found.notes[0]
    assert nothing.tier_tokens is others.tier_tokens is None
    assert "left out" in nothing.notes[0]
    assert "do not fit" in others.notes[0]


def test_failed_requests_are_no_part_of_it() -> None:
    """Only prompts that were answered are split."""
    failed = records(None, error="timeout", prompt_tokens=None)

    found = split_tokens([*records(80), *failed], counted(80))

    assert found.tier_tokens == {"apc": 80, "Cache Miss": 20}
    assert split_tokens(failed, counted(80)).tier_tokens is None


def test_unknown_prompt_sizes_leave_the_split_out() -> None:
    """Shares of an unknown total would be made up."""
    found = split_tokens(records(5, prompt_tokens=None), counted(5))

    assert found.tier_tokens is None
    assert "left out" in found.notes[0]


@given(
    cached=st.lists(st.one_of(st.none(), st.integers(0, 100)), min_size=1, max_size=6),
    device=st.integers(-10, 700),
    tiers=st.dictionaries(
        st.sampled_from(["CPUMemory", "LocalNVMe", "DistributedFS"]), st.integers(-5, 300)
    ),
    is_known=st.booleans(),
)
def test_parts_sum_to_the_prompts(
    cached: list[int | None], device: int, tiers: dict[str, int], is_known: bool
) -> None:
    """Whatever came in, a split that is shown is complete, without a negative part."""
    found = split_tokens(records(*cached), counted(device, **tiers) if is_known else None)

    if found.tier_tokens is None:
        assert found.notes
        return
    assert sum(found.tier_tokens.values()) == 100 * len(cached)
    assert min(found.tier_tokens.values()) >= 0
    assert list(found.tier_tokens)[-1] == "Cache Miss"


@pytest.mark.parametrize("source", ["host", "p2p"])
def test_caches_of_another_connector_are_named_as_vllm_names_them(source: str) -> None:
    """Not every instance runs Opal."""
    found = split_tokens(records(80), CacheCounters({"device": 48, source: 32, "disk": 0}))

    assert found.tier_tokens == {"apc": 48, source: 32, "Cache Miss": 20}
