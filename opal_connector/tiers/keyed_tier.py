"""`KeyedTier`: objects at rest under their names, outside this process: files, or an engine's."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from opal_connector.tiers.base import Rows
from opal_connector.transfers import ObjectName


def always() -> bool:
    """Nobody gives this write up."""
    return True


class KeyedTier(ABC):
    """Objects of one rank and one namespace.

    All calls block and run in I/O threads, several at a time on different objects. `open` comes
    first: until it has given its first page, no other call is made. Mutable state: `namespace`, set
    by `open` or `attach` before anything else runs.
    """

    name: ClassVar[str]

    def __init__(self, *, row_bytes: int, rank: int) -> None:
        self.row_bytes = row_bytes
        self.rank = rank
        self._namespace = b""

    @property
    @abstractmethod
    def foreign_bytes(self) -> int:
        """Bytes there that count and are not this rank's objects, as `open` found them."""

    @abstractmethod
    def open(self, namespace: bytes) -> Iterator[tuple[ObjectName, ...]]:
        """Prepare the medium and give its objects, the least recently used first. Blocks.

        A page has at most 512 names. To use the tier, take all pages.

        Raises:
            OSError: The medium cannot be used.
        """

    @abstractmethod
    def attach(self, namespace: bytes) -> None:
        """Read what another process opens and writes; instead of `open`. Blocks.

        Raises:
            OSError: The medium cannot be used, or nothing is open there.
        """

    @abstractmethod
    def write_object(
        self,
        name: ObjectName,
        rows: Rows,
        tier_rows: Sequence[int],
        checks: Sequence[int],
        *,
        may_publish: Callable[[], bool] = always,
    ) -> int:
        """Write an object of which `rows[tier_rows[i]]` is row i; returns its bytes at rest.

        `checks` are the rows' check values, as `read_object` is to find them. `may_publish` is
        asked before anything is visible to others. Blocks. After any error nothing of this write
        is left, or it is removed before the tier counts as well again.

        Raises:
            AbandonedError: `may_publish` said no.
            NoSpaceError: The medium is full.
            OSError: The medium failed.
        """

    @abstractmethod
    def read_object(
        self, name: ObjectName, positions: Sequence[int], into: Rows, into_rows: Sequence[int]
    ) -> list[int]:
        """Read row `positions[k]` into `into[into_rows[k]]`; returns their check values. Blocks.

        After an error the rows hold anything.

        Raises:
            ChecksumMismatchError: What is there is damaged, or another object.
            ObjectGoneError: There is nothing.
            OSError: The medium failed.
        """

    def lend_rows(self, name: ObjectName, positions: Sequence[int]) -> Rows | None:
        """Rows of which row `positions[k]` is row `positions[k]` of the object, verified. Blocks.

        They lie in memory that nobody writes to and that lives as long as the array; other rows
        hold anything. None, and nothing was read, where `read_object` is the better way.

        Raises:
            ChecksumMismatchError: What is there is damaged, or another object.
            ObjectGoneError: There is nothing.
            OSError: The medium failed.
        """
        del name, positions
        return None

    @abstractmethod
    def remove_object(self, name: ObjectName) -> None:
        """Remove an object, if it is there; what is damaged goes, too. Blocks.

        Raises:
            OSError: The medium failed; the object may be there or not.
        """

    @abstractmethod
    def wipe(self) -> None:
        """Remove every object of this rank and namespace. Blocks.

        Raises:
            OSError: The medium failed; some are left, or their bytes are.
        """

    @abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """Objects were used, the most recent last: an order that outlives this process.

        A key is the chunk hash and the kv group as two bytes, little-endian.
        """

    @abstractmethod
    def probe(self) -> None:
        """Write, read and remove something small. Blocks.

        Raises:
            NoSpaceError: The medium is full.
            OSError: The medium failed.
        """

    def flush(self) -> None:  # noqa: B027 - not every tier has anything to do here
        """Write what is remembered in memory. Blocks."""

    def close(self) -> None:  # noqa: B027 - not every tier has anything to do here
        """Give up the medium. Blocks. No call follows; calls that hang may still end."""
