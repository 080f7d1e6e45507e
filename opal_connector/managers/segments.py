"""What an object brings to a hit, and a group's whole answer."""

import msgspec

from opal_connector.managers.records import ObjectRecord


class Segment(msgspec.Struct, frozen=True, gc=False):
    """Blocks of a request that one object brings.

    Blocks `[first_block, first_block + block_count)` of the sequence, in the group's own blocks,
    are the object's blocks from `object_offset` on. They count as `hit_tokens` of the hit.
    """

    tier: int
    record: ObjectRecord
    first_block: int
    block_count: int
    object_offset: int
    hit_tokens: int = 0


class GroupHit(msgspec.Struct, frozen=True, gc=False):
    """A group's answer: the segments that continue the prefix, and whether waiting brings more."""

    segments: tuple[Segment, ...]
    stop_block: int
    is_waiting: bool
