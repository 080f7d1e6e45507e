"""Simulated clusters: events that arrive when they would, loads that queue, prefixes that pay."""

from typing import Any

import msgspec
import pytest
from cluster_world import PLENTY, chats, instance_settings

from opal_connector.cluster.kvbm import KVBM
from opal_connector.events import Insert, ObjectFact
from opal_connector.events.channel import Batch, InstanceDescription, SystemEvent, encode_message
from opal_connector.keys import CHAIN_ROOT
from opal_connector.simulated_cluster import ClusterReport, ClusterSimulation
from opal_connector.simulated_cluster.feed import INCARNATION, EventFeed
from opal_connector.simulated_cluster.report import balance
from opal_connector.simulation import ReplaySettings, Trace


def run(trace: Trace, settings: ReplaySettings, **options: Any) -> ClusterReport:
    """A run whose books and index were audited at its end."""
    cluster = ClusterSimulation(trace, settings, **options)
    report = cluster.run()
    cluster.check()
    return report


# Events.


def inserted(number: int) -> Insert:
    return Insert(ObjectFact(0, CHAIN_ROOT, bytes([number]) * 32), "CPUMemory")


@pytest.fixture
def kvbm() -> KVBM:
    """An index that knows one instance."""
    index = KVBM()
    index.join(
        InstanceDescription(
            instance_id="a", incarnation=INCARNATION, model="simulated", block_tokens=16
        )
    )
    return index


def feed_of(kvbm: KVBM, coalesce_seconds: float) -> EventFeed:
    return EventFeed(kvbm, model="simulated", block_tokens=16, coalesce_seconds=coalesce_seconds)


def test_batch_arrives_when_its_first_event_is_old_enough(kvbm: KVBM) -> None:
    """What happens within the time is one message, what happens later is another."""
    feed = feed_of(kvbm, 1.0)
    for number, now in ((1, 10.0), (2, 10.5), (3, 11.5)):
        feed.hear("a", [inserted(number)], now)

    assert (feed.traffic.batches, kvbm.entry_count) == (
        1,
        2,
    )  # the third came behind the first's end
    feed.deliver(12.4)
    assert kvbm.entry_count == 2
    feed.deliver(12.5)
    assert (feed.traffic.batches, kvbm.entry_count) == (2, 3)


def test_bytes_are_those_of_the_encoded_message(kvbm: KVBM) -> None:
    """The traffic is measured and not estimated."""
    feed = feed_of(kvbm, 0.0)
    events = (inserted(1), inserted(2))

    feed.hear("a", events, 0.0)
    feed.deliver()

    batch = Batch(1, "a", "simulated", INCARNATION, 0, 1.7e9, 16, events)
    assert feed.traffic.bytes == len(encode_message(batch))
    assert feed.traffic.events == 2


def test_heartbeats_are_counted_for_every_instance_and_second(kvbm: KVBM) -> None:
    """An instance that holds something sends the digests of its tiers with every one."""
    feed = feed_of(kvbm, 0.0)
    feed.hear("a", [inserted(1)], 0.0)
    feed.deliver()

    feed.count_heartbeats(
        {"a": SystemEvent(), "b": SystemEvent()}, duration_seconds=10.4, heartbeat_seconds=1.0
    )

    assert feed.traffic.heartbeats == 20
    assert feed.traffic.heartbeat_bytes > 10 * 2048


def test_late_events_cost_what_the_router_expected() -> None:
    """A router that hears late of evictions expects hits that are not there any more."""
    trace = chats(requests=300, mean_gap_seconds=5.0)  # nothing is under way for long
    settings = instance_settings(memory=40)

    def surplus(coalesce_seconds: float) -> float:
        config = msgspec.structs.replace(settings.config, kvcevent_coalesce_time=coalesce_seconds)
        late = msgspec.structs.replace(settings, config=config)
        report = run(trace, late, instances=4, policy="MaxPrefix")
        return report.router.expected_hit_rate - report.hit_rate

    assert surplus(60.0) > surplus(0.0) + 0.01


