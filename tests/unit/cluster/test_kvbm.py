"""The KVBM on its own: what it credits to whom, what survives what, and that it forgets exactly."""

import random
from collections.abc import Sequence

import pytest

from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.request import PrefixRequest, WorkerMatch
from opal_connector.events import DEVICE_TIER, Copy, Delete, Insert, KVCEvent, Move, ObjectFact
from opal_connector.events.channel import (
    GroupDescription,
    InstanceDescription,
    SystemEvent,
    TierDescription,
)
from opal_connector.events.digests import BucketDigests
from opal_connector.keys import (
    CHAIN_ROOT,
    LoraIdentity,
    MultimodalSpan,
    OpalTokenDatabase,
    RequestIdentity,
)

BLOCK = 4
TOKENS = list(range(40))  # ten blocks
TIERS = (
    TierDescription("CPUMemory"),
    TierDescription("LocalNVMe", is_persistent=True),
    TierDescription("DistributedFS", is_persistent=True, shared_id="nfs"),
)


def describe(worker: str, incarnation: int = 1, **changes: object) -> InstanceDescription:
    facts: dict[str, object] = {
        "instance_id": worker,
        "incarnation": incarnation,
        "model": "m",
        "block_tokens": BLOCK,
        "chunk_blocks": 2,
        "tiers": TIERS,
    }
    return InstanceDescription(**(facts | changes))  # type: ignore[arg-type]


def chain(tokens: Sequence[int], identity: RequestIdentity | None = None) -> list[bytes]:
    database = OpalTokenDatabase(block_tokens=BLOCK, chunk_blocks=1)
    return [span.chunk_hash for span in database.process_tokens(tokens, identity)]


def fact(hashes: Sequence[bytes], start: int, stop: int, shared: int = 0) -> ObjectFact:
    parent = hashes[start - 1] if start else CHAIN_ROOT
    return ObjectFact(0, parent, b"".join(hashes[start:stop]), shared)


def kvbm_of(*workers: str) -> KVBM:
    kvbm = KVBM()
    for worker in workers:
        kvbm.join(describe(worker))
    return kvbm


def say(kvbm: KVBM, worker: str, *events: KVCEvent) -> None:
    kvbm.process_kvc_events(worker, events)
    kvbm.check()


def test_a_match_is_the_device_run_and_then_what_the_tiers_continue() -> None:
    kvbm = kvbm_of("a")
    hashes = chain(TOKENS)
    say(
        kvbm,
        "a",
        Insert(fact(hashes, 0, 3), DEVICE_TIER),
        Insert(fact(hashes, 2, 4), "CPUMemory"),
        Insert(fact(hashes, 4, 6), "LocalNVMe"),
        Insert(fact(hashes, 4, 6), "CPUMemory"),
        Insert(fact(hashes, 6, 8), "LocalNVMe"),
        Insert(fact(hashes, 6, 8), "DistributedFS"),
        Insert(fact(hashes, 9, 10), "CPUMemory"),
    )
    assert kvbm.match(PrefixRequest(token_ids=TOKENS)) == {
        "a": WorkerMatch(8 * BLOCK, 3 * BLOCK, {"CPUMemory": 3 * BLOCK, "LocalNVMe": 2 * BLOCK})
    }
    assert kvbm.scorer(PrefixRequest(token_ids=TOKENS)) == {"a": 0.8}


def test_device_blocks_behind_a_hole_count_for_nothing_though_a_tier_bridges_it() -> None:
    kvbm = kvbm_of("a")
    hashes = chain(TOKENS)
    say(
        kvbm,
        "a",
        Insert(fact(hashes, 0, 2), DEVICE_TIER),
        Insert(fact(hashes, 4, 10), DEVICE_TIER),
        Insert(fact(hashes, 2, 4), "CPUMemory"),
    )
    assert kvbm.match(PrefixRequest(token_ids=TOKENS))["a"] == WorkerMatch(
        4 * BLOCK, 2 * BLOCK, {"CPUMemory": 2 * BLOCK}
    )


def test_what_a_shared_tier_holds_counts_for_everybody_who_mounts_it_and_for_nobody_else() -> None:
    kvbm = kvbm_of("a", "b")
    kvbm.join(describe("c", tiers=TIERS[:2]))
    kvbm.join(
        describe("d", tiers=(TierDescription("DistributedFS", is_persistent=True, shared_id="x"),))
    )
    say(kvbm, "a", Insert(fact(chain(TOKENS), 0, 10), "DistributedFS"))
    assert kvbm.scorer(PrefixRequest(token_ids=TOKENS)) == {"a": 1.0, "b": 1.0}
    kvbm.join(describe("c", tiers=TIERS))
    assert set(kvbm.match(PrefixRequest(token_ids=TOKENS))) == {"a", "b", "c"}
    say(kvbm, "b", Insert(fact(chain(TOKENS), 0, 10), "DistributedFS"))
    say(kvbm, "a", Delete(fact(chain(TOKENS), 0, 10), "DistributedFS"))
    assert set(kvbm.scorer(PrefixRequest(token_ids=TOKENS))) == {"a", "b", "c"}
    say(kvbm, "b", Delete(fact(chain(TOKENS), 0, 10), "DistributedFS"))
    assert kvbm.scorer(PrefixRequest(token_ids=TOKENS)) == {}


