"""Simulated clusters of any make: every request once, all books whole, the index exactly true."""

from typing import Any

import msgspec
from cluster_world import chats, instance_settings
from hypothesis import given, settings
from hypothesis import strategies as st

from opal_connector.cluster.policies import POLICY_NAMES
from opal_connector.simulated_cluster import ClusterReport, ClusterSimulation
from opal_connector.simulation import ReplaySettings, Trace

SIZES = st.sampled_from([0, 30, 100, 100_000])


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Trace, ReplaySettings, dict[str, Any]]:
    trace = chats(
        seed=draw(st.integers(0, 1000)),
        requests=draw(st.integers(1, 80)),
        mean_gap_seconds=draw(st.sampled_from([0.001, 0.02, 0.5])),
    )
    given_settings = instance_settings(
        memory=draw(SIZES.filter(bool)),
        disk=draw(SIZES),
        shared=draw(SIZES),
        write=draw(st.sampled_from(["through", "demote"])),
        device_blocks=draw(st.sampled_from([0, 25])),
        prefill_tokens_per_second=draw(st.sampled_from([0, 5_000])),
        decode_tokens_per_second=draw(st.sampled_from([0, 200])),
        prefill_concurrency=draw(st.integers(0, 2)),
        max_num_seqs=draw(st.integers(0, 3)),
        is_sequential=draw(st.booleans()),
    )
    coalesce = draw(st.sampled_from([0.0, 0.05, 2.0]))
    config = msgspec.structs.replace(given_settings.config, kvcevent_coalesce_time=coalesce)
    cluster = {
        "instances": draw(st.integers(1, 7)),
        "policy": draw(st.sampled_from(POLICY_NAMES)),
        "is_shared": draw(st.booleans()),
        "seed": draw(st.integers(0, 9)),
    }
    return trace, msgspec.structs.replace(given_settings, config=config), cluster


def timeless(report: ClusterReport) -> dict[str, Any]:
    """The report without what the machine took."""
    facts: dict[str, Any] = msgspec.to_builtins(report)
    for name in ("wall_seconds", "requests_per_wall_second"):
        del facts[name]
    for name in ("decide_seconds", "ingest_seconds"):
        del facts["router"][name]
    return facts


@settings(max_examples=25, deadline=None)
@given(worlds())
def test_every_request_is_served_once_and_the_index_is_the_union_of_the_books(
    world: tuple[Trace, ReplaySettings, dict[str, Any]],
) -> None:
    """Conservation, time that only goes on, I1, I2 and I8, with any tiers, speeds and policy."""
    trace, given_settings, options = world
    cluster = ClusterSimulation(trace, given_settings, **options)
    seen = [0.0]

    def advance(_count: float) -> None:
        seen.append(cluster.now)

    report = cluster.run(advance)

    cluster.check()
    assert seen == sorted(seen), "time went back"
    assert report.requests == len(trace.requests)
    assert sum(report.tier_tokens.values()) == trace.input_tokens
    assert all(tokens >= 0 for tokens in report.tier_tokens.values())
    assert report.balance.requests_most * report.instances >= report.requests
    assert 0 <= report.hit_rate < 1
    assert min(report.ttft_seconds.values()) >= 0


@settings(max_examples=8, deadline=None)
@given(worlds())
def test_equal_seeds_make_equal_reports(
    world: tuple[Trace, ReplaySettings, dict[str, Any]],
) -> None:
    """Nothing depends on the wall clock, on the machine or on the order of a set."""
    trace, given_settings, options = world

    first, second = (ClusterSimulation(trace, given_settings, **options).run() for _ in range(2))

    assert timeless(first) == timeless(second)
