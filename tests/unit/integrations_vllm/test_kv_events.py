"""Opal's events in vLLM's words: each block announced once and withdrawn once."""

import msgspec
import pytest
from fakes import stamp

pytest.importorskip("vllm")
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from vllm.v1.core.kv_cache_utils import ExternalBlockHash

from opal_connector.cluster.engine_chain import EngineChain
from opal_connector.cluster.engine_lineage import StoredBlocks
from opal_connector.config.schema import TIER_NAMES
from opal_connector.events import Copy, Delete, Insert, Move, ObjectFact
from opal_connector.integrations.vllm.kv_events import external_hash, host_events, tier_name
from opal_connector.keys import (
    CHAIN_ROOT,
    LoraIdentity,
    MultimodalSpan,
    RequestIdentity,
    TokenChain,
    engine_extra_keys,
)

pytestmark = pytest.mark.vllm

BLOCK_TOKENS = 4
TOKENS = tuple(range(12))


def fact(*numbers: int, parent: int | None = None, shared: int = 0, group: int = 0) -> ObjectFact:
    """An object of the blocks `numbers` behind the block `parent`."""
    return ObjectFact(
        group=group,
        parent_hash=CHAIN_ROOT if parent is None else stamp(parent),
        block_hashes=b"".join(stamp(number) for number in numbers),
        shared_blocks=shared,
    )


def names(*numbers: int) -> list[ExternalBlockHash]:
    """Blocks as vLLM's own events name them by default: the last 64 bits of the digest."""
    return [int.from_bytes(stamp(number)[-8:], "big") for number in numbers]


def only(events: list[object]) -> BlockStored | BlockRemoved:
    (event,) = events
    assert isinstance(event, BlockStored | BlockRemoved)
    return event


def test_insert_is_one_stored_event_that_describes_itself() -> None:
    """Blocks, parent, tokens, adapter, medium and tier: a router needs nothing else."""
    event = only(host_events([Insert(fact(1, 2, 3), "CPUMemory", TOKENS, "sql")], BLOCK_TOKENS))

    assert event == BlockStored(
        block_hashes=names(1, 2, 3),
        parent_block_hash=None,
        token_ids=list(TOKENS),
        block_size=BLOCK_TOKENS,
        lora_id=None,
        medium=MEDIUM_CPU,
        lora_name="sql",
        group_idx=0,
        locality="LOCAL",
    )


def test_parent_of_a_later_chunk_is_named() -> None:
    """The hash of the block before the first one."""
    event = only(host_events([Insert(fact(3, 4, parent=2), "CPUMemory")], BLOCK_TOKENS))

    assert isinstance(event, BlockStored)
    assert [event.parent_block_hash] == names(2)


@pytest.mark.parametrize("shared", [1, 2])
def test_shared_blocks_are_not_announced_again(shared: int) -> None:
    """What a sibling announced stays out; the parent is then the last shared block."""
    inserted = Insert(fact(1, 2, 3, parent=9, shared=shared), "CPUMemory", TOKENS)

    event = only(host_events([inserted], BLOCK_TOKENS))

    assert isinstance(event, BlockStored)
    assert event.block_hashes == names(1, 2, 3)[shared:]
    assert [event.parent_block_hash] == names(shared)
    assert event.token_ids == list(TOKENS[shared * BLOCK_TOKENS :])


def test_delete_withdraws_only_what_nobody_else_holds() -> None:
    """A block that a sibling still holds can still be had."""
    event = only(host_events([Delete(fact(1, 2, 3, shared=1, group=1), "CPUMemory")], BLOCK_TOKENS))

    assert event == BlockRemoved(
        block_hashes=names(2, 3), medium=MEDIUM_CPU, group_idx=1, locality="LOCAL"
    )


@pytest.mark.parametrize("kind", [Insert, Delete])
def test_object_that_is_shared_as_a_whole_is_no_event(kind: type[Insert] | type[Delete]) -> None:
    """A tail that its chunk replaced begins and ends nothing."""
    assert host_events([kind(fact(1, 2, shared=2), "CPUMemory")], BLOCK_TOKENS) == []


def test_move_is_stored_and_then_removed() -> None:
    """A router never sees the moment in which the block is nowhere."""
    stored, removed = host_events([Move(fact(1, 2), "CPUMemory", "LocalNVMe")], BLOCK_TOKENS)

    assert isinstance(stored, BlockStored)
    assert isinstance(removed, BlockRemoved)
    assert (stored.medium, stored.locality) == (MEDIUM_STORAGE, "LOCAL")
    assert (removed.medium, removed.locality) == (MEDIUM_CPU, "LOCAL")
    assert stored.block_hashes == removed.block_hashes == names(1, 2)