def test_tiers_that_were_only_heard_of_have_their_part_too_host_memory_first() -> None:
    kvbm = KVBM()
    kvbm.join(describe("a", tiers=()))
    hashes = chain(TOKENS)
    say(kvbm, "a", Insert(fact(hashes, 0, 10), "STORAGE"), Insert(fact(hashes, 0, 4), "CPU"))
    assert kvbm.match(PrefixRequest(token_ids=TOKENS)) == {
        "a": WorkerMatch(40, 0, {"CPU": 16, "STORAGE": 24})
    }


def test_a_move_leaves_no_moment_and_no_copy_behind() -> None:
    kvbm = kvbm_of("a")
    hashes = chain(TOKENS)
    say(kvbm, "a", Insert(fact(hashes, 0, 4), "CPUMemory"))
    say(kvbm, "a", Move(fact(hashes, 0, 4), "CPUMemory", "LocalNVMe"))
    assert kvbm.workers["a"].block_counts == {(0, "LocalNVMe"): 4}
    say(kvbm, "a", Copy(fact(hashes, 0, 4), "LocalNVMe", "CPUMemory"))
    assert kvbm.workers["a"].block_counts == {(0, "LocalNVMe"): 4, (0, "CPUMemory"): 4}


def test_siblings_inside_a_chunk_hold_their_common_blocks_until_the_last_is_gone() -> None:
    kvbm = kvbm_of("a")
    one, other = chain(TOKENS[:8]), chain([*TOKENS[:4], 99, 98, 97, 96])
    say(
        kvbm,
        "a",
        Insert(fact(one, 0, 2), "CPUMemory"),
        Insert(fact(other, 0, 2, shared=1), "CPUMemory"),
        Delete(fact(one, 0, 2, shared=1), "CPUMemory"),
    )
    assert kvbm.scorer(PrefixRequest(token_ids=TOKENS[:8])) == {"a": 0.5}
    say(kvbm, "a", Delete(fact(other, 0, 2), "CPUMemory"))
    assert kvbm.used_bytes == 0


IDENTITIES = {
    "plain": (RequestIdentity(), {}),
    "lora": (RequestIdentity(lora=LoraIdentity("x", "/x", "f1")), {"lora_name": "x"}),
    "salt": (RequestIdentity(cache_salt="s"), {"cache_salt": "s"}),
    "multimodal": (
        RequestIdentity(multimodal=(MultimodalSpan("image", 6, 9),)),
        {"multimodal": (MultimodalSpan("image", 6, 9),)},
    ),
}


@pytest.mark.parametrize("kind", IDENTITIES)
def test_every_kind_of_request_matches_its_own_events_wholly_and_no_other_kind(kind: str) -> None:
    identity, words = IDENTITIES[kind]
    kvbm = KVBM()
    kvbm.join(describe("a", adapters=(LoraIdentity("x", "/x", "f1"),)))
    say(kvbm, "a", Insert(fact(chain(TOKENS, identity), 0, 10), "CPUMemory"))
    assert kvbm.scorer(PrefixRequest(token_ids=TOKENS, **words)) == {"a": 1.0}  # type: ignore[arg-type]
    for name, (_, others) in IDENTITIES.items():
        if name != kind:
            score = kvbm.scorer(PrefixRequest(token_ids=TOKENS, **others))  # type: ignore[arg-type]
            assert score.get("a", 0) <= (0.1 if "multimodal" in (kind, name) else 0)


def test_one_adapter_name_that_means_other_weights_elsewhere_matches_by_weights() -> None:
    mine, theirs = LoraIdentity("x", "/x", "f1"), LoraIdentity("x", "/x", "f2")
    kvbm = KVBM()
    kvbm.join(describe("a", adapters=(mine,)))
    kvbm.join(describe("b", adapters=(theirs,)))
    kvbm.join(describe("c"))  # knows adapters by name, as a plain engine does
    for worker, lora in (("a", mine), ("b", theirs), ("c", LoraIdentity("x", "", ""))):
        hashes = chain(TOKENS, RequestIdentity(lora=lora))
        say(kvbm, worker, Insert(fact(hashes, 0, 10), DEVICE_TIER))
    say(kvbm, "b", Insert(fact(chain(TOKENS, RequestIdentity(lora=mine)), 0, 10), "CPUMemory"))
    kvbm.clear_tier("b", DEVICE_TIER)
    assert kvbm.scorer(PrefixRequest(token_ids=TOKENS, lora_name="x")) == {"a": 1.0, "c": 1.0}


