"""The messages of the native event channel, between an instance and whoever follows it.

An instance publishes `Batch` and `Heartbeat`; to a question it answers with the reply of the same
name, in one or several parts. All are msgpack arrays with a number for their kind. A `Batch` has
the next sequence number of its incarnation; a `Heartbeat` has none of its own, and names the last
batch, so that a lost last batch is noticed.
"""

from typing import Annotated, Final, TypeVar

import msgspec

from opal_connector.events.facts import Digest, KVCEvent, ObjectFact, ShortName
from opal_connector.keys import LoraIdentity
from opal_connector.keys.attention import RETENTIONS, AttentionGroup, AttentionLayout

FORMAT_VERSION: Final = 1
BUCKET_COUNT: Final = 256
MAX_PAYLOAD_BYTES: Final = 16 << 20
MAX_BATCH_EVENTS: Final = 8_192
NAMES_LIMIT: Final = 64

# What others compute with: neither negative nor infinite, and a number.
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_HeartbeatSeconds = Annotated[float, msgspec.Meta(gt=0, le=3_600)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Span = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
_Blocks = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
_Buckets = Annotated[bytes, msgspec.Meta(min_length=2_048, max_length=2_048)]


class TierDescription(msgspec.Struct, frozen=True, array_like=True):
    """One tier of an instance, as far as others must know it.

    What a persistent tier holds survives the process. `shared_id` names the medium of a shared tier
    for everybody who mounts it, and is empty for a tier of the instance alone.
    """

    name: ShortName
    is_persistent: bool = False
    shared_id: ShortName = ""


class GroupDescription(msgspec.Struct, frozen=True, array_like=True):
    """One attention group, as its facts name it; `kind` as in `AttentionKind`.

    What follows the kind need not be said by an instance whose only group looks back on
    everything. `block_tokens` 0 is the description's own; the rest as in `AttentionGroup`.
    """

    group: int
    kind: ShortName
    block_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    kv_groups: Annotated[tuple[int, ...], msgspec.Meta(max_length=NAMES_LIMIT)] = ()
    span_tokens: _Span = 0
    extra_tokens: _Span = 0
    is_draft: bool = False

    def attention(self, block_tokens: int) -> AttentionGroup | None:
        """What it looks back on, where blocks of the instance are hashed by `block_tokens`.

        None where that is not known: then nobody can say what of it must be there.
        """
        size = self.block_tokens or block_tokens
        if size % block_tokens or self.kind not in RETENTIONS:
            return None
        group = AttentionGroup(
            kind=self.kind,
            block_tokens=size,
            kv_groups=self.kv_groups or (self.group,),
            span_tokens=self.span_tokens,
            extra_tokens=self.extra_tokens,
            is_draft=self.is_draft,
        )
        needs_span = group.retention in ("window", "chunk")
        return group if self.span_tokens or not needs_span else None


def describe_layout(layout: AttentionLayout) -> tuple[GroupDescription, ...]:
    """The groups of a layout, by their positions in it."""
    if layout.is_plain:
        return (GroupDescription(0, layout.groups[0].kind),)
    return tuple(
        GroupDescription(
            position,
            group.kind,
            group.block_tokens,
            group.kv_groups,
            group.span_tokens,
            group.extra_tokens,
            group.is_draft,
        )
        for position, group in enumerate(layout.groups)
    )


class InstanceDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Who publishes, and what a consumer needs to make sense of it.

    `instance_id` outlives a restart, `incarnation` does not. Prompts are hashed by `block_tokens`,
    of which the blocks of every group are a multiple. `adapters` are those seen so far: their names
    alone do not tell two of them apart.
    """

    instance_id: ShortName
    incarnation: int
    model: ShortName
    block_tokens: _Tokens
    chunk_blocks: _Blocks = 1
    namespace: Digest = b""
    tiers: Annotated[tuple[TierDescription, ...], msgspec.Meta(max_length=NAMES_LIMIT)] = ()
    groups: Annotated[tuple[GroupDescription, ...], msgspec.Meta(max_length=NAMES_LIMIT)] = (
        GroupDescription(0, "full_attention"),
    )
    adapters: Annotated[tuple[LoraIdentity, ...], msgspec.Meta(max_length=4_096)] = ()


class TierLoad(msgspec.Struct, frozen=True, array_like=True):
    """How full a tier is, and how fast it was; None where nothing was measured yet.

    A capacity of 0 is that of a tier that limits itself.
    """

    tier: ShortName
    used_bytes: _Count
    capacity_bytes: _Count
    load_seconds_per_byte: _Amount | None = None
    store_seconds_per_byte: _Amount | None = None


class SystemEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The load of an instance now.

    `queue_depth` counts all requests that are not finished, `device_usage` is the part of the
    device's KV blocks in use. `prefill_tokens_per_second` is None until it was measured;
    `chunk_bytes` is what one chunk of all groups takes in a tier.
    """

    queue_depth: _Count = 0
    running: _Count = 0
    waiting: _Count = 0
    device_usage: _Amount = 0.0
    prefill_tokens_per_second: _Amount | None = None
    chunk_bytes: _Count = 0
    tiers: Annotated[tuple[TierLoad, ...], msgspec.Meta(max_length=NAMES_LIMIT)] = ()


class TierDigest(msgspec.Struct, frozen=True, array_like=True):
    """A fingerprint of the blocks that one tier holds of one attention group.

    A block falls into the bucket of its hash's first byte; a bucket is the XOR of the first eight
    bytes of its hashes as little-endian integers. While `is_complete` is false the tier is still
    finding out what it holds from before, and what is missing is not gone.
    """

    group: int
    tier: ShortName
    block_count: int
    buckets: _Buckets
    is_complete: bool = True


Digests = Annotated[tuple[TierDigest, ...], msgspec.Meta(max_length=1_024)]


# ---- published ----


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    version: int


class Batch(_Message, frozen=True, tag=1):
    """Events in the order in which they became true. `published_at` is wall time, for reports."""

    instance_id: ShortName
    model: ShortName
    incarnation: int
    sequence: int
    published_at: float
    block_tokens: int
    events: Annotated[tuple[KVCEvent, ...], msgspec.Meta(max_length=MAX_BATCH_EVENTS)]


class Heartbeat(_Message, frozen=True, tag=2):
    """Load and digests after batch `sequence` (-1: none yet).

    `revision` grows whenever the description has changed.
    """

    instance_id: ShortName
    incarnation: int
    sequence: int
    published_at: float
    revision: int
    system: SystemEvent
    digests: Digests


Published = Batch | Heartbeat


# ---- questions ----


class AskDescription(_Message, frozen=True, tag=10):
    """Who are you?"""

    request_id: int


class AskReplay(_Message, frozen=True, tag=11):
    """All batches from `first_sequence` on that you still have."""

    request_id: int
    first_sequence: int


class AskDigests(_Message, frozen=True, tag=12):
    """The digests of all tiers, now."""

    request_id: int


class AskContents(_Message, frozen=True, tag=13):
    """What one tier holds of one group, of some buckets (numbers as bytes) or, empty, of all."""

    request_id: int
    group: int
    tier: ShortName
    buckets: Annotated[bytes, msgspec.Meta(max_length=BUCKET_COUNT)] = b""


Question = AskDescription | AskReplay | AskDigests | AskContents


# ---- replies ----


class Description(_Message, frozen=True, tag=20):
    """Who publishes where.

    `publish_endpoint` may name no host (`tcp://*:5602`): then it is the host that was asked.
    """

    request_id: int
    instance: InstanceDescription
    publish_endpoint: str
    heartbeat_seconds: _HeartbeatSeconds
    revision: int
    sequence: int


class Replay(_Message, frozen=True, tag=21):
    """Encoded batches in order; an end without any says that the first one is not kept any more.

    `part` counts the parts of one answer from 0, so that one that is lost is noticed.
    """

    request_id: int
    incarnation: int
    batches: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_BATCH_EVENTS)]
    is_last: bool
    part: int = 0


