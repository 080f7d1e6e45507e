"""vLLM's KV events as engines of all versions send them, read by name and without trust.

Newer engines send maps with a `type`, older ones arrays that begin with it; fields have been added
at the end of both, and more will be. What is not known is left out and counted.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from opal_connector.cluster.engine_lineage import EngineHash
from opal_connector.events.channel import MAX_PAYLOAD_BYTES, MessageError
from opal_connector.events.facts import DEVICE_TIER

MAX_EVENTS: Final = 65_536
_NAME_LENGTH: Final = 256
_WINDOW_LIMIT: Final = 1 << 32
_UNKNOWN_TIER: Final = "unknown"
_DEVICE_MEDIUM: Final = "GPU"

# Arrays have these fields in this order, behind the type.
_STORED_FIELDS: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")


class EngineStored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that follow each other are in a tier.

    `kind` is that of their kv group, if it says, and `window_tokens` its sliding window.
    """

    block_hashes: Sequence[EngineHash]
    parent: EngineHash | None
    token_ids: Sequence[int]
    block_size: int
    tier: str
    group: int
    kind: str | None
    lora_name: str | None
    extra_keys: Sequence[Sequence[Any] | None] | None
    window_tokens: int = 0


class EngineRemoved(msgspec.Struct, frozen=True, gc=False):
    """Blocks have left a tier."""

    block_hashes: Sequence[EngineHash]
    tier: str
    group: int


class EngineCleared(msgspec.Struct, frozen=True, gc=False):
    """The device is empty. Other tiers are not meant: vLLM keeps them over a reset."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared


class EngineBatch(msgspec.Struct, frozen=True):
    """The events of one step of one rank; some may be of unknown kinds or malformed."""

    rank: int | None
    events: list[EngineEvent]
    unknown_events: int = 0
    malformed_events: int = 0


_decoder = msgspec.msgpack.Decoder()


def decode_engine_batch(payload: bytes) -> EngineBatch:
    """Read a payload.

    Raises:
        MessageError: It is too long or no batch; single events that cannot be read are counted.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MessageError(f"{len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are read")
    try:
        raw = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise MessageError(f"not msgpack: {error}") from error
    if not isinstance(raw, list) or len(raw) < 2 or not isinstance(raw[1], list):
        raise MessageError("a batch is an array of a time, events and a rank")
    if len(raw[1]) > MAX_EVENTS:
        raise MessageError(f"{len(raw[1])} events, at most {MAX_EVENTS} are read")
    rank = raw[2] if len(raw) > 2 else None
    events: list[EngineEvent] = []
    unknown = malformed = 0
    for item in raw[1]:
        try:
            event = _event(item)
        except (TypeError, ValueError):
            malformed += 1
            continue
        if event is None:
            unknown += 1
        else:
            events.append(event)
    if not isinstance(rank, int) or not 0 <= rank < 1 << 16:
        rank = None
    return EngineBatch(rank, events, unknown, malformed)


def _event(item: Any) -> EngineEvent | None:
    """One event; None where its kind is not known.

    Raises:
        ValueError: It is of a known kind and not what that is.
    """
    if isinstance(item, dict):
        kind, fields = item.get("type"), item
    elif isinstance(item, list) and item:
        kind = item[0]
        names = _STORED_FIELDS if kind == "BlockStored" else _REMOVED_FIELDS
        fields = dict(zip(names, item[1:], strict=False))
    else:
        raise ValueError("neither a map nor an array")
    if kind == "BlockStored":
        return _stored(fields)
    if kind == "BlockRemoved":
        return EngineRemoved(_hashes(fields), tier_of(fields), _group(fields))
    if kind == "AllBlocksCleared":
        return EngineCleared()
    return None


def _stored(fields: dict[str, Any]) -> EngineStored:
    token_ids = fields.get("token_ids") or []
    block_size = fields.get("block_size") or 0
    extra_keys = fields.get("extra_keys")
    kind, window = fields.get("kv_cache_spec_kind"), fields.get("kv_cache_spec_sliding_window")
    is_extra = extra_keys is None or isinstance(extra_keys, list)
    if not isinstance(token_ids, list) or not isinstance(block_size, int) or not is_extra:
        raise ValueError("tokens, block size or extra keys are of another type")
    hashes = _hashes(fields)
    if extra_keys is not None and len(extra_keys) < len(hashes):
        raise ValueError("fewer extra keys than blocks")
    parent = fields.get("parent_block_hash")
    if parent is not None and not _is_hash(parent):
        raise ValueError("the parent is no hash")
    return EngineStored(
        hashes,
        parent,
        token_ids,
        block_size,
        tier_of(fields),
        _group(fields),
        kind[:_NAME_LENGTH] if isinstance(kind, str) else None,
        _adapter(fields),
        extra_keys,
        window if isinstance(window, int) and 0 < window < _WINDOW_LIMIT else 0,
    )


def tier_of(fields: dict[str, Any]) -> str:
    """The tier that an event is about; only what says so, or says nothing, is the device."""
    medium, owner = fields.get("medium"), fields.get("ownership")
    if medium is None or (isinstance(medium, str) and medium.upper() == _DEVICE_MEDIUM):
        return DEVICE_TIER
    named = owner if isinstance(owner, str) and owner not in ("", DEVICE_TIER) else medium
    name = str(named)[:_NAME_LENGTH]
    return name if name and name != DEVICE_TIER else _UNKNOWN_TIER


def _adapter(fields: dict[str, Any]) -> str | None:
    name, number = fields.get("lora_name"), fields.get("lora_id")
    if isinstance(name, str):
        return name
    # An older engine's adapter has a number only. Nobody can ask for it by name, and what it
    # computed must not be taken for what the model alone computes.
    return None if number is None else f"lora_id:{number}"


def _group(fields: dict[str, Any]) -> int:
    group = fields.get("group_idx")
    if group is None:
        return 0
    if not isinstance(group, int) or not 0 <= group < 1 << 16:
        raise ValueError("the group is no small number")
    return group


def _hashes(fields: dict[str, Any]) -> list[EngineHash]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not all(map(_is_hash, hashes)):
        raise ValueError("block hashes are integers or bytes")
    return hashes


def _is_hash(value: Any) -> bool:
    if isinstance(value, bytes):
        return len(value) <= 64
    return isinstance(value, int) and not isinstance(value, bool)
