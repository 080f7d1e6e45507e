"""A cluster of one instance is a replay: the same hits, tier by tier, to the token."""

from typing import Any

import msgspec
import pytest
from cluster_world import PLENTY, TOKENS, chats, instance_settings

from opal_connector.cluster.policies import POLICY_NAMES
from opal_connector.simulated_cluster import ClusterReport, ClusterSimulation
from opal_connector.simulation import Replay, ReplayReport, ReplaySettings, Trace

TRACE = chats()
LOADED: dict[str, Any] = {
    "prefill_tokens_per_second": 20_000,
    "decode_tokens_per_second": 100,
    "prefill_concurrency": 1,
    "max_num_seqs": 4,
}


def clustered(trace: Trace, settings: ReplaySettings, policy: str, **more: Any) -> ClusterReport:
    cluster = ClusterSimulation(trace, settings, instances=1, policy=policy, **more)
    report = cluster.run()
    cluster.check()
    return report


def replayed(trace: Trace, settings: ReplaySettings) -> ReplayReport:
    replay = Replay(trace, settings)
    report = replay.run("LRU")
    replay.check()
    return report


@pytest.mark.parametrize("is_sequential", [False, True], ids=["timed", "alone"])
@pytest.mark.parametrize(
    "settings",
    [
        instance_settings(),
        instance_settings(memory=60),
        instance_settings(memory=60, device_blocks=40),
        instance_settings(memory=60, disk=200, chunk_tokens=4 * TOKENS),
        instance_settings(memory=60, disk=200, shared=500, write="demote", **LOADED),
        instance_settings(memory=60, shared=300, **LOADED),
        instance_settings(memory=0, disk=PLENTY, device_blocks=40, **LOADED),
    ],
    ids=["memory", "full", "device", "chunks", "three-tiers", "shared", "disk"],
)
def test_one_instance_hits_exactly_what_a_replay_hits(
    settings: ReplaySettings, is_sequential: bool
) -> None:
    """Both commands use one model of an instance, and the router changes nothing in it."""
    settings = msgspec.structs.replace(settings, is_sequential=is_sequential)

    alone = replayed(TRACE, settings)
    found = clustered(TRACE, settings, "Balanced")

    for field in (
        "requests", "input_tokens", "output_tokens", "unique_chunks", "duration_seconds",
        "tier_tokens", "hit_rate", "tiers", "events", "dropped_stores", "ttft_seconds",
        "hit_rate_windows",
    ):  # fmt: skip
        assert getattr(found, field) == getattr(alone, field), field


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("is_shared", [False, True])
def test_policy_of_the_router_means_nothing_to_one_instance(policy: str, is_shared: bool) -> None:
    """There is one place to send a request to, and nobody to share a directory with."""
    settings = instance_settings(memory=60, shared=300)

    found = clustered(TRACE, settings, policy, is_shared=is_shared)

    assert found.tier_tokens == replayed(TRACE, settings).tier_tokens
