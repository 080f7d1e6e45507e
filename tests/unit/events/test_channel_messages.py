"""The channel's messages survive the wire, and what is too big or foreign is refused."""

import msgspec
import pytest

from opal_connector.events import Copy, Delete, Insert, Move, ObjectFact
from opal_connector.events.channel import (
    FORMAT_VERSION,
    MAX_BATCH_EVENTS,
    MAX_PAYLOAD_BYTES,
    AskContents,
    AskDescription,
    AskDigests,
    AskReplay,
    Batch,
    Contents,
    Description,
    DigestsNow,
    Heartbeat,
    InstanceDescription,
    MessageError,
    Refused,
    Replay,
    SystemEvent,
    TierDescription,
    TierDigest,
    TierLoad,
    decode_published,
    decode_question,
    decode_reply,
    encode_message,
)
from opal_connector.keys import LoraIdentity

FACT = ObjectFact(0, b"p" * 32, b"a" * 32 + b"b" * 32, 1)
EVENTS = (
    Insert(FACT, "CPUMemory", (1, 2), "adapter"),
    Delete(FACT, "Device"),
    Move(FACT, "CPUMemory", "LocalNVMe", 1),
    Copy(FACT, "LocalNVMe", "DistributedFS"),
)
BATCH = Batch(FORMAT_VERSION, "a", "m", 7, 0, 1.5, 16, EVENTS)
DIGEST = TierDigest(0, "Device", 3, bytes(2048))
DESCRIPTION = InstanceDescription(
    instance_id="a",
    incarnation=7,
    model="m",
    block_tokens=16,
    tiers=(TierDescription("DistributedFS", is_persistent=True, shared_id="x"),),
    adapters=(LoraIdentity("n", "p", "f"),),
)


@pytest.mark.parametrize(
    "message",
    [
        BATCH,
        Heartbeat(
            FORMAT_VERSION,
            "a",
            7,
            -1,
            1.5,
            0,
            SystemEvent(queue_depth=3, tiers=(TierLoad("CPUMemory", 1, 2, 1e-9),)),
            (DIGEST,),
        ),
    ],
)
def test_published_messages_survive_the_wire(message: Batch | Heartbeat) -> None:
    assert decode_published(encode_message(message)) == message


@pytest.mark.parametrize(
    "question",
    [
        AskDescription(FORMAT_VERSION, 1),
        AskReplay(FORMAT_VERSION, 1, 5),
        AskDigests(FORMAT_VERSION, 1),
        AskContents(FORMAT_VERSION, 1, 0, "Device", b"\x00\xff"),
    ],
)
def test_questions_survive_the_wire(question: AskDescription) -> None:
    assert decode_question(encode_message(question)) == question


@pytest.mark.parametrize(
    "reply",
    [
        Description(FORMAT_VERSION, 1, DESCRIPTION, "tcp://*:1", 1.0, 2, 3),
        Replay(FORMAT_VERSION, 1, 7, (encode_message(BATCH),), is_last=True),
        DigestsNow(FORMAT_VERSION, 1, 7, 3, (DIGEST,)),
        Contents(FORMAT_VERSION, 1, 7, 3, (FACT,), is_last=False),
        Refused(FORMAT_VERSION, 1, "no"),
    ],
)
def test_replies_survive_the_wire(reply: Description) -> None:
    assert decode_reply(encode_message(reply)) == reply


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 5_000,
        msgspec.msgpack.encode([99, FORMAT_VERSION]),
        encode_message(AskDigests(FORMAT_VERSION, 1)),
        bytes(MAX_PAYLOAD_BYTES + 1),
        encode_message(msgspec.structs.replace(BATCH, events=EVENTS * MAX_BATCH_EVENTS)),
        encode_message(msgspec.structs.replace(BATCH, model="m" * 300)),
        encode_message(
            msgspec.structs.replace(
                BATCH, events=(Delete(ObjectFact(0, b"p" * 33, b"", 0), "Device"),)
            )
        ),
    ],
    ids=[
        "empty",
        "not msgpack",
        "deep",
        "unknown",
        "a question",
        "long",
        "many events",
        "long name",
        "long digest",
    ],
)
def test_what_is_too_big_or_foreign_is_refused(payload: bytes) -> None:
    with pytest.raises(MessageError):
        decode_published(payload)


def test_another_format_version_is_named() -> None:
    later = msgspec.structs.replace(BATCH, version=FORMAT_VERSION + 1)
    with pytest.raises(MessageError, match=f"format version {FORMAT_VERSION + 1}"):
        decode_published(encode_message(later))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0, 1e9])
def test_a_heartbeat_interval_in_which_nobody_ever_goes_stale_is_refused(seconds: float) -> None:
    description = Description(FORMAT_VERSION, 1, DESCRIPTION, "tcp://*:1", seconds, 2, 3)
    with pytest.raises(MessageError):
        decode_reply(encode_message(description))


@pytest.mark.parametrize("name", ["block_tokens", "chunk_blocks"])
@pytest.mark.parametrize("count", [0, -1, 1 << 40])
def test_sizes_that_nobody_can_divide_by_are_refused(name: str, count: int) -> None:
    """One instance that says so would end every answer about all of them."""
    instance = msgspec.structs.replace(DESCRIPTION, **{name: count})
    description = Description(FORMAT_VERSION, 1, instance, "tcp://*:1", 1.0, 2, 3)
    with pytest.raises(MessageError):
        decode_reply(encode_message(description))


@pytest.mark.parametrize(
    "system",
    [
        SystemEvent(device_usage=float("nan")),
        SystemEvent(prefill_tokens_per_second=float("inf")),
        SystemEvent(queue_depth=-1),
        SystemEvent(tiers=(TierLoad("Device", 1, 2, -0.5),)),
    ],
    ids=["nan", "infinite", "negative", "negative speed"],
)
def test_a_load_that_nobody_can_compute_with_is_refused(system: SystemEvent) -> None:
    beat = Heartbeat(FORMAT_VERSION, "a", 1, 2, 0.0, 3, system, ())
    with pytest.raises(MessageError):
        decode_published(encode_message(beat))
