"""One instance's view, in its scheduler's process, of an engine that others use too."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.tiers.engines.client import EngineClient
from opal_connector.tiers.engines.names import (
    PROBE_NAME,
    parse_value_key,
    rank_prefix,
    value_key,
)
from opal_connector.tiers.file_errors import ObjectGoneError
from opal_connector.tiers.file_names import object_key
from opal_connector.tiers.header_scan import batches
from opal_connector.tiers.record import ALIGNMENT, announced_header_bytes, parse_header
from opal_connector.tiers.shared_medium import Grant, Refresh
from opal_connector.transfers import ObjectName

_ASKED_AT_ONCE: Final = 1024
_CHECKED_PER_REFRESH: Final = 4096
_LOOKED_INTO_AT_ONCE: Final = 64
_LEFT_ALONE: Final = 20  # refreshes for which a value that the books do not want is not read again
# What is only listed enters the books up to here; what is asked for enters them anyway.
_MOST_LISTED: Final = 500_000


class EngineMedium:
    """A `SharedMedium` over an engine's client. The engine itself limits what it holds.

    `knows` tells of a key whether the books have it, `known_keys` gives all that they believe to be
    readable; any thread may call them. Whole sets are never compared at once: that would hold the
    interpreter's lock for as long as a scheduler's step may take.

    Mutable state, used by one thread: `_refreshes`, their number; `_looked_into`, keys of values
    whose headers were read, with the refresh in which they were; `_unchecked`, what is left of the
    round in which an engine without listings is asked about everything that the books know.
    """

    first_batch = 64  # a round trip costs more than a question

    def __init__(
        self,
        client: EngineClient,
        *,
        identity: str,
        namespace: bytes,
        ranks: int,
        knows: Callable[[bytes], bool],
        known_keys: Callable[[], Sequence[bytes]],
    ) -> None:
        self._client = client
        self._identity = identity
        self._namespace = namespace
        self._prefixes = [rank_prefix(namespace, rank) for rank in range(ranks)]
        self._knows = knows
        self._known_keys = known_keys
        self._refreshes = 0
        self._looked_into: dict[bytes, int] = {}
        self._unchecked: list[bytes] = []

    def identity(self) -> str:
        """What the configuration calls the engine."""
        return self._identity

    def present(self, names: Sequence[ObjectName]) -> list[bool]:
        """Whether every rank has a value of that name. Blocks.

        Raises:
            OSError: The engine cannot be asked.
        """
        return self._all_have([object_key(name) for name in names])

    def changes(self) -> Iterator[Refresh]:
        """What others have written and anybody removed, a little at a time. Blocks at every step.

        What is gone comes first. What could not be told, because the engine failed, comes with a
        later refresh.

        Raises:
            OSError: The engine cannot be asked.
        """
        self._refreshes += 1
        return self._relist() if self._client.can_list else self._recheck()

    def renew(
        self, *, wanted_bytes: int, unused_bytes: int, is_held: Callable[[bytes], bool]
    ) -> Grant:
        """All that is wanted: whoever finds the engine full says so."""
        del unused_bytes, is_held
        return Grant(wanted_bytes)

    def leave(self, *, unused_bytes: int) -> None:
        """Give up the connections."""
        del unused_bytes
        self._client.close()

    # ---- inside ----

    def _all_have(self, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        for batch in batches(keys, _ASKED_AT_ONCE):
            of_ranks = [
                self._client.present([value_key(prefix, key) for key in batch])
                for prefix in self._prefixes
            ]
            found += [all(answers) for answers in zip(*of_ranks, strict=True)]
        return found

    # An engine that says what it holds.

    def _relist(self) -> Iterator[Refresh]:
        known = self._known_keys()  # before the listing: what comes meanwhile is not called gone
        listed: dict[bytes, int] = {}
        for rank, prefix in enumerate(self._prefixes):
            for page in self._client.list_values(prefix):
                _count(listed, rank, (parse_value_key(prefix, value.key) for value in page))
                yield Refresh()  # whoever waits for an answer comes in between
        ranks = len(self._prefixes)
        gone = (key for key in known if listed.get(key, 0) < ranks)
        for batch in batches(gone, _ASKED_AT_ONCE):
            yield Refresh(gone=tuple(batch))
        self._looked_into = {
            key: when
            for key, when in self._looked_into.items()
            if key in listed and self._refreshes - when < _LEFT_ALONE
        }
        unknown = (key for key, count in listed.items() if count == ranks and self._is_new(key))
        left = max(0, _MOST_LISTED - len(known))
        for keys in batches(unknown, _LOOKED_INTO_AT_ONCE):
            yield Refresh(names=self._names_of(keys[:left]))
            left -= min(left, len(keys))
            if not left:
                return

    def _is_new(self, key: bytes) -> bool:
        return key not in self._looked_into and not self._knows(key)

    def _names_of(self, keys: Sequence[bytes]) -> tuple[ObjectName, ...]:
        """The names in the headers of these values, of those that are objects and ours."""
        texts = [value_key(self._prefixes[0], key) for key in keys]
        names: list[ObjectName] = []
        for key, text, start in zip(
            keys, texts, self._client.get_starts(texts, ALIGNMENT), strict=True
        ):
            if start is None:
                continue  # it has gone meanwhile
            self._looked_into[key] = self._refreshes
            name = self._name_in(start, text)
            if name is not None and object_key(name) == key:
                names.append(name)
        return tuple(names)

    def _name_in(self, start: bytes, text: str) -> ObjectName | None:
        try:
            size = announced_header_bytes(start)
            whole = start if size <= len(start) else self._client.get_start(text, size)
            header = parse_header(whole)
        except (ObjectGoneError, ChecksumMismatchError):
            return None
        return header.name if header.namespace == self._namespace else None

    # An engine that can only be asked.

    def _recheck(self) -> Iterator[Refresh]:
        """Ask about some of what is known, until all was asked about; then begin again."""
        if not self._unchecked:
            self._unchecked = list(self._known_keys())
        keys = self._unchecked[-_CHECKED_PER_REFRESH:]
        if not keys:  # be connected before somebody waits for an answer
            self._client.present([f"{self._prefixes[0]}{PROBE_NAME}"])
        for batch in batches(keys, _ASKED_AT_ONCE):
            found = self._all_have(batch)
            gone = [key for key, is_there in zip(batch, found, strict=True) if not is_there]
            yield Refresh(gone=tuple(gone))
        del self._unchecked[-_CHECKED_PER_REFRESH:]


def _count(listed: dict[bytes, int], rank: int, keys: Iterable[bytes | None]) -> None:
    """Count this rank for keys that all ranks before it have; one that is told twice counts once.

    What an earlier rank lacks is of no use: that needs no set of keys for each of the ranks.
    """
    for key in keys:
        if key is not None and listed.get(key, 0) == rank:
            listed[key] = rank + 1
