"""Which blocks of a sequence the tiers hold of one group, and in which objects. One lookup long."""

from collections.abc import Sequence

from opal_connector.managers.records import ObjectRecord, object_key
from opal_connector.managers.segments import Segment
from opal_connector.managers.storage_manager import OpalStorageManager

Found = tuple[int, int, ObjectRecord | None]  # blocks from the object's first on, tier, record
_NOTHING: Found = (0, 0, None)


class GroupPresence:
    """The objects of one group along a sequence, each looked for once.

    What somebody loads now counts only if it is hopeful, as does what is being written: nothing is
    loaded twice at once.

    Mutable state: `_found`, what was seen of each chunk; used under the lock of the books.
    """

    def __init__(
        self,
        storage: OpalStorageManager,
        hashes: Sequence[bytes],
        group: int,
        chunk_blocks: int,
        *,
        is_hopeful: bool,
    ) -> None:
        self._storage = storage
        self._hashes = hashes
        self._group = group
        self._chunk_blocks = chunk_blocks
        self._is_hopeful = is_hopeful
        self._found: dict[int, Found] = {}

    @property
    def block_count(self) -> int:
        """Blocks of the sequence."""
        return len(self._hashes)

    def run_stop(self, first: int, most: int) -> int:
        """Where the run of present blocks from block `first` on ends, at most `most`."""
        most = min(most, len(self._hashes))
        block = first
        while block < most:
            start = block - block % self._chunk_blocks
            stop = start + self._look(start)[0]
            if stop <= block:
                break
            block = stop
            if stop < start + self._chunk_blocks:
                break
        return min(max(first, block), max(first, most))

    def hole(self, first: int, stop: int) -> int | None:
        """Of blocks `[first, stop)`, where the last run of missing ones begins; None if none is.

        It may begin before `first`. From there on to `stop` all are missing or not needed.
        """
        chunk_blocks = self._chunk_blocks
        block = stop
        while block > first:
            start = (block - 1) - (block - 1) % chunk_blocks
            present = start + self._look(start)[0]
            if present < block:
                return present
            block = start
        return None

    def segments(self, first: int, stop: int) -> list[Segment]:
        """The objects that bring blocks `[first, stop)`, of which none is missing."""
        segments: list[Segment] = []
        block = first
        while block < stop:
            start = block - block % self._chunk_blocks
            count, tier, record = self._look(start)
            end = min(stop, start + count)
            assert record is not None, "a hit counts on what is not there"
            assert end > block, "a hit counts on more than there is"
            segments.append(Segment(tier, record, block, end - block, block - start))
            block = end
        return segments

    def _look(self, start: int) -> Found:
        """What is there of the chunk that begins at block `start`."""
        found = self._found.get(start)
        if found is None:
            found = self._found[start] = self._find(start)
        return found

    def _find(self, start: int) -> Found:
        stop = min(start + self._chunk_blocks, len(self._hashes))
        if stop <= start:
            return _NOTHING
        if stop - start == self._chunk_blocks:
            key = object_key(self._hashes[stop - 1], self._group)
            found = self._storage.find(key)
            if found is not None and (self._is_hopeful or not found[1].loads):
                return self._chunk_blocks, found[0], found[1]
            if self._is_hopeful and self._storage.is_coming(key):
                return self._chunk_blocks, 0, None
            if self._chunk_blocks == 1:
                return _NOTHING
        wanted = b"".join(self._hashes[start:stop])
        place, record, common = self._storage.find_run(wanted, self._group)
        if self._is_hopeful:
            common = max(common, self._storage.coming_blocks(wanted, self._group))
        elif record is not None and record.loads:
            return _NOTHING
        return common, place, record
