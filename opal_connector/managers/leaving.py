"""Objects of a tier that are out of the index and still take room."""

from opal_connector.managers.records import ObjectKey, ObjectRecord, ObjectState
from opal_connector.managers.tier_pool import Space


class Wipe:
    """Whether the files of a tier are all to go. Until they have, nothing is written there.

    A worker runs jobs in any order: what was written meanwhile could go with the old files.

    Mutable state: `is_due` (no job does it yet), `is_unfinished` and `generation`, which tells what
    was seen before a wipe began or ended from what was seen after; guarded by the owner of the
    books, and read by anybody.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.is_due = False
        self.is_unfinished = False

    def want(self) -> None:
        """Have everything deleted that is there now."""
        self.is_due = self.is_unfinished = True
        self.generation += 1

    def take_due(self) -> bool:
        """Whether a job has to do it now; the caller sees to it."""
        is_due, self.is_due = self.is_due, False
        return is_due

    def end(self, *, is_done: bool) -> None:
        """The job has ended: nothing is left, or it is to be tried again."""
        self.generation += 1
        self.is_due = self.is_due or not is_done
        self.is_unfinished = self.is_due


class LeavingObjects:
    """What has to end before its room is free: promises, and in a tier of files the file.

    Mutable state: `wipe`, `doomed` (somebody still relies on their rows), `_records` (files that a
    worker has to delete, by key), `_due` (those of them that no job names yet), `_failed` (those
    that could not be deleted), `size_bytes` of the files and the space; guarded by the owner of the
    books.
    """

    def __init__(self, space: Space) -> None:
        self.wipe = Wipe()
        self.doomed: dict[int, ObjectRecord] = {}
        self.size_bytes = 0
        self._space = space
        self._records: dict[ObjectKey, ObjectRecord] = {}
        self._due: list[ObjectRecord] = []
        self._failed: list[ObjectRecord] = []

    def __len__(self) -> int:
        return len(self.doomed) + len(self._records)

    @property
    def is_due(self) -> bool:
        """Whether some files have no job yet."""
        return bool(self._due)

    def is_named(self, key: ObjectKey) -> bool:
        """Whether a file of that name is still to be deleted: a new one would go with it."""
        if not self._space.frees_later:
            return False
        if self.wipe.is_unfinished or key in self._records:
            return True
        return any(record.key == key for record in self.doomed.values())

    def depart(self, record: ObjectRecord) -> None:
        """Take over an object that has just left the index."""
        if record.is_held:
            self.doomed[id(record)] = record
        else:
            self.free(record)

    def release(self, record: ObjectRecord) -> None:
        """Somebody no longer relies on a doomed object."""
        if not record.is_held and self.doomed.pop(id(record), None) is not None:
            self.free(record)

    def free(self, record: ObjectRecord) -> None:
        """Give up an object's room: at once, or when its file is gone."""
        record.state = ObjectState.ABSENT
        if not self._space.frees_later or record.is_gone:
            self._space.free(record.rows, record.size_bytes)
            return
        self._records[record.key] = record
        self._due.append(record)
        self.size_bytes += record.size_bytes
        self.retry()

    def take_due(self, limit: int) -> list[ObjectRecord]:
        """At most `limit` of the files that no job names yet."""
        taken, self._due = self._due[:limit], self._due[limit:]
        return taken

    def take_all(self) -> list[ObjectRecord]:
        """All that no job names yet, for a job that empties the directory."""
        self.retry()
        taken, self._due = self._due, []
        return taken

    def retry(self) -> None:
        """Try again what could not be deleted: there is a new reason to.

        Not at once and for ever, or one file that cannot be deleted would keep a tier busy.
        """
        self._due += self._failed
        self._failed.clear()

    def end_drop(self, record: ObjectRecord, *, is_gone: bool) -> None:
        """A file is gone, or could not be deleted and is to be tried again later."""
        if not is_gone:
            self._failed.append(record)
            return
        del self._records[record.key]
        self.size_bytes -= record.size_bytes
        self._space.free(record.rows, record.size_bytes)

    def records(self) -> list[ObjectRecord]:
        """Everything that still takes room."""
        return [*self.doomed.values(), *self._records.values()]

    def check(self) -> None:
        """Raise AssertionError if the books of it disagree."""
        assert self.size_bytes == sum(record.size_bytes for record in self._records.values())
        waiting = [*self._due, *self._failed]
        due = {id(record) for record in waiting}
        assert len(due) == len(waiting), "to be deleted twice"
        assert due <= {id(record) for record in self._records.values()}
        assert all(record.is_held for record in self.doomed.values())
