"""What an engine's process and the process with Mooncake's library say to each other.

A message is its length (4 bytes) and a MessagePack array; a file travels beside the first byte.
Values never travel: both processes map the memory that they lie in.
"""

import socket
import struct
import time
from typing import Final

import msgspec

_LENGTH: Final = struct.Struct("<I")
_FILES_AT_ONCE: Final = 1

# Codes of the library that are of interest; it has more.
NO_SPACE: Final = -200
NOT_READY: Final = -703
NOT_FOUND: Final = -704
ALREADY_THERE: Final = -705
LEASE_EXPIRED: Final = -707
REPLICA_NOT_FOUND: Final = -710
REPLICA_GONE: Final = -712
RPC_TIMEOUT: Final = -901
# Our own.
OTHER_SIZE: Final = -100_001
BROKEN: Final = -100_002


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A range of memory that both processes map; `memory` is its number."""

    memory: int
    offset: int
    size_bytes: int


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A range of a value, and the pieces that it fills, in order."""

    offset: int
    pieces: list[Piece]


class Setup(msgspec.Struct, frozen=True, tag="setup", array_like=True):
    """The first message: how to reach the store."""

    master: str
    metadata: str
    protocol: str
    device: str
    local_host: str
    segment_bytes: int
    buffer_bytes: int
    replicas: int


class AddMemory(msgspec.Struct, frozen=True, tag="memory", array_like=True):
    """Map the file that comes along under this number, and register it with the library."""

    memory: int
    size_bytes: int


class RemoveMemory(msgspec.Struct, frozen=True, tag="no-memory", array_like=True):
    """Forget the memory with this number, which nobody uses any more."""

    memory: int


class AddChannel(msgspec.Struct, frozen=True, tag="channel", array_like=True):
    """Answer the calls that come through the socket that comes along."""


class Put(msgspec.Struct, frozen=True, tag="put", array_like=True):
    """Store these pieces as one value."""

    key: str
    pieces: list[Piece]
    seconds: float


class Get(msgspec.Struct, frozen=True, tag="get", array_like=True):
    """Fill these parts of a value of `size_bytes`."""

    key: str
    size_bytes: int
    parts: list[Part]


class GetStart(msgspec.Struct, frozen=True, tag="start", array_like=True):
    """Fill the piece with the start of a value; the answer says how many bytes."""

    key: str
    piece: Piece


class Present(msgspec.Struct, frozen=True, tag="present", array_like=True):
    """Which of these values there are: a code each, 1 for yes."""

    keys: list[str]


class Remove(msgspec.Struct, frozen=True, tag="remove", array_like=True):
    """Remove these values: a code each."""

    keys: list[str]


class RemoveMatching(msgspec.Struct, frozen=True, tag="matching", array_like=True):
    """Remove the values whose keys a regular expression finds."""

    pattern: str


Call = Put | Get | GetStart | Present | Remove | RemoveMatching
Request = Setup | AddMemory | RemoveMemory | AddChannel | Call


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Codes of the library: below 0 is a failure. `text` says more, if there is more to say."""

    codes: list[int]
    text: str = ""


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_answer_decoder = msgspec.msgpack.Decoder(Answer)


def send(channel: socket.socket, message: Request | Answer, file: int | None = None) -> None:
    """Send a message, and a file with it. The channel's timeout holds for the whole."""
    payload = _encoder.encode(message)
    data = _LENGTH.pack(len(payload)) + payload
    if file is not None:
        sent = socket.send_fds(channel, [data], [file])
        data = data[sent:]
    channel.sendall(data)


def receive_request(channel: socket.socket) -> tuple[Request, int | None]:
    """The next request and the file that came with it.

    Raises:
        EOFError: The other side is gone.
    """
    data, files, _, _ = socket.recv_fds(channel, _LENGTH.size, _FILES_AT_ONCE)
    data += _receive(channel, _LENGTH.size - len(data), None)
    payload = _receive(channel, _LENGTH.unpack(data)[0], None)
    return _request_decoder.decode(payload), files[0] if files else None


def receive_answer(channel: socket.socket, deadline: float) -> Answer:
    """The answer to the request sent last.

    Raises:
        TimeoutError: It did not come by `deadline`, a time of `time.monotonic`.
        EOFError: The other side is gone.
    """
    (size,) = _LENGTH.unpack(_receive(channel, _LENGTH.size, deadline))
    return _answer_decoder.decode(_receive(channel, size, deadline))


def _receive(channel: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            channel.settimeout(max(0.001, deadline - time.monotonic()))
        more = channel.recv(size - len(data))
        if not more:
            raise EOFError("the other side is gone")
        data += more
    return bytes(data)
