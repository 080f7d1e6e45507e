"""vLLM's events of all versions, and what is made of those that are none."""

from typing import Any

import msgspec
import pytest

from opal_connector.cluster.ingest.vllm_wire import (
    EngineCleared,
    EngineRemoved,
    EngineStored,
    decode_engine_batch,
    tier_of,
)
from opal_connector.events import DEVICE_TIER
from opal_connector.events.channel import MAX_PAYLOAD_BYTES, MessageError

pack = msgspec.msgpack.Encoder().encode
STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [11],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


def decoded(*events: Any, rank: Any = None) -> Any:
    return decode_engine_batch(pack([1.0, list(events), rank]))


def test_maps_and_arrays_say_the_same() -> None:
    """Newer engines send maps, older ones arrays; both are in the field."""
    as_map = decoded(STORED).events
    as_array = decoded(["BlockStored", [11], None, [1, 2], 2, None, "GPU", None]).events
    oldest = decoded(["BlockStored", [11], None, [1, 2], 2, None]).events

    assert as_map == as_array == oldest
    assert as_map == [EngineStored([11], None, [1, 2], 2, DEVICE_TIER, 0, None, None, None)]


def test_hashes_are_integers_or_bytes() -> None:
    (event,) = decoded(STORED | {"block_hashes": [b"x" * 32], "parent_block_hash": 5}).events

    assert event.block_hashes == [b"x" * 32]
    assert event.parent == 5


def test_removals_and_resets_are_read_in_both_forms() -> None:
    batch = decoded(
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "group_idx": 2},
        ["BlockRemoved", [1], "CPU", 2],
        ["BlockRemoved", [1]],
        {"type": "AllBlocksCleared"},
        ["AllBlocksCleared"],
    )

    removed = EngineRemoved([1], "CPU", 2)
    assert batch.events[:3] == [removed, removed, EngineRemoved([1], DEVICE_TIER, 0)]
    assert batch.events[3:] == [EngineCleared(), EngineCleared()]


def test_unknown_fields_are_passed_over_and_unknown_events_counted() -> None:
    """A new version of an engine must not silence all that is still understood."""
    batch = decoded(
        STORED | {"session_id": "s", "novel": [1]}, {"type": "BlockMoved"}, ["Novel", 1]
    )

    assert len(batch.events) == 1
    assert batch.unknown_events == 2
    assert batch.malformed_events == 0


@pytest.mark.parametrize(
    ("medium", "owner", "tier"),
    [
        (None, None, DEVICE_TIER),
        ("GPU", None, DEVICE_TIER),
        ("CPU", None, "CPU"),
        ("STORAGE", None, "STORAGE"),
        ("STORAGE", "LocalNVMe", "LocalNVMe"),
        ("CPU", DEVICE_TIER, "CPU"),
        ("HBM9", None, "HBM9"),
        ("", None, "unknown"),
        (DEVICE_TIER, None, "unknown"),
        (7, None, "7"),
    ],
)
def test_only_what_is_the_device_counts_as_the_device(
    medium: Any, owner: str | None, tier: str
) -> None:
    """An unknown medium counted as the fastest one attracts requests to what is not there."""
    assert tier_of({"medium": medium, "ownership": owner}) == tier


def test_an_adapter_known_by_number_only_is_not_the_model_alone() -> None:
    (event,) = decoded(STORED | {"lora_id": 3}).events

    assert event.lora_name == "lora_id:3"


@pytest.mark.parametrize("rank", [None, 0, 3])
def test_the_rank_is_that_of_the_batch(rank: int | None) -> None:
    """Ranks hold different blocks; taken for one worker each of them is credited with all."""
    assert decoded(STORED, rank=rank).rank == rank


@pytest.mark.parametrize(
    "event",
    [
        STORED | {"block_hashes": ["text"]},
        STORED | {"block_hashes": [b"x" * 65]},
        STORED | {"token_ids": "text"},
        STORED | {"block_size": "16"},
        STORED | {"group_idx": -1},
        STORED | {"parent_block_hash": [1]},
        STORED | {"extra_keys": []},
        ["BlockRemoved"],
        17,
        [],
    ],
    ids=repr,
)
def test_a_malformed_event_is_counted_and_the_others_are_read(event: Any) -> None:
    batch = decoded(event, STORED)

    assert batch.malformed_events == 1
    assert len(batch.events) == 1


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", pack(5), pack([1.0]), pack([1.0, "events"]), b"\x91" * 5_000],
    ids=["empty", "no msgpack", "a number", "no events", "text", "deep"],
)
def test_a_payload_that_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(MessageError):
        decode_engine_batch(payload)


def test_a_payload_beyond_the_limit_is_not_even_read() -> None:
    with pytest.raises(MessageError, match="at most"):
        decode_engine_batch(b"\xc0" * (MAX_PAYLOAD_BYTES + 1))
