"""Facts about what is where, in the order in which they became true.

A closed union of frozen tagged Structs with exactly the fields that their kind needs. Replaying
all events of an instance gives the contents of every tier.
"""

from enum import IntEnum
from typing import Annotated, Final

import msgspec

from opal_connector.keys import ExtraKeys

DEVICE_TIER: Final = "Device"  # the paged KV cache of the engine itself

# Limits on what is decoded; what is made here stays far below them.
Digest = Annotated[bytes, msgspec.Meta(max_length=32)]
HashRun = Annotated[bytes, msgspec.Meta(max_length=32 * 65_536)]
ShortName = Annotated[str, msgspec.Meta(max_length=256)]
TokenIds = Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 20)]


class KVCEventType(IntEnum):
    """Opal's numbers for the four kinds."""

    INSERT = 1
    DELETE = 2
    MOVE = 3
    COPY = 4


class ObjectFact(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The object that an event is about.

    `block_hashes` is the concatenation of the hashes of the object's blocks; the last one names
    the object. The first `shared_blocks` of them are also held by another object of the same tier
    (siblings that part inside a chunk), so only the others begin or cease to be retrievable. Facts
    about the device are about blocks alone: `parent_hash` may be empty where they leave.
    """

    group: int
    parent_hash: Digest
    block_hashes: HashRun
    shared_blocks: int = 0

    @property
    def chunk_hash(self) -> bytes:
        """The digest that names the object."""
        return self.block_hashes[-32:]


class _Event(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    fact: ObjectFact


class Insert(_Event, frozen=True, gc=False, array_like=True, tag=int(KVCEventType.INSERT)):
    """A new copy in `tier`, from the device.

    `token_ids` are the tokens of the object's blocks and `extra_keys` what else decides their KV,
    block by block, for consumers that hash them themselves.
    """

    tier: ShortName
    token_ids: TokenIds = ()
    lora_name: ShortName | None = None
    extra_keys: tuple[ExtraKeys, ...] = ()


class Delete(_Event, frozen=True, gc=False, array_like=True, tag=int(KVCEventType.DELETE)):
    """The copy in `tier` is gone."""

    tier: ShortName


class Move(_Event, frozen=True, gc=False, array_like=True, tag=int(KVCEventType.MOVE)):
    """The copy in `source_tier` became one in `target_tier`.

    `fact.shared_blocks` is about the target; in the source others still hold the first
    `source_shared_blocks`.
    """

    source_tier: ShortName
    target_tier: ShortName
    source_shared_blocks: int = 0
    token_ids: TokenIds = ()
    lora_name: ShortName | None = None
    extra_keys: tuple[ExtraKeys, ...] = ()


class Copy(_Event, frozen=True, gc=False, array_like=True, tag=int(KVCEventType.COPY)):
    """A second copy in `target_tier`; the one in `source_tier` stays."""

    source_tier: ShortName
    target_tier: ShortName
    token_ids: TokenIds = ()
    lora_name: ShortName | None = None
    extra_keys: tuple[ExtraKeys, ...] = ()


KVCEvent = Insert | Delete | Move | Copy
