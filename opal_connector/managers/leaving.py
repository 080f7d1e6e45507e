"""Objects of a tier of files that are out of the index and still on the medium."""

from opal_connector.managers.records import ObjectKey, ObjectRecord


class LeavingObjects:
    """What a worker has to delete before its bytes count as free.

    Mutable state: `_records` (all that are leaving, by key), `_due` (those that no job names yet)
    and `size_bytes`; guarded by the owner of the books.
    """

    def __init__(self) -> None:
        self._records: dict[ObjectKey, ObjectRecord] = {}
        self._due: list[ObjectRecord] = []
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._records

    @property
    def is_due(self) -> bool:
        """Whether some have no job yet."""
        return bool(self._due)

    def add(self, record: ObjectRecord) -> None:
        """Have a file deleted. Until it is, nothing of that name can be written."""
        self._records[record.key] = record
        self._due.append(record)
        self.size_bytes += record.size_bytes

    def take_due(self, limit: int) -> list[ObjectRecord]:
        """At most `limit` of those that no job names yet."""
        taken, self._due = self._due[:limit], self._due[limit:]
        return taken

    def take_all(self) -> list[ObjectRecord]:
        """All that no job names yet, for a job that empties the directory."""
        taken, self._due = self._due, []
        return taken

    def end(self, record: ObjectRecord) -> None:
        """The file is gone."""
        del self._records[record.key]
        self.size_bytes -= record.size_bytes

    def put_back(self, record: ObjectRecord) -> None:
        """It could not be deleted: to be tried again."""
        self._due.append(record)

    def records(self) -> list[ObjectRecord]:
        """Everything that is leaving."""
        return list(self._records.values())

    def check(self) -> None:
        """Raise AssertionError if the books of it disagree."""
        assert self.size_bytes == sum(record.size_bytes for record in self._records.values())
        due = {id(record) for record in self._due}
        assert len(due) == len(self._due), "to be deleted twice"
        assert due <= {id(record) for record in self._records.values()}