def test_after_a_restart_persistent_tiers_stay_and_host_and_device_are_forgotten() -> None:
    kvbm = kvbm_of("a", "b")
    hashes = chain(TOKENS)
    for tier in (DEVICE_TIER, "CPUMemory", "LocalNVMe", "DistributedFS", "of nobody's knowledge"):
        say(kvbm, "a", Insert(fact(hashes, 0, 10), tier))
    kvbm.process_system_events("a", [SystemEvent(running=3)])
    kvbm.join(describe("a", incarnation=2))
    kvbm.check()
    assert kvbm.workers["a"].block_counts == {(0, "LocalNVMe"): 10, (0, "DistributedFS"): 10}
    assert kvbm.workers["a"].system is None


def test_a_worker_that_serves_another_model_after_its_restart_starts_with_nothing() -> None:
    kvbm = kvbm_of("a")
    say(kvbm, "a", Insert(fact(chain(TOKENS), 0, 10), "LocalNVMe"))
    kvbm.join(describe("a", incarnation=2, model="other"))
    kvbm.check()
    assert kvbm.used_bytes == 0
    assert len(kvbm.models()) == 1


def test_clearing_one_tier_leaves_the_others() -> None:
    kvbm = kvbm_of("a", "b")
    hashes = chain(TOKENS)
    for worker in ("a", "b"):
        say(kvbm, worker, Insert(fact(hashes, 0, 6), DEVICE_TIER))
        say(kvbm, worker, Insert(fact(hashes, 0, 10), "CPUMemory"))
    assert kvbm.clear_tier("a", DEVICE_TIER) == 6
    kvbm.check()
    assert kvbm.match(PrefixRequest(token_ids=TOKENS)) == {
        "a": WorkerMatch(40, 0, {"CPUMemory": 40}),
        "b": WorkerMatch(40, 24, {"CPUMemory": 16}),
    }


def test_a_worker_that_is_not_live_is_followed_and_not_scored() -> None:
    kvbm = kvbm_of("a")
    kvbm.set_live("a", is_live=False)
    say(kvbm, "a", Insert(fact(chain(TOKENS), 0, 10), "CPUMemory"))
    assert kvbm.scorer(PrefixRequest(token_ids=TOKENS)) == {}
    kvbm.set_live("a", is_live=True)
    assert kvbm.scorer(PrefixRequest(token_ids=TOKENS)) == {"a": 1.0}


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_number_that_is_no_token_matches_nothing(token: int) -> None:
    kvbm = kvbm_of("a")
    assert kvbm.match(PrefixRequest(token_ids=[token] * BLOCK)) == {}
    assert kvbm.scorer(PrefixRequest(token_ids=[token] * BLOCK)) == {}


def test_models_are_kept_apart_and_can_be_asked_for_by_name() -> None:
    kvbm = kvbm_of("a")
    kvbm.join(describe("b", model="n"))
    for worker in ("a", "b"):
        say(kvbm, worker, Insert(fact(chain(TOKENS), 0, 10), "CPUMemory"))
    assert kvbm.scorer(PrefixRequest(token_ids=TOKENS, model="n")) == {"b": 1.0}
    assert set(kvbm.scorer(PrefixRequest(token_ids=TOKENS))) == {"a", "b"}


def test_groups_that_need_the_whole_prefix_must_all_have_it_and_others_are_not_scored() -> None:
    kvbm = KVBM()
    groups = (
        GroupDescription(0, "full_attention"),
        GroupDescription(1, "mla_attention"),
        GroupDescription(2, "sliding_window"),
    )
    kvbm.join(describe("a", groups=groups))
    hashes = chain(TOKENS)
    for group, blocks in ((0, 8), (1, 5), (2, 1)):
        part = ObjectFact(group, CHAIN_ROOT, b"".join(hashes[:blocks]))
        say(kvbm, "a", Insert(part, DEVICE_TIER))
    assert kvbm.scorer(PrefixRequest(token_ids=TOKENS)) == {"a": 0.5}
    assert kvbm.match(PrefixRequest(token_ids=TOKENS))["a"].total_tokens == 5 * BLOCK


