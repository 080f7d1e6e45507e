"""What the block hashes of an engine mean, as far as it can be computed."""

import struct
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any, Final

import msgspec

from opal_connector.events.channel import MAX_PAYLOAD_BYTES
from opal_connector.keys import (
    CHAIN_ROOT,
    LoraIdentity,
    MultimodalSpan,
    RequestIdentity,
    canonical_extras,
    packed_tokens,
)

EngineHash = int | bytes
UNKNOWN_PARENT: Final = bytes(32)  # of a block that is known by another size's name alone
_BLOCK_OVERHEAD_BYTES = 200  # of a parked block's hash and of what refers to it
_Adapters = Callable[[str], LoraIdentity | None]


class StoredBlocks(msgspec.Struct, frozen=True, gc=False):
    """An engine has stored blocks that follow each other.

    `extra_keys` as vLLM publishes them, one entry per block. `is_report` says whether the blocks
    were there already and are only named again; None is "cannot tell". Where fewer hashes than
    blocks are named some were left out, and nobody knows which. Who knows names them all, and in
    `present` the positions of those that are stored.
    """

    group: int
    tier: str
    block_hashes: Sequence[EngineHash]
    parent: EngineHash | None
    token_ids: Sequence[int]
    block_size: int
    extra_keys: Sequence[Sequence[Any] | None] | None = None
    lora_name: str | None = None
    is_report: bool | None = None
    present: Sequence[int] | None = None

    @property
    def stored_hashes(self) -> Sequence[EngineHash]:
        """The blocks that are stored."""
        if self.present is None:
            return self.block_hashes
        return [self.block_hashes[position] for position in self.present]


class _Adapter(msgspec.Struct, frozen=True):
    name: str


class _Parked(msgspec.Struct, frozen=True, gc=False):
    """An event that waits, for a block or for an adapter."""

    event: StoredBlocks
    waiting_for: EngineHash | _Adapter
    size_bytes: int


class Lineage:
    """The digests of blocks of one size, by engine hash; a digest is over `unit_tokens` at a time.

    An engine hash means the same prefix whatever the size of the block that ends there, so a block
    that cannot be named here takes the name that another size has found.
    What nobody holds any more is forgotten after the last `max_absent` of them: it may come back,
    or be named as a parent. Events that wait for an ancestor are bounded too, the oldest go first.
    Mutable state: all of it; used by one thread.
    """

    def __init__(
        self,
        block_tokens: int,
        unit_tokens: int,
        max_parked: int,
        max_parked_bytes: int,
        max_absent: int,
    ) -> None:
        self.links: dict[EngineHash, tuple[bytes, bytes]] = {}  # parent digest, digest
        self.dropped_events = 0
        self.undigestible_blocks = 0
        self._block_tokens = block_tokens
        self._unit_tokens = unit_tokens
        self._max_parked = max_parked
        self._max_parked_bytes = max_parked_bytes
        self._max_absent = max_absent
        self._absent: dict[EngineHash, None] = {}
        self._parked: dict[int, _Parked] = {}
        self._parked_bytes = 0
        self._next_key = 0
        self._waiting: dict[EngineHash | _Adapter, list[int]] = {}
        self._unnamed: dict[EngineHash, int] = {}  # a present block to the event that describes it
        self._unnamed_of: dict[int, int] = {}  # such blocks per event

    @property
    def parked_count(self) -> int:
        """Events that wait."""
        return len(self._parked)

    def present(self, block: EngineHash) -> None:
        """Somebody holds it."""
        self._absent.pop(block, None)

    def absent(self, block: EngineHash) -> None:
        """Nobody holds it any more."""
        if block in self.links:
            self._absent[block] = None
            if len(self._absent) > self._max_absent:
                oldest = next(iter(self._absent))
                del self._absent[oldest]
                del self.links[oldest]
        else:
            self._settle(block)

    def learn(self, event: StoredBlocks, adapters: _Adapters) -> list[EngineHash]:
        """Name the event's blocks, and what waited for them; returns what got a digest."""
        return self._with_waiting(self._name(event, adapters), adapters)

    def retry_adapter(self, name: str, adapters: _Adapters) -> list[EngineHash]:
        """Name what waited for an adapter."""
        return self._with_waiting(self._wake(_Adapter(name), adapters), adapters)

    def adopt(self, block: EngineHash, digest: bytes, adapters: _Adapters) -> list[EngineHash]:
        """Another size's lineage knows this block; returns what got a digest by that."""
        if block in self.links:
            return []
        self.links[block] = (UNKNOWN_PARENT, digest)
        self._settle(block)
        return self._with_waiting([block], adapters)

    def _with_waiting(self, linked: list[EngineHash], adapters: _Adapters) -> list[EngineHash]:
        for block in linked:  # it grows: what waited for one may name others in turn
            linked += self._wake(block, adapters)
        return linked

    # ---- naming ----

    def _name(self, event: StoredBlocks, adapters: _Adapters) -> list[EngineHash]:
        """Give digests to the blocks that follow something known; park the event for the rest."""
        links = self.links
        size = self._block_tokens
        if len(event.token_ids) != size * len(event.block_hashes):
            # Some blocks were left out, or no tokens were given: nothing new can be known.
            return []
        lora = adapters(event.lora_name) if event.lora_name is not None else None
        if event.lora_name is not None and event.parent is None and lora is None:
            self._park(event, _Adapter(event.lora_name))
            return []
        linked: list[EngineHash] = []
        first_parent = parent = self._parent_digest(event)
        for index, block in enumerate(event.block_hashes):
            link = links.get(block)
            if link is None and parent is not None:
                digest = self._digest(parent, event, index, lora)
                if digest is not None:
                    link = links[block] = (parent, digest)
                    self._settle(block)
                    linked.append(block)
            parent = link[1] if link is not None else None
        if event.parent is not None and first_parent is None and event.block_hashes[0] not in links:
            self._park(event, event.parent)
        return linked

    def _digest(
        self, parent: bytes, event: StoredBlocks, index: int, lora: LoraIdentity | None
    ) -> bytes | None:
        """The digest of one block; None where the engine hashes what Opal has no digest for."""
        size, unit = self._block_tokens, self._unit_tokens
        start = index * size
        try:
            if size == unit:
                tokens = packed_tokens(event.token_ids[start : start + size])
                return sha256(parent + tokens + _extras(event, index, size, lora)).digest()
            extras = _large_extras(event, index, unit, lora)
            for place in range(start, start + size, unit):
                tokens = packed_tokens(event.token_ids[place : place + unit])
                parent = sha256(parent + tokens + extras).digest()
                extras = b""
            return parent
        except (ValueError, TypeError, OverflowError, IndexError, struct.error):
            self.undigestible_blocks += 1
            return None

    def _parent_digest(self, event: StoredBlocks) -> bytes | None:
        if event.parent is None:
            return CHAIN_ROOT
        link = self.links.get(event.parent)
        return link[1] if link is not None else None

    # ---- waiting ----

    def _park(self, event: StoredBlocks, waiting_for: EngineHash | _Adapter) -> None:
        key = self._next_key
        self._next_key += 1
        parked = _Parked(event, waiting_for, _size_bytes(event))
        self._parked[key] = parked
        self._parked_bytes += parked.size_bytes
        self._waiting.setdefault(waiting_for, []).append(key)
        for block in event.block_hashes:
            if block not in self.links:
                self._settle(block)
                self._unnamed[block] = key
                self._unnamed_of[key] = self._unnamed_of.get(key, 0) + 1
        while len(self._parked) > self._max_parked or self._parked_bytes > self._max_parked_bytes:
            self._drop(next(iter(self._parked)))
            self.dropped_events += 1

    def _settle(self, block: EngineHash) -> None:
        """A block is named, gone, or described by another event."""
        key = self._unnamed.pop(block, None)
        if key is None:
            return
        self._unnamed_of[key] -= 1
        if not self._unnamed_of[key]:
            self._drop(key)

    def _drop(self, key: int) -> None:
        parked = self._parked.pop(key, None)
        self._unnamed_of.pop(key, None)
        if parked is None:
            return
        self._parked_bytes -= parked.size_bytes
        waiting = self._waiting[parked.waiting_for]
        waiting.remove(key)
        if not waiting:
            del self._waiting[parked.waiting_for]
        for block in parked.event.block_hashes:
            if self._unnamed.get(block) == key:
                del self._unnamed[block]

    def _wake(self, what: EngineHash | _Adapter, adapters: _Adapters) -> list[EngineHash]:
        linked: list[EngineHash] = []
        for key in list(self._waiting.get(what, ())):
            parked = self._parked.get(key)
            if parked is not None:
                self._drop(key)
                linked += self._name(parked.event, adapters)
        return linked