class DigestsNow(_Message, frozen=True, tag=22):
    """Digests as they were after batch `sequence`."""

    request_id: int
    incarnation: int
    sequence: int
    digests: Digests


class Contents(_Message, frozen=True, tag=23):
    """A part of what a tier holds.

    It is true at batch `sequence` or later: whoever applies it goes on with the batches behind
    that, all of them, and is right then. `shared_blocks` is 0; blocks may be named twice. Where
    buckets were asked for, facts are single blocks. `is_complete` as in `TierDigest`, `part` as in
    `Replay`.
    """

    request_id: int
    incarnation: int
    sequence: int
    facts: Annotated[tuple[ObjectFact, ...], msgspec.Meta(max_length=1 << 17)]
    is_last: bool
    is_complete: bool = True
    part: int = 0


class Refused(_Message, frozen=True, tag=24):
    """The question cannot be answered; `reason` is for a person."""

    request_id: int
    reason: str


Reply = Description | Replay | DigestsNow | Contents | Refused

_Kind = TypeVar("_Kind", bound=_Message)

_encoder = msgspec.msgpack.Encoder()
_published = msgspec.msgpack.Decoder(Published)
_question = msgspec.msgpack.Decoder(Question)
_reply = msgspec.msgpack.Decoder(Reply)


class MessageError(ValueError):
    """A message that this version cannot read; the text says why."""


def encode_message(message: Published | Question | Reply) -> bytes:
    """The wire form of a message."""
    return _encoder.encode(message)


def decode_published(payload: bytes) -> Published:
    """Read a published message.

    Raises:
        MessageError: It is too long, malformed, or of another format version.
    """
    return _decoded(_published, payload)


def decode_question(payload: bytes) -> Question:
    """Read a question; raises as `decode_published`."""
    return _decoded(_question, payload)


def decode_reply(payload: bytes) -> Reply:
    """Read a reply; raises as `decode_published`."""
    return _decoded(_reply, payload)


def _decoded(decoder: msgspec.msgpack.Decoder[_Kind], payload: bytes) -> _Kind:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MessageError(f"{len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are read")
    try:
        message = decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MessageError(f"not a message of the event channel: {error}") from error
    if message.version != FORMAT_VERSION:
        raise MessageError(f"format version {message.version}, this reads {FORMAT_VERSION}")
    return message
