"""Objects that leave before all others, by owner, the first to go first."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum

from opal_connector.managers.records import ObjectKey, ObjectRecord


class Reason(IntEnum):
    """Why an object leaves before others, the best reason first; each comes and goes by itself."""

    WORTHLESS = 0  # no request can use it
    UNEXPECTED = 1  # none is expected to


class Unwanted:
    """What no request is expected to come for.

    Mutable state: the keys by reason and owner, in the order in which they leave; guarded by the
    owner of the books.
    """

    def __init__(self) -> None:
        self._by_reason: dict[Reason, dict[str, OrderedDict[ObjectKey, ObjectRecord]]] = {
            reason: {} for reason in Reason
        }

    def __contains__(self, record: ObjectRecord) -> bool:
        return bool(self.reasons(record))

    def __iter__(self) -> Iterator[ObjectRecord]:
        """Each once, in the order in which those of an owner leave."""
        worthless, unexpected = self._by_reason.values()
        for owner, records in worthless.items():
            yield from records.values()
            yield from (
                record for key, record in unexpected.get(owner, {}).items() if key not in records
            )
        for owner, records in unexpected.items():
            if owner not in worthless:
                yield from records.values()

    def reasons(self, record: ObjectRecord) -> tuple[Reason, ...]:
        """Why it leaves before others, if it does."""
        return tuple(
            reason
            for reason, by_owner in self._by_reason.items()
            if record.key in by_owner.get(record.owner, ())
        )

    def add(self, record: ObjectRecord, reason: Reason) -> None:
        """Let it leave after those that are here for that reason, before all others."""
        self._by_reason[reason].setdefault(record.owner, OrderedDict())[record.key] = record

    def put_back(self, record: ObjectRecord, reasons: Iterable[Reason]) -> None:
        """Let it leave before those that are here for the same reasons."""
        for reason in reasons:
            self.add(record, reason)
            self._by_reason[reason][record.owner].move_to_end(record.key, last=False)

    def discard(self, record: ObjectRecord, reasons: Iterable[Reason] = Reason) -> None:
        """It is wanted, as far as these reasons go, or has left."""
        for reason in reasons:
            by_owner = self._by_reason[reason]
            records = by_owner.get(record.owner)
            if records is not None and records.pop(record.key, None) is not None and not records:
                del by_owner[record.owner]

    def first(self, owner: str, may_leave: Callable[[ObjectRecord], bool]) -> ObjectRecord | None:
        """The first of an owner's that may leave now.

        A chain is given up from its end on, and leaves so: those before it are not passed.
        """
        for by_owner in self._by_reason.values():
            found = next(filter(may_leave, by_owner.get(owner, {}).values()), None)
            if found is not None:
                return found
        return None
