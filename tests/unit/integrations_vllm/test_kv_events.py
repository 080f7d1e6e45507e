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
from opal_connector.keys.attention import AttentionGroup, AttentionLayout, plain_layout

pytestmark = pytest.mark.vllm

BLOCK_TOKENS = 4
LAYOUT = plain_layout(BLOCK_TOKENS)
WINDOWED = AttentionGroup(
    kind="sliding_window", block_tokens=2 * BLOCK_TOKENS, kv_groups=(0, 1), span_tokens=9
)
HYBRID = AttentionLayout(
    (
        AttentionGroup(block_tokens=BLOCK_TOKENS, kv_groups=(3,)),
        WINDOWED,
        AttentionGroup(kind="mamba", block_tokens=BLOCK_TOKENS, kv_groups=(2,)),
    )
)
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
    event = only(host_events([Insert(fact(1, 2, 3), "CPUMemory", TOKENS, "sql")], LAYOUT))

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
    event = only(host_events([Insert(fact(3, 4, parent=2), "CPUMemory")], LAYOUT))

    assert isinstance(event, BlockStored)
    assert [event.parent_block_hash] == names(2)


@pytest.mark.parametrize("shared", [1, 2])
def test_shared_blocks_are_not_announced_again(shared: int) -> None:
    """What a sibling announced stays out; the parent is then the last shared block."""
    inserted = Insert(fact(1, 2, 3, parent=9, shared=shared), "CPUMemory", TOKENS)

    event = only(host_events([inserted], LAYOUT))

    assert isinstance(event, BlockStored)
    assert event.block_hashes == names(1, 2, 3)[shared:]
    assert [event.parent_block_hash] == names(shared)
    assert event.token_ids == list(TOKENS[shared * BLOCK_TOKENS :])


def test_delete_withdraws_only_what_nobody_else_holds() -> None:
    """A block that a sibling still holds can still be had."""
    event = only(host_events([Delete(fact(1, 2, 3, shared=1), "CPUMemory")], LAYOUT))

    assert event == BlockRemoved(
        block_hashes=names(2, 3), medium=MEDIUM_CPU, group_idx=0, locality="LOCAL"
    )


def test_an_object_of_several_kv_groups_is_announced_for_each_by_the_engines_own_number() -> None:
    """Who follows vLLM's groups finds the tiers' blocks in the same ones, of the same kind."""
    inserted = Insert(fact(5, 6, parent=4, group=1), "CPUMemory", tuple(range(16)))
    events = host_events([inserted, Delete(fact(5, 6, group=1), "CPUMemory")], HYBRID)

    assert [(type(event), event.group_idx) for event in events] == [
        *((BlockStored, 0), (BlockStored, 1), (BlockRemoved, 0), (BlockRemoved, 1))
    ]
    for event in events[:2]:
        assert isinstance(event, BlockStored)
        assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == (
            "sliding_window",
            9,
        )
        assert (event.block_size, event.token_ids) == (8, list(range(16)))
        assert event.block_hashes == names(5, 6)
        assert [event.parent_block_hash] == names(4), "whether or not the parent is there"


@pytest.mark.parametrize(("group", "number", "kind"), [(0, 3, "full_attention"), (2, 2, "mamba")])
def test_groups_without_a_window_say_their_kind_alone(group: int, number: int, kind: str) -> None:
    """A window of something else would be taken for a window."""
    event = only(host_events([Insert(fact(1, group=group), "CPUMemory")], HYBRID))

    assert isinstance(event, BlockStored)
    assert (event.group_idx, event.kv_cache_spec_kind) == (number, kind)
    assert event.kv_cache_spec_sliding_window is None


def test_events_of_a_dense_model_say_nothing_that_they_did_not_say_before() -> None:
    """Every consumer of a dense model's stream goes on as it was, byte for byte."""
    events = host_events([Insert(fact(1), "CPUMemory", (1, 2, 3, 4))], LAYOUT)

    (said,) = msgspec.msgpack.decode(msgspec.msgpack.encode(events))
    assert "kv_cache_spec_kind" not in said
    assert "kv_cache_spec_sliding_window" not in said
    assert said["group_idx"] == 0


@pytest.mark.parametrize("kind", [Insert, Delete])
def test_object_that_is_shared_as_a_whole_is_no_event(kind: type[Insert] | type[Delete]) -> None:
    """A tail that its chunk replaced begins and ends nothing."""
    assert host_events([kind(fact(1, 2, shared=2), "CPUMemory")], LAYOUT) == []


def test_move_is_stored_and_then_removed() -> None:
    """A router never sees the moment in which the block is nowhere."""
    stored, removed = host_events([Move(fact(1, 2), "CPUMemory", "LocalNVMe")], LAYOUT)

    assert isinstance(stored, BlockStored)
    assert isinstance(removed, BlockRemoved)
    assert (stored.medium, stored.locality) == (MEDIUM_STORAGE, "LOCAL")
    assert (removed.medium, removed.locality) == (MEDIUM_CPU, "LOCAL")
    assert stored.block_hashes == removed.block_hashes == names(1, 2)


def test_copy_is_stored_in_its_target() -> None:
    """The source keeps its own."""
    event = only(host_events([Copy(fact(1), "LocalNVMe", "CPUMemory")], LAYOUT))

    assert isinstance(event, BlockStored)
    assert event.medium == MEDIUM_CPU


def test_order_is_kept() -> None:
    """Facts in the order in which they became true."""
    facts = [
        Insert(fact(1), "CPUMemory"),
        Delete(fact(1), "CPUMemory"),
        Insert(fact(1), "CPUMemory"),
    ]

    kinds = [type(event) for event in host_events(facts, LAYOUT)]

    assert kinds == [BlockStored, BlockRemoved, BlockStored]


def test_events_survive_the_hosts_wire() -> None:
    """What vLLM's publisher encodes, its subscribers decode to the same events."""
    events = host_events(
        [Insert(fact(1, 2), "CPUMemory", TOKENS[:8]), Delete(fact(3), "CPUMemory")], LAYOUT
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
        LAYOUT,
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
