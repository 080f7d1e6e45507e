"""What instances that share a tier have to know of each other: existence, use, the limit.

All calls block. They run in a thread of the scheduler process, never in one of its steps.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from opal_connector.transfers import ObjectName


class Refresh(msgspec.Struct, frozen=True):
    """What has changed on a medium: objects that every rank has, and keys that are gone."""

    names: tuple[ObjectName, ...] = ()
    gone: tuple[bytes, ...] = ()


class Grant(msgspec.Struct, frozen=True):
    """Bytes that may be written, what lies on the medium at most, and what was evicted for it.

    `gone` are keys of this namespace.
    """

    granted_bytes: int = 0
    total_bytes: int = 0
    gone: tuple[bytes, ...] = ()


class SharedMedium(Protocol):
    """One instance's view of a medium that others use too. Used by one thread.

    Every call blocks, and raises `OSError` where the medium cannot be used.
    """

    first_batch: int  # objects to ask about at first, where it is not known that there is one

    def identity(self) -> str:
        """The medium's name, the same for everybody who uses it."""

    def present(self, names: Sequence[ObjectName]) -> list[bool]:
        """Whether every rank has an object of that name."""

    def changes(self) -> Iterator[Refresh]:
        """What others have written and removed since the last time, a little at a time."""

    def renew(
        self, *, wanted_bytes: int, unused_bytes: int, is_held: Callable[[bytes], bool]
    ) -> Grant:
        """Say what is left of the last grant, and ask for more."""

    def leave(self, *, unused_bytes: int) -> None:
        """Give the rest of the last grant back. A medium that is gone is no error."""
