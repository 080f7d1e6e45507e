"""`BorrowedTier`: named objects that another rank stores, and this one only reads."""

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from typing_extensions import override

from opal_connector.tiers.base import Rows
from opal_connector.tiers.keyed_tier import KeyedTier, always
from opal_connector.tiers.local_nvme import SlotNote
from opal_connector.transfers import ObjectName

_PATIENCE_SECONDS: Final = 20.0  # for the rank that stores to have its directory
_POLL_SECONDS: Final = 0.01


class BorrowedTier(KeyedTier):
    """The reading half of a tier.

    Mutable state: the directory's number with which the tier was attached last; of whichever
    thread sees that it has changed, and attaching twice does no harm.
    """

    def __init__(self, tier: KeyedTier, slot_note: SlotNote | None = None) -> None:
        """Read from `tier`, of the rank that stores, which notes the directory that it chooses."""
        super().__init__(row_bytes=tier.row_bytes, rank=tier.rank)
        self.name = tier.name  # type: ignore[misc] # that of what it reads
        self._tier = tier
        self._slot_note = slot_note
        self._attached_slot = -1

    @property
    @override
    def foreign_bytes(self) -> int:
        """0: the rank that stores counts them."""
        return 0

    @override
    def open(self, namespace: bytes) -> Iterator[tuple[ObjectName, ...]]:
        """Find what the other rank opens. Gives no page: that rank's are the inventory. Blocks.

        Raises:
            OSError: It has opened nothing in time, or the medium cannot be used.
        """
        self._namespace = namespace
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._slot < 0:
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "the rank that stores has not opened its tier")
            time.sleep(_POLL_SECONDS)
        self._attach()
        yield from ()

    @override
    def attach(self, namespace: bytes) -> None:
        self._namespace = namespace
        self._attach()

    @override
    def read_object(
        self, name: ObjectName, positions: Sequence[int], into: Rows, into_rows: Sequence[int]
    ) -> list[int]:
        self._follow()
        return self._tier.read_object(name, positions, into, into_rows)

    @override
    def lend_rows(self, name: ObjectName, positions: Sequence[int]) -> Rows | None:
        self._follow()
        return self._tier.lend_rows(name, positions)

    @override
    def write_object(
        self,
        name: ObjectName,
        rows: Rows,
        tier_rows: Sequence[int],
        checks: Sequence[int],
        *,
        may_publish: Callable[[], bool] = always,
    ) -> int:
        raise _not_mine(self.name)

    @override
    def remove_object(self, name: ObjectName) -> None:
        raise _not_mine(self.name)

    @override
    def wipe(self) -> None:
        raise _not_mine(self.name)

    @override
    def touch(self, keys: Sequence[bytes]) -> None:
        """The rank that stores writes it down."""

    @override
    def probe(self) -> None:
        self._tier.probe()

    @override
    def close(self) -> None:
        self._tier.close()

    @property
    def _slot(self) -> int:
        return self._slot_note.slot if self._slot_note is not None else 0

    def _follow(self) -> None:
        if self._slot != self._attached_slot:
            self._attach()

    def _attach(self) -> None:
        slot = self._slot
        self._tier.attach(self._namespace)
        self._attached_slot = slot


def _not_mine(name: str) -> OSError:
    return OSError(errno.EROFS, f"another rank stores what is in {name}")