def _size_bytes(event: StoredBlocks) -> int:
    """About what an event takes; what should be tokens and keys may be anything."""
    size = 8 * len(event.token_ids) + _BLOCK_OVERHEAD_BYTES * len(event.block_hashes)
    others: list[Any] = [event.extra_keys, event.lora_name]
    if not set(map(type, event.token_ids)) <= {int}:
        others.append(event.token_ids)
    try:
        return size + sum(len(repr(other)) for other in others if other is not None)
    except RecursionError:
        return size + MAX_PAYLOAD_BYTES


def _extras(event: StoredBlocks, index: int, block_tokens: int, lora: LoraIdentity | None) -> bytes:
    """The canonical extras of one block of an event.

    Raises:
        ValueError: The engine hashes something that Opal has no digest for.
    """
    is_first = event.parent is None and index == 0
    keys = event.extra_keys[index] if event.extra_keys else None
    if not keys and not (is_first and lora is not None):
        return b""
    salt: str | None = None
    spans: list[MultimodalSpan] = []
    start = 0 if is_first else block_tokens
    for key in _without_adapter(keys or (), event.lora_name):
        match key:
            case str() if is_first and salt is None:
                salt = key
            case [str(identifier), int(offset)]:
                spans.append(MultimodalSpan(identifier, start + offset, max(1, 1 - offset)))
            case _:
                raise ValueError(f"extra key of kind {type(key).__name__}")
    identity = RequestIdentity(lora, salt, tuple(spans))
    return canonical_extras(identity, block_index=start // block_tokens, block_tokens=block_tokens)


def _large_extras(event: StoredBlocks, index: int, unit: int, lora: LoraIdentity | None) -> bytes:
    """Of a block that is hashed in several parts; the extras are those of its first part.

    Raises:
        ValueError: They may belong to later parts: where an input ends is not said.
    """
    keys = event.extra_keys[index] if event.extra_keys else None
    if any(not isinstance(key, str) for key in keys or ()):
        raise ValueError("an input in a block of several hashes")
    return _extras(event, index, unit, lora)


def _without_adapter(keys: Sequence[Any], lora_name: str | None) -> Iterator[Any]:
    is_named = lora_name is not None and bool(keys) and keys[0] == lora_name
    yield from keys[1:] if is_named else keys
