"""What LMCache asks of the books."""

from collections.abc import Mapping, Sequence
from enum import Enum, auto

import msgspec
from lmcache.v1.distributed.api import ObjectKey

from opal_connector.integrations.lmcache.identity import Layout


class StoreState(Enum):
    """What became of the wish to store an object."""

    PLANNED = auto()  # it is part of the job
    PRESENT = auto()  # it is there already
    LATER = auto()  # it is being written, or room is being made: ask again
    NEVER = auto()  # no tier can take it


class StoreWish(msgspec.Struct, frozen=True, eq=False):
    """An object, its layout and its bytes, and the addresses of the buffer that has them."""

    key: ObjectKey
    layout: Layout
    size_bytes: int
    addresses: tuple[int, ...] = ()


class Lookup:
    """A lookup until it is answered.

    Attributes:
        keys: What is wanted.
        layouts: The layouts that the caller says its object groups have.
        deadline: Until when it may wait for a tier that is being opened (monotonic seconds).
        question_id: Of its question to a shared tier, 0 before it is asked.
        asked_until: Until when it waits for the answer to that.
    """

    __slots__ = ("asked_until", "deadline", "keys", "layouts", "question_id")

    def __init__(
        self, keys: Sequence[ObjectKey], layouts: Mapping[int, Layout], deadline: float
    ) -> None:
        self.keys = tuple(keys)
        self.layouts = layouts
        self.deadline = deadline
        self.question_id = 0
        self.asked_until = 0.0
