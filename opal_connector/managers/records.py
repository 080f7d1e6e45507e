"""What the books write down about one object: one chunk of one kv group in one tier."""

from enum import IntEnum
from typing import NewType

import msgspec

from opal_connector.keys import HASH_BYTES, ExtraKeys

ObjectKey = NewType("ObjectKey", bytes)


class ObjectState(IntEnum):
    """The life of an object in one tier."""

    ABSENT = 0
    WRITING = 1  # rows reserved, bytes in motion, not to be read
    READY = 2
    LOADING = 3  # READY, and a load reads it now
    QUARANTINED = 4  # its bytes are not what was stored; rows are kept until nobody uses them


def object_key(chunk_hash: bytes, group: int) -> ObjectKey:
    """The index key of an object: the chunk's hash, then the kv group."""
    return ObjectKey(chunk_hash + group.to_bytes(2, "little"))


def group_of(key: ObjectKey) -> int:
    """The attention group of an object."""
    return int.from_bytes(key[HASH_BYTES:], "little")


class ObjectSpec(msgspec.Struct, frozen=True, gc=False):
    """An object that could be stored.

    `run` is the concatenation of the hashes of its blocks, `first_block` the position of the first
    one in its sequence, in blocks of its group. `owner` is who pays for its room. What `is_passing`
    takes no room from anything that is not.
    """

    group: int
    parent_hash: bytes
    run: bytes
    first_block: int
    owner: str = ""
    is_passing: bool = False

    @property
    def block_count(self) -> int:
        """Blocks in the object."""
        return len(self.run) // HASH_BYTES

    @property
    def key(self) -> ObjectKey:
        """The index key."""
        return object_key(self.run[-HASH_BYTES:], self.group)


class ObjectGroup(msgspec.Struct, frozen=True):
    """What the books of a tier have to know of an attention group.

    Each of its `members` has a row for every block of an object. Objects of what `is_chain` are
    worth nothing without those before them.
    """

    members: int = 1
    is_chain: bool = True


PLAIN_GROUPS = (ObjectGroup(),)


class ObjectRecord(msgspec.Struct, gc=False, eq=False):
    """One object's entry in one tier's index.

    `leases` counts everybody who relies on the rows, loads included; `loads` the loads alone. Not
    tracked by the garbage collector: a million of these must not make a collection slow, and they
    refer to nothing that could refer back.
    """

    key: ObjectKey
    group: int
    parent_hash: bytes
    run: bytes
    rows: tuple[int, ...]
    size_bytes: int
    state: ObjectState
    leases: int = 0
    loads: int = 0
    owner: str = ""
    tokens: bytes = b""  # uint32 of its blocks, where events are wanted
    lora_name: str | None = None
    extra_keys: tuple[ExtraKeys, ...] = ()
    is_gone: bool = False  # its file was removed by somebody else
    is_passing: bool = False  # of use only half-way along the sequence, and not used yet
    is_used: bool = False  # since it was stored here

    def describe_as(self, other: "ObjectRecord") -> None:
        """Take over what events say of the same object elsewhere."""
        self.tokens, self.lora_name = other.tokens, other.lora_name
        self.extra_keys = other.extra_keys

    def as_spec(self) -> "ObjectSpec":
        """The same object, to be stored elsewhere."""
        return ObjectSpec(
            self.group, self.parent_hash, self.run, 0, self.owner, is_passing=self.is_passing
        )

    @property
    def block_count(self) -> int:
        """Blocks in the object; it has as many rows for each of its members."""
        return len(self.run) // HASH_BYTES

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of its blocks, as far as they are known."""
        return tuple(memoryview(self.tokens).cast("I"))

    @property
    def is_readable(self) -> bool:
        """Whether a lookup may count on it."""
        return self.state is ObjectState.READY or self.state is ObjectState.LOADING

    @property
    def is_held(self) -> bool:
        """Whether its rows must not be given away."""
        return self.leases > 0 or self.state is ObjectState.WRITING