def test_digests_are_those_of_the_blocks_and_a_repeated_fact_changes_nothing() -> None:
    kvbm = kvbm_of("a")
    hashes = chain(TOKENS)
    say(
        kvbm, "a", Insert(fact(hashes, 0, 10), "CPUMemory"), Insert(fact(hashes, 3, 7), "CPUMemory")
    )
    say(
        kvbm,
        "a",
        Delete(fact(hashes, 9, 10), "CPUMemory"),
        Delete(fact(hashes, 9, 10), "CPUMemory"),
    )
    expected = BucketDigests()
    expected.flip_all(hashes[:9])
    (digest,) = kvbm.digests("a")
    assert (digest.block_count, digest.buckets) == (9, expected.buckets())
    assert kvbm.workers["a"].repeated_inserts == 4
    assert kvbm.workers["a"].unknown_deletes == 1


@pytest.mark.parametrize("keep_others", [True, False])
def test_replacing_some_buckets_mends_them_and_touches_no_other(keep_others: bool) -> None:
    kvbm = kvbm_of("a")
    truth = chain(list(range(400)))
    rng = random.Random(5)
    say(kvbm, "a", Insert(fact(truth, 0, 100), "CPUMemory"))
    lost = rng.sample([found for found in truth if found != truth[50]], 20)
    for block_hash in lost:
        say(kvbm, "a", Delete(ObjectFact(0, b"", block_hash), "CPUMemory"))
    buckets = bytes(sorted({block_hash[0] for block_hash in [*lost[:10], truth[50]]}))
    parents = dict(zip(truth, [CHAIN_ROOT, *truth], strict=False))
    there = [found for found in truth if found[0] in buckets and found != truth[50]]
    facts = [ObjectFact(0, parents[found], found) for found in there]
    replaced = kvbm.replace("a", 0, "CPUMemory", facts, buckets, keep_others=keep_others)
    kvbm.check()
    held = {found for _, found in kvbm.contents("a", 0, "CPUMemory")}
    assert {found for found in held if found[0] in buckets} >= set(there)
    assert replaced.removed_blocks == int(not keep_others)
    assert {found for found in held if found[0] not in buckets} == {
        found for found in truth if found not in lost and found[0] not in buckets
    }


def test_what_finds_no_room_is_refused_and_said_and_room_that_comes_back_is_used() -> None:
    kvbm = KVBM(max_entries=10)
    kvbm.join(describe("a"))
    hashes = chain(list(range(80)))
    say(
        kvbm, "a", Insert(fact(hashes, 0, 8), "CPUMemory"), Insert(fact(hashes, 8, 12), "CPUMemory")
    )
    assert kvbm.entry_count == 8
    assert kvbm.workers["a"].refused_blocks == 4
    assert not kvbm.digests("a")[0].is_complete
    kvbm.replace("a", 0, "CPUMemory", [fact(hashes, 0, 10)])
    assert kvbm.entry_count == 10
    assert kvbm.digests("a")[0].is_complete


@pytest.mark.parametrize(
    "bad",
    [
        ObjectFact(0, CHAIN_ROOT, b"short"),
        ObjectFact(0, b"short", b"a" * 32),
        ObjectFact(0, CHAIN_ROOT, b"a" * 64),
        ObjectFact(0, b"a" * 32, b"a" * 32),
    ],
)
def test_malformed_facts_are_counted_and_change_nothing(bad: ObjectFact) -> None:
    kvbm = kvbm_of("a")
    say(kvbm, "a", Insert(bad, "CPUMemory"))
    assert kvbm.workers["a"].malformed_events == 1
    assert kvbm.used_bytes == 0


def test_more_tiers_than_any_worker_has_are_refused() -> None:
    kvbm = kvbm_of("a")
    for number in range(300):
        say(kvbm, "a", Insert(fact(chain(TOKENS), 0, 1), f"tier {number}"))
    assert len(kvbm.workers["a"].places) == 256
    assert kvbm.workers["a"].malformed_events == 44


def test_after_all_workers_have_left_nothing_is_left() -> None:
    kvbm = kvbm_of("a", "b", "c")
    for worker in ("a", "b", "c"):
        for tier in (DEVICE_TIER, "CPUMemory", "DistributedFS"):
            say(kvbm, worker, Insert(fact(chain(TOKENS), 0, 10), tier))
    kvbm.remove_worker("b")
    kvbm.check()
    assert set(kvbm.scorer(PrefixRequest(token_ids=TOKENS))) == {"a", "c"}
    kvbm.join(describe("d", tiers=()))
    assert "d" not in kvbm.scorer(PrefixRequest(token_ids=TOKENS)), "a bit was inherited"
    for worker in ("a", "c", "d", "never there"):
        kvbm.remove_worker(worker)
    assert (kvbm.used_bytes, kvbm.entry_count, len(kvbm.models())) == (0, 0, 0)
