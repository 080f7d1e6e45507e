"""Facts that are none, or contradict each other: they harm nobody, and not even their worker."""

import random

import pytest

from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.request import PrefixRequest
from opal_connector.events import Delete, Insert, KVCEvent, Move, ObjectFact
from opal_connector.events.channel import (
    GroupDescription,
    InstanceDescription,
    TierDescription,
)
from opal_connector.events.digests import BucketDigests
from opal_connector.keys import CHAIN_ROOT

TIER = "CPUMemory"


def joined(*workers: str, **settings: int) -> KVBM:
    kvbm = KVBM(**settings)
    for worker in workers:
        kvbm.join(describe(worker))
    return kvbm


def describe(worker: str, incarnation: int = 1) -> InstanceDescription:
    return InstanceDescription(
        instance_id=worker,
        incarnation=incarnation,
        model="m",
        block_tokens=2,
        tiers=(TierDescription("Device"), TierDescription(TIER)),
    )


def block(number: int) -> bytes:
    return bytes([number]) * 32


@pytest.mark.parametrize("length", [1, 31, 33, 63])
def test_removal_of_a_part_of_a_hash_does_not_spoil_the_fingerprints(length: int) -> None:
    kvbm = joined("a")
    kvbm.process_kvc_events("a", [Insert(ObjectFact(0, CHAIN_ROOT, block(1)), TIER)])
    kvbm.process_kvc_events("a", [Delete(ObjectFact(0, b"", b"x" * length), TIER)])

    (digest,) = kvbm.digests("a")
    assert digest.block_count == 1
    assert kvbm.workers["a"].malformed_events == 1


def test_groups_that_one_worker_describes_cost_the_others_nothing() -> None:
    """One that names a group which nobody else has would end every match of its model."""
    kvbm = joined("a", "b")
    kvbm.join(
        InstanceDescription(
            instance_id="odd",
            incarnation=1,
            model="m",
            block_tokens=2,
            groups=tuple(GroupDescription(number, "full_attention") for number in range(64)),
        )
    )
    request = PrefixRequest(token_ids=[1, 2])
    run = kvbm.hashed(request)[0].hashes[0]
    for worker in ("a", "odd"):
        kvbm.process_kvc_events(worker, [Insert(ObjectFact(0, CHAIN_ROOT, run), TIER)])

    assert kvbm.scorer(request) == {"a": 1.0}
    assert list(kvbm.match(request)) == ["a"]


@pytest.mark.parametrize("seed", range(12))
def test_forged_parents_and_odd_runs_leave_fingerprints_and_contents_equal(seed: int) -> None:
    """Cycles, two parents of one block, repeated blocks, shared counts out of all bounds."""
    generator = random.Random(seed)
    kvbm = joined("a", "b", max_entries=50)
    for _ in range(300):
        worker = generator.choice("ab")
        kvbm.process_kvc_events(worker, [_odd_event(generator)])
        if generator.random() < 0.03:
            kvbm.clear_tier(worker, TIER)
        for one in "ab":
            for digest in kvbm.digests(one):
                blocks = [found for _, found in kvbm.contents(one, digest.group, digest.tier)]
                assert len(blocks) == len(set(blocks)) == digest.block_count
                assert digest.buckets == _buckets(blocks)
    kvbm.remove_worker("a")
    kvbm.remove_worker("b")
    assert kvbm.used_bytes == 0


def _odd_event(generator: random.Random) -> KVCEvent:
    names = [CHAIN_ROOT, *map(block, range(1, 10))]
    run = b"".join(generator.choices(names, k=generator.randint(0, 5)))
    if generator.random() < 0.05:
        run += b"odd"
    parent = generator.choice([*names, b"", b"short"])
    shared = generator.choice([0, 0, 0, 1, 2, -1, 1 << 63])
    fact = ObjectFact(generator.choice([0, 0, 1]), parent, run, shared)
    tier = generator.choice([TIER, "Device", "no such tier"])
    match generator.randrange(3):
        case 0:
            return Insert(fact, tier)
        case 1:
            return Delete(fact, tier)
        case _:
            return Move(fact, tier, TIER, generator.choice([0, 1, -2, 9]))


def _buckets(blocks: list[bytes]) -> bytes:
    digests = BucketDigests()
    digests.flip_all(blocks)
    return digests.buckets()
