"""What LMCache's objects are called in Opal's tiers, and back.

LMCache's key has no dtype, no layout and no size. An Opal name has: engines that are configured
differently never meet, and everything that LMCache wants to know of an object can be read off its
name after a restart, with the context that the name refers to.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey

from opal_connector.keys import HASH_BYTES
from opal_connector.managers import object_key
from opal_connector.managers.records import ObjectKey as BookKey
from opal_connector.transfers import ObjectName

ROW_BYTES: Final = 64 << 10  # the unit of room; the last row of an object is padded
MOST_ROWS: Final = 0xFFFF  # of one object: 4 GiB
_FORMAT: Final = "opal-lmcache-1"
_DIGEST_BYTES: Final = 12
_CONTEXT_BYTES: Final = 8
_RANK_BYTES: Final = 8
_PADDING_BYTES: Final = 3
_OPAQUE_DTYPES: Final = ("uint8",)


class Layout(msgspec.Struct, frozen=True):
    """Shapes and dtypes of the parts of an object, and its bytes; no parts: not known."""

    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    size_bytes: int = 0

    @property
    def is_opaque(self) -> bool:
        """Whether it is a string of bytes, as LMCache's serializers leave them."""
        return self.dtypes == _OPAQUE_DTYPES and len(self.shapes[0]) == 1

    def may_be(self, wanted: "Layout") -> bool:
        """Whether what is stored with this layout is what `wanted` asks for, as far as known."""
        return not wanted.shapes or self.is_opaque or self == wanted


UNKNOWN_LAYOUT: Final = Layout()


class Context(msgspec.Struct, frozen=True):
    """What objects of one model, tenant, group and layout have in common."""

    model_name: str
    object_group_id: int
    cache_salt: str
    layout: Layout

    @property
    def digest(self) -> bytes:
        """The same for equal contexts, in every process."""
        encoded = msgspec.json.encode(self, order="deterministic")
        return hashlib.sha256(encoded).digest()


class StoredObject(msgspec.Struct, frozen=True):
    """An object as both sides know it."""

    key: ObjectKey
    name: ObjectName
    layout: Layout
    size_bytes: int

    @property
    def book_key(self) -> BookKey:
        """Its key in the books."""
        return object_key(self.name.chunk_hash, self.name.group)


class ContextNumber:
    """The part of a context that stands in names: made once for each context."""

    __slots__ = ("context", "digest")

    def __init__(self, context: Context) -> None:
        self.context = context
        self.digest = context.digest

    @property
    def short(self) -> bytes:
        """What refers to it in a name."""
        return self.digest[:_CONTEXT_BYTES]


def namespace_digest(namespace: str) -> bytes:
    """What keeps the files of this kind, and of this operator's namespace, apart from others."""
    return hashlib.sha256(f"{_FORMAT}\0{ROW_BYTES}\0{namespace}".encode()).digest()


def layout_of(shapes: Any, dtypes: Any) -> Layout:
    """The layout of torch's shapes and dtypes."""
    sizes = [tuple(int(length) for length in shape) for shape in shapes]
    names = tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
    total = 0
    for shape, dtype in zip(sizes, dtypes, strict=True):
        count = 1
        for length in shape:
            count *= length
        total += count * int(dtype.itemsize)
    return Layout(tuple(sizes), names, total)


def object_layout(memory_object: Any) -> Layout:
    """The layout of one of LMCache's memory objects."""
    metadata = memory_object.metadata
    shapes = metadata.shapes or [metadata.shape]
    dtypes = metadata.dtypes or [metadata.dtype]
    return layout_of(shapes, dtypes)


def group_layouts(descriptions: Mapping[int, MemoryLayoutDesc]) -> dict[int, Layout]:
    """The layouts that a lookup says its object groups have."""
    return {group: layout_of(desc.shapes, desc.dtypes) for group, desc in descriptions.items()}


def context_of(key: ObjectKey, layout: Layout) -> Context:
    """The context of an object."""
    return Context(key.model_name, key.object_group_id, key.cache_salt, layout)


def name_of(key: ObjectKey, number: ContextNumber, size_bytes: int) -> ObjectName | None:
    """The name of an object; None for one that cannot have one.

    The digest leads, so that files spread over directories; context, rank and sizes follow. The
    chunk's own hash stands where objects of a chain have their parent's, and is compared in full.
    """
    row_count = -(-size_bytes // ROW_BYTES)
    chunk_hash, rank = key.chunk_hash, key.kv_rank
    if not 0 < row_count <= MOST_ROWS or not 0 < len(chunk_hash) <= HASH_BYTES:
        return None
    if not 0 <= rank < 1 << (8 * _RANK_BYTES):
        return None
    padding = row_count * ROW_BYTES - size_bytes
    name = (
        _digest(number, rank, chunk_hash)
        + number.short
        + rank.to_bytes(_RANK_BYTES, "little")
        + bytes([len(chunk_hash)])
        + padding.to_bytes(_PADDING_BYTES, "little")
    )
    return ObjectName(row_count, chunk_hash.ljust(HASH_BYTES, b"\0"), name, row_count)


def context_number(name: ObjectName) -> bytes:
    """Which context a name refers to."""
    return name.run[_DIGEST_BYTES : _DIGEST_BYTES + _CONTEXT_BYTES]


def object_of(name: ObjectName, number: ContextNumber) -> StoredObject | None:
    """The object of a name, if it is one of this context."""
    fields = name.run[_DIGEST_BYTES + _CONTEXT_BYTES :]
    rank = int.from_bytes(fields[:_RANK_BYTES], "little")
    chunk_hash = name.parent_hash[: fields[_RANK_BYTES]]
    padding = int.from_bytes(fields[_RANK_BYTES + 1 :], "little")
    context = number.context
    try:
        key = ObjectKey(
            chunk_hash, context.model_name, rank, context.object_group_id, context.cache_salt
        )
    except ValueError:
        return None
    stored = StoredObject(key, name, context.layout, name.row_count * ROW_BYTES - padding)
    return stored if name_of(key, number, stored.size_bytes) == name else None


def _digest(number: ContextNumber, rank: int, chunk_hash: bytes) -> bytes:
    prefix = number.digest + rank.to_bytes(_RANK_BYTES, "little")
    return hashlib.sha256(prefix + chunk_hash).digest()[:_DIGEST_BYTES]
