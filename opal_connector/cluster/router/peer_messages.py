"""What the processes of one router tell each other, and how it becomes bytes."""

import asyncio
from typing import Final

import msgspec

from opal_connector.cluster.router.config import InstanceConfig
from opal_connector.cluster.router.dashboard_rings import SentRequest

_LENGTH_BYTES: Final = 4
_LONGEST_FRAME: Final = 64 << 20


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Which process it is that speaks, once at the beginning."""

    number: int


class ChainSent(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of a prompt that a worker is about to have, 32 bytes each."""

    model: str
    block_tokens: int
    hashes: bytes


class Began(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A request was sent to a worker.

    The session is bytes, since a header of a client need not be UTF-8.
    """

    request_id: str
    worker_id: str
    new_tokens: int
    total_tokens: int
    session: bytes | None
    chains: tuple[ChainSent, ...]


class Computed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A request's prompt is computed."""

    request_id: str


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A request is over."""

    request_id: str
    is_computed: bool


class Finished(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """What became of an attempt, for the page."""

    request: SentRequest


class Standing(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """What an administrator wants, as of `changed_at` (Unix time); the latest one counts."""

    changed_at: float
    policy: str
    instances: tuple[InstanceConfig, ...]
    draining: tuple[str, ...]


class Measured(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """How many of a request's prompt tokens were computed, as its answer says."""

    request_id: str
    new_tokens: int


Message = Hello | Began | Computed | Ended | Finished | Standing | Measured

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)


def encode_frame(message: Message) -> bytes:
    """A message with its length before it."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


async def read_frame(reader: asyncio.StreamReader) -> Message:
    """The next message.

    Raises:
        EOFError: There is none any more.
        ValueError: It is none of ours.
    """
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if length > _LONGEST_FRAME:
        raise ValueError(f"a message of {length} bytes")
    return _decoder.decode(await reader.readexactly(length))
