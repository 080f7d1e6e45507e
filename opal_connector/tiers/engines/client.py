"""What Opal wants of an engine that others run: values under keys, shared by many processes."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec
from typing_extensions import Buffer

from opal_connector.tiers.base import Rows
from opal_connector.tiers.file_errors import ObjectGoneError


class Listed(msgspec.Struct, frozen=True, gc=False):
    """One value of a listing; `modified_seconds` is by the engine's clock, 0 if unknown."""

    key: str
    size_bytes: int
    modified_seconds: float = 0.0


class Span(msgspec.Struct, frozen=True, eq=False):
    """A range of a value: where it begins, and the writable buffers that it fills, in order."""

    offset: int
    buffers: Sequence[memoryview]

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)


class EngineClient(ABC):
    """Values in an engine, by key. Keys are ASCII: letters, digits, `/`, `-`, `_` and `.`.

    All calls block, come from several threads at once, and end within the client's own timeout,
    however the engine is. Constructing a client connects to nothing and raises nothing of the
    network: the first call does. A client that lost its connection makes a new one by itself with
    the next call. `fork` is not survived; a process makes its own.

    Every fault of the engine is an `OSError` (`TimeoutError` is one): no exception of a library
    leaves a client. `ObjectGoneError` says that there is no such value, `NoSpaceError` that the
    engine is full (what is stored stays readable).
    """

    can_list: ClassVar[bool]  # whether `list_values` tells what is there

    @abstractmethod
    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Store these bytes, one after the other, as one value; replaces what is there.

        Others see the whole value or none of it, never a part.

        Raises:
            NoSpaceError: The engine is full.
            OSError: The engine failed; the value may be there or not.
        """

    @abstractmethod
    def get(self, key: str, size_bytes: int, spans: Sequence[Span]) -> None:
        """Fill the spans of a value that has `size_bytes` in all.

        Spans are in order and do not overlap. Where they cover the whole value this is one request.

        Raises:
            ObjectGoneError: There is no such value.
            ChecksumMismatchError: The value has another size.
            OSError: The engine failed; the buffers hold anything.
        """

    def lend(
        self, key: str, size_bytes: int, wanted: Sequence[tuple[int, int]]
    ) -> memoryview | None:
        """A value's beginning up to the end of the last range, in memory of the client's library.

        For libraries that hand a value over in memory of its own, which lives as long as the view
        does and which nobody writes to. None, and nothing was asked of the engine, where `get` is
        the better way. `wanted` are begins and ends, in order.

        Raises:
            ObjectGoneError: There is no such value.
            ChecksumMismatchError: The value has another size.
            OSError: The engine failed.
        """
        del key, size_bytes, wanted
        return None

    @abstractmethod
    def get_start(self, key: str, size_bytes: int) -> bytes:
        """The first `size_bytes` of a value, or all of one that is shorter.

        Raises:
            ObjectGoneError: There is no such value.
            OSError: The engine failed.
        """

    def get_starts(self, keys: Sequence[str], size_bytes: int) -> list[bytes | None]:
        """The first bytes of several values, as `get_start`; None for one that is gone.

        Raises:
            OSError: The engine failed.
        """
        starts: list[bytes | None] = []
        for key in keys:
            try:
                starts.append(self.get_start(key, size_bytes))
            except ObjectGoneError:
                starts.append(None)
        return starts

    @abstractmethod
    def present(self, keys: Sequence[str]) -> list[bool]:
        """Whether these values are there, asked in as few round trips as can be.

        Raises:
            OSError: The engine failed.
        """

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Remove values; one that is not there is no error.

        Raises:
            OSError: The engine failed; some may be there still.
        """

    @abstractmethod
    def remove_under(self, prefix: str) -> None:
        """Remove every value whose key begins with `prefix`, which ends with a slash.

        Raises:
            OSError: The engine failed; some may be there still.
        """

    def list_values(self, prefix: str) -> Iterator[Sequence[Listed]]:
        """Pages of the values whose keys begin with `prefix`, which ends with a slash.

        A value that comes or goes meanwhile may be told or not; one may be told twice.

        Raises:
            OSError: The engine failed.
        """
        raise NotImplementedError(prefix)  # only where `can_list`

    def touch(self, keys: Sequence[str]) -> None:  # noqa: B027 - not every engine keeps an order
        """These values were used.

        Raises:
            OSError: The engine failed.
        """

    def prepare(self, rows: Rows) -> None:  # noqa: B027 - only some engines want to know before
        """Puts and gets will use this memory. Called more than once with the same memory.

        A client that registers memory keeps a reference to it, so that it lives as long.

        Raises:
            OSError: The engine cannot use it.
        """

    def close(self) -> None:  # noqa: B027 - not every library has anything to give up
        """Give up connections. No call follows; calls that hang may still end."""