def test_copy_is_stored_in_its_target() -> None:
    """The source keeps its own."""
    event = only(host_events([Copy(fact(1), "LocalNVMe", "CPUMemory")], BLOCK_TOKENS))

    assert isinstance(event, BlockStored)
    assert event.medium == MEDIUM_CPU


def test_order_is_kept() -> None:
    """Facts in the order in which they became true."""
    facts = [
        Insert(fact(1), "CPUMemory"),
        Delete(fact(1), "CPUMemory"),
        Insert(fact(1), "CPUMemory"),
    ]

    kinds = [type(event) for event in host_events(facts, BLOCK_TOKENS)]

    assert kinds == [BlockStored, BlockRemoved, BlockStored]


def test_events_survive_the_hosts_wire() -> None:
    """What vLLM's publisher encodes, its subscribers decode to the same events."""
    events = host_events(
        [Insert(fact(1, 2), "CPUMemory", TOKENS[:8]), Delete(fact(3), "CPUMemory")], BLOCK_TOKENS
    )

    wire = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=events))

    assert msgspec.msgpack.decode(wire, type=KVEventBatch).events == events


def test_hashes_have_the_form_of_the_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that reads one form only loses a whole batch in which a hash has the other."""
    for setting, expected in (("1", names(7)[0]), ("0", stamp(7))):
        monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", setting)
        assert external_hash(stamp(7)) == expected


def test_own_tiers_are_no_secondary_ones_and_every_tier_has_its_own_name() -> None:
    """Routers pass over what has an owner, or give less for it; so only a shared tier has one."""
    tiers = {tier: tier_name(tier) for tier in TIER_NAMES}

    assert tiers["CPUMemory"] == (MEDIUM_CPU, "LOCAL", None)
    assert tiers["LocalNVMe"] == (MEDIUM_STORAGE, "LOCAL", None)
    assert tiers["DistributedFS"] == (MEDIUM_STORAGE, "REMOTE", "DistributedFS")
    assert len(set(tiers.values())) == len(tiers)


@pytest.mark.parametrize(
    "identity",
    [
        RequestIdentity(),
        RequestIdentity(cache_salt="tenant"),
        RequestIdentity(lora=LoraIdentity("sql", "/adapters/sql", "f")),
        RequestIdentity(multimodal=(MultimodalSpan("image", 3, 6), MultimodalSpan("other", 10, 1))),
        RequestIdentity(
            lora=LoraIdentity("sql", "/adapters/sql", "f"),
            cache_salt="tenant",
            multimodal=(MultimodalSpan("image", 2, 9),),
        ),
    ],
    ids=["plain", "salt", "adapter", "inputs", "all"],
)
@pytest.mark.parametrize("shared", [0, 1])
def test_whoever_hashes_a_stored_event_himself_comes_to_its_own_blocks(
    identity: RequestIdentity, shared: int
) -> None:
    """Adapter, salt and inputs are said with the tokens: equal tokens of two tenants differ."""
    chain = TokenChain(identity, BLOCK_TOKENS)
    chain.extend(TOKENS)
    about = ObjectFact(0, CHAIN_ROOT, b"".join(chain.hashes), shared)
    extra_keys = engine_extra_keys(
        identity, first_block=0, block_count=len(chain.hashes), block_tokens=BLOCK_TOKENS
    )
    name = identity.lora.name if identity.lora else None
    first = ObjectFact(0, CHAIN_ROOT, chain.hashes[0])
    consumer = EngineChain(lambda _: identity.lora)
    learned: list[bytes] = []
    for event in host_events(
        [
            Insert(first, "CPUMemory", TOKENS[:BLOCK_TOKENS], name, extra_keys[:1]),
            Copy(about, "CPUMemory", "LocalNVMe", TOKENS, name, extra_keys),
        ],
        BLOCK_TOKENS,
    ):
        assert isinstance(event, BlockStored)
        stored = StoredBlocks(
            group=0,
            tier=str(event.medium),
            block_hashes=event.block_hashes,
            parent=event.parent_block_hash,
            token_ids=event.token_ids,
            block_size=event.block_size,
            extra_keys=event.extra_keys,
            lora_name=event.lora_name,
        )
        learned += [told.fact.block_hashes for told in consumer.stored(stored)]

    assert b"".join(learned) == chain.hashes[0] + b"".join(chain.hashes[shared:])
