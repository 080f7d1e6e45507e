"""Moves one object between the files of a tier and the device or the rows of a memory tier.

Bytes from a file go into rows of memory first, are checked there, and only then reach the device:
into rows of the memory tier if they are to stay there, else into rows of the calling thread's own,
unless the tier lends the memory that they came in.
"""

import threading
from collections.abc import Callable, Sequence

from opal_connector.tiers.base import PagedBlocks, Rows, TierStore
from opal_connector.tiers.checks import row_check
from opal_connector.tiers.cpu_memory import CPUMemory, allocate_host_rows
from opal_connector.tiers.file_errors import AbandonedError, ObjectGoneError, SourceError
from opal_connector.tiers.keyed_tier import KeyedTier, always
from opal_connector.transfers import ObjectCopy, ObjectTransfer

Tier = TierStore | KeyedTier


class Staging:
    """Rows of memory for bytes on their way, one buffer per thread.

    Mutable state: the buffers, each used by its own thread only.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def rows(self, row_count: int, row_bytes: int) -> Rows:
        """At least `row_count` rows, with anything in them; valid until this thread's next call."""
        rows: Rows | None = getattr(self._of_thread, "rows", None)
        if rows is None or len(rows) < row_count or rows.shape[1] != row_bytes:
            rows = allocate_host_rows(row_count=row_count, row_bytes=row_bytes)
            self._of_thread.rows = rows
        return rows


def load_object(
    item: ObjectTransfer,
    tiers: Sequence[Tier],
    paged: PagedBlocks,
    after: object,
    staging: Staging,
    *,
    may_deliver: Callable[[], bool] = always,
) -> int:
    """Read an object's blocks into paged blocks; returns the bytes read. Blocks.

    With `kept_rows` the whole object is read there, and stays. `may_deliver` is asked before the
    first paged block is touched.

    Raises:
        AbandonedError: `may_deliver` said no. What was to be kept is in its rows all the same.
        ChecksumMismatchError: The file is not what was stored.
        OSError: The medium failed, or has no such file.
    """
    store = tiers[item.tier]
    assert isinstance(store, KeyedTier)
    assert item.name is not None
    if item.kept_rows:
        memory = tiers[item.kept_tier]
        assert isinstance(memory, CPUMemory)
        checks = store.read_object(
            item.name, range(len(item.kept_rows)), memory.rows, item.kept_rows
        )
        memory.set_checks(item.kept_rows, checks)
        rows = memory.rows
        filled: Sequence[int] = [item.kept_rows[position] for position in item.tier_rows]
        read_rows = len(item.kept_rows)
    else:
        lent = store.lend_rows(item.name, item.tier_rows)
        if lent is not None:
            rows, filled = lent, item.tier_rows
        else:
            rows = staging.rows(len(item.tier_rows), paged.row_bytes)
            filled = range(len(item.tier_rows))
            store.read_object(item.name, item.tier_rows, rows, filled)
        read_rows = len(item.tier_rows)
    if not may_deliver():
        raise AbandonedError("the load was given up")
    for start in range(0, len(filled), paged.batch_blocks):
        stop = start + paged.batch_blocks
        paged.scatter(item.block_ids[start:stop], rows, filled[start:stop], after)
    return read_rows * paged.row_bytes


def store_object(
    item: ObjectTransfer,
    tiers: Sequence[Tier],
    paged: PagedBlocks,
    after: object,
    staging: Staging,
    *,
    may_publish: Callable[[], bool] = always,
) -> int:
    """Write paged blocks to an object's file; returns the bytes written. Blocks.

    Raises:
        AbandonedError: `may_publish` said no.
        OSError: The medium failed. Nothing of the object is readable then.
    """
    store = tiers[item.tier]
    assert isinstance(store, KeyedTier)
    assert item.name is not None
    count = len(item.block_ids)
    rows = staging.rows(count, paged.row_bytes)
    for start in range(0, count, paged.batch_blocks):
        stop = min(start + paged.batch_blocks, count)
        paged.gather(item.block_ids[start:stop], rows, range(start, stop), after)
    checks = [row_check(rows[position], item.stamps, position) for position in range(count)]
    store.write_object(item.name, rows, range(count), checks, may_publish=may_publish)
    return count * paged.row_bytes


def copy_object(
    item: ObjectCopy,
    tiers: Sequence[Tier],
    staging: Staging,
    *,
    may_publish: Callable[[], bool] = always,
) -> int:
    """Copy an object from one tier to a tier of files; returns the bytes written. Blocks.

    Raises:
        AbandonedError: `may_publish` said no.
        ChecksumMismatchError: The source is damaged.
        SourceError: The source cannot be read.
        OSError: The target failed, or the source is not there.
    """
    source, target = tiers[item.source_tier], tiers[item.target_tier]
    assert isinstance(target, KeyedTier)
    if isinstance(source, KeyedTier):
        row_numbers: Sequence[int] = range(len(item.target_rows))
        rows = staging.rows(len(row_numbers), target.row_bytes)
        try:
            checks = source.read_object(item.name, item.source_rows, rows, row_numbers)
        except ObjectGoneError:
            raise
        except OSError as error:
            raise SourceError(f"{source.name}: {error!r}") from error
    else:
        assert isinstance(source, CPUMemory)
        rows, row_numbers = source.rows, item.source_rows
        checks = source.verified_checks(item.source_rows, item.name.stamps)
    target.write_object(item.name, rows, row_numbers, checks, may_publish=may_publish)
    return len(item.target_rows) * target.row_bytes
