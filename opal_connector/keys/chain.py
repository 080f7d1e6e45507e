"""The hash chain: one digest per block, each over its parent, its tokens and its extras.

`H_j = SHA-256(H_{j-1} || uint32-LE tokens of block j || canonical extras of block j)`. The block
length is fixed, so the three parts cannot be confused; extras are tagged and length-prefixed. The
chain is the same in every process, on every rank and in the router: it depends on nothing but
what is hashed.
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

import msgspec

HASH_BYTES = 32
CHAIN_ROOT = sha256(b"opal_connector/chain/1").digest()
_INPUT_ROOT = b"opal_connector/encoder_input/1"
_TAG_LORA = b"\x01"
_TAG_MULTIMODAL = b"\x02"
_TAG_CACHE_SALT = b"\x03"


class LoraIdentity(msgspec.Struct, frozen=True):
    """What makes two adapters different: name, path and a fingerprint of the weights."""

    name: str
    path: str
    fingerprint: str


class MultimodalSpan(msgspec.Struct, frozen=True):
    """One multimodal input: its content identifier and the tokens that stand for it."""

    identifier: str
    offset_tokens: int
    length_tokens: int


class RequestIdentity(msgspec.Struct, frozen=True):
    """Everything besides the tokens that decides what a request's KV holds, or who may see it."""

    lora: LoraIdentity | None = None
    cache_salt: str | None = None
    multimodal: tuple[MultimodalSpan, ...] = ()


ExtraKeys = tuple[str | tuple[str, int], ...]  # of one block
_PLAIN = RequestIdentity()


def _tagged(tag: bytes, *parts: bytes) -> bytes:
    body = b"".join(struct.pack("<I", len(part)) + part for part in parts)
    return tag + struct.pack("<I", len(body)) + body


def canonical_extras(identity: RequestIdentity, *, block_index: int, block_tokens: int) -> bytes:
    """Bytes that tell apart equal tokens of block `block_index` with different identities.

    Adapter and salt go into block 0 only: the chain carries them to every later block.
    """
    parts: list[bytes] = []
    if block_index == 0:
        if identity.lora is not None:
            lora = identity.lora
            parts.append(
                _tagged(
                    _TAG_LORA, lora.name.encode(), lora.path.encode(), lora.fingerprint.encode()
                )
            )
        if identity.cache_salt is not None:
            parts.append(_tagged(_TAG_CACHE_SALT, identity.cache_salt.encode()))
    start = block_index * block_tokens
    end = start + block_tokens
    for span in identity.multimodal:
        if span.offset_tokens < end and span.offset_tokens + span.length_tokens > start:
            relative = struct.pack("<q", span.offset_tokens - start)
            parts.append(_tagged(_TAG_MULTIMODAL, span.identifier.encode(), relative))
    return b"".join(parts)


def engine_extra_keys(
    identity: RequestIdentity, *, first_block: int, block_count: int, block_tokens: int
) -> tuple[ExtraKeys, ...]:
    """What vLLM's events say about blocks besides their tokens, empty where none has anything.

    Per block, in this order: the adapter's name, each multimodal input with its offset from the
    start of the block, and in block 0 the salt.
    """
    if identity == _PLAIN:
        return ()
    found: list[ExtraKeys] = []
    for index in range(first_block, first_block + block_count):
        start = index * block_tokens
        keys: list[str | tuple[str, int]] = []
        if identity.lora is not None:
            keys.append(identity.lora.name)
        keys += [
            (span.identifier, span.offset_tokens - start)
            for span in identity.multimodal
            if span.offset_tokens < start + block_tokens
            and span.offset_tokens + span.length_tokens > start
        ]
        if index == 0 and identity.cache_salt is not None:
            keys.append(identity.cache_salt)
        found.append(tuple(keys))
    return tuple(found) if any(found) else ()


def packed_tokens(tokens: Sequence[int]) -> bytes:
    """Tokens as uint32-LE bytes."""
    packed = array("I")
    packed.fromlist(tokens if isinstance(tokens, list) else list(tokens))  # faster than array(...)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def encoder_input_hashes(identifiers: Sequence[str], *, block_count: int) -> list[bytes]:
    """The block hashes of an encoder's input, named by what was put in, in its order."""
    parts = (_tagged(_TAG_MULTIMODAL, identifier.encode()) for identifier in identifiers)
    root = sha256(_INPUT_ROOT + b"".join(parts)).digest()
    return [sha256(root + struct.pack("<Q", index)).digest() for index in range(block_count)]


class TokenChain:
    """The block hashes of one token sequence that only grows.

    `input_hashes` are those of what an encoder reads, where a decoder attends to it.

    Mutable state: `hashes`. A chain belongs to one request and one thread.
    """

    __slots__ = ("_block_tokens", "_plain_after", "hashes", "identity", "input_hashes")

    def __init__(self, identity: RequestIdentity, block_tokens: int) -> None:
        self.identity = identity
        self._block_tokens = block_tokens
        last_span_end = max(
            (span.offset_tokens + span.length_tokens for span in identity.multimodal), default=0
        )
        # From this block on no extras exist, so the fast loop applies.
        self._plain_after = max(1, -(-last_span_end // block_tokens))
        self.hashes: list[bytes] = []
        self.input_hashes: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> int:
        """Hash the whole blocks of `tokens` that are not hashed yet.

        Args:
            tokens: The full sequence from its first token; what was hashed before is not read.

        Returns:
            The number of blocks hashed by this call.

        Raises:
            OverflowError: A token id is negative or above 2**32 - 1.
        """
        hashes = self.hashes
        block_tokens = self._block_tokens
        first = len(hashes)
        stop = len(tokens) // block_tokens
        if stop <= first:
            return 0
        raw = packed_tokens(tokens[first * block_tokens : stop * block_tokens])
        width = 4 * block_tokens
        parent = hashes[-1] if hashes else CHAIN_ROOT
        append = hashes.append
        index = first
        offset = 0
        while index < stop and index < self._plain_after:
            extras = canonical_extras(self.identity, block_index=index, block_tokens=block_tokens)
            parent = sha256(parent + raw[offset : offset + width] + extras).digest()
            append(parent)
            index += 1
            offset += width
        for begin in range(offset, len(raw), width):
            parent = sha256(parent + raw[begin : begin + width]).digest()
            append(parent)
        return stop - first