# Load.


def test_prompts_queue_where_only_one_is_computed_at_once() -> None:
    """The same work at one instance takes longer to begin; at many it does not."""
    trace = chats(requests=200)

    def p95(instances: int, concurrency: int) -> float:
        settings = instance_settings(
            prefill_tokens_per_second=2_000, prefill_concurrency=concurrency
        )
        report = run(trace, settings, instances=instances, policy="LeastLoaded")
        return report.ttft_seconds["p95"]

    assert p95(1, 1) > 5 * p95(1, 0)
    assert p95(100, 1) < 1.5 * p95(100, 0)


def test_requests_beyond_max_num_seqs_wait_for_a_place() -> None:
    """A place is taken from the lookup to the last token."""
    trace = chats(requests=100)

    def mean(max_num_seqs: int) -> float:
        settings = instance_settings(decode_tokens_per_second=20, max_num_seqs=max_num_seqs)
        return run(trace, settings, instances=1, policy="Balanced").ttft_seconds["mean"]

    assert mean(1) > mean(8) > mean(0)


def test_balance_counts_instances_that_were_given_nothing() -> None:
    """An idle instance is part of the mean."""
    found = balance([30, 10, 0, 0], [3, 1, 0, 0])

    assert (found.imbalance, found.idle_instances) == (3.0, 2)
    assert (found.requests_least, found.requests_most) == (0, 3)
    assert balance([5, 5], [1, 1]).deviation == 0


# Prefixes.


@pytest.mark.parametrize("policy", ["MaxPrefix", "Balanced"])
def test_policies_that_know_prefixes_hit_at_least_what_taking_turns_hits(policy: str) -> None:
    """Ten instances, and chats whose turns build on each other."""
    trace = chats(requests=600, mean_gap_seconds=0.2)
    settings = instance_settings(
        memory=300, prefill_tokens_per_second=20_000, prefill_concurrency=1
    )

    turns = run(trace, settings, instances=10, policy="RoundRobin")
    found = run(trace, settings, instances=10, policy=policy)

    assert found.hit_rate >= turns.hit_rate
    assert found.hit_rate > 1.2 * turns.hit_rate  # not by chance: chats stay where they were


def test_shared_directory_brings_what_another_instance_wrote() -> None:
    """Turns that go round all instances hit in a directory that all mount, and not in their own."""
    trace = chats(requests=300, mean_gap_seconds=1.0)
    settings = instance_settings(memory=20, shared=PLENTY)

    own = run(trace, settings, instances=10, policy="RoundRobin")
    shared = run(trace, settings, instances=10, policy="RoundRobin", is_shared=True)

    assert shared.tiers["DistributedFS"].hit_rate > own.tiers["DistributedFS"].hit_rate + 0.2
    assert own.tiers["DistributedFS"].capacity_bytes == (
        10 * shared.tiers["DistributedFS"].capacity_bytes
    )
    assert shared.tiers["DistributedFS"].objects <= shared.unique_chunks


def test_shared_directory_keeps_its_limit_for_all_together() -> None:
    """Ten instances write into the room of one, and it makes room for them."""
    trace = chats(requests=300, mean_gap_seconds=0.2)

    report = run(
        trace, instance_settings(memory=20, shared=300), instances=10, policy="RoundRobin",
        is_shared=True,
    )  # fmt: skip

    shared = report.tiers["DistributedFS"]
    assert shared.evictions > 0
    assert 0 < shared.used_bytes <= shared.capacity_bytes


def test_instances_that_nobody_needs_are_not_made() -> None:
    """A thousand instances and two requests cost two instances."""
    trace = chats(requests=2)
    cluster = ClusterSimulation(trace, instance_settings(), instances=1000, policy="RoundRobin")

    report = cluster.run()

    assert report.balance.idle_instances == 998
    assert cluster.instance_count == 2
