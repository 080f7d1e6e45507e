"""Jobs and their results: what the books ask the bytes to do, and what really happened.

The scheduler half sends jobs in a step's connector metadata; the worker half answers with one
`JobResult` per job and rank. Nothing here holds a buffer.
"""

from enum import StrEnum

import msgspec

from opal_connector.keys import HASH_BYTES


class FailureKind(StrEnum):
    """Why an object could not be moved. The value is a metric label."""

    CHECKSUM = "checksum"  # what was read is not what was written
    IO = "io"  # the tier or the copy raised
    UNREADABLE = "unreadable"  # the tier that was to be copied from raised
    GONE = "gone"  # somebody else took the object away
    NO_SPACE = "no_space"  # the medium is full; what is there stays readable
    TIMEOUT = "timeout"  # no answer from the medium before the deadline
    SUSPENDED = "suspended"  # the tier is not asked now, because it was slow or failing
    MISSING = "missing"  # the books had nothing to load from
    AFTER_FAILURE = "after_failure"  # intact, but an earlier object of the prefix failed
    DROPPED = "dropped"  # not begun: the worker shuts down, has too much to do, or still removes it


class ObjectName(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An object's identity in its namespace, complete enough to write and to check a file.

    `run` is the concatenation of the hashes of its blocks; the last one names the object. Each of
    its `members`, kv groups that are cached as one, has a row for every block: first those of the
    first member, then those of the next.
    """

    group: int
    parent_hash: bytes
    run: bytes
    members: int = 1

    @property
    def chunk_hash(self) -> bytes:
        """The digest that names the object."""
        return self.run[-HASH_BYTES:]

    @property
    def block_count(self) -> int:
        """Blocks that every member has."""
        return len(self.run) // HASH_BYTES

    @property
    def row_count(self) -> int:
        """Rows of all members together."""
        return self.block_count * self.members

    @property
    def stamps(self) -> bytes:
        """What seeds the check values of its rows."""
        return row_stamps(self.run, self.members, self.group)


def row_stamps(run: bytes, members: int, group: int = 0) -> bytes:
    """32 bytes for every row of an object over `run`: the block's hash, and whose row it is."""
    if members == 1 and not group:
        return run
    stamps = bytearray(run * members)
    if group:
        stamps[2::HASH_BYTES] = bytes(byte ^ (group & 0xFF) for byte in stamps[2::HASH_BYTES])
    for member in range(1, members):
        start, stop = member * len(run), (member + 1) * len(run)
        low, high = member & 0xFF, member >> 8
        stamps[start:stop:HASH_BYTES] = bytes(byte ^ low for byte in run[::HASH_BYTES])
        if high:
            start += 1
            stamps[start:stop:HASH_BYTES] = bytes(byte ^ high for byte in run[1::HASH_BYTES])
    return bytes(stamps)


class ObjectTransfer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One object's part of a job.

    `tier_rows[i]` in tier `tier` holds, or will hold, the bytes of the paged KV block at address
    `block_ids[i]`: the block's number, and with several kv groups the number of its kv group times
    the number of all blocks in addition. `stamps` are those of these rows, see `row_stamps`. In a
    tier of files, rows are positions in the object's file, and `name` says which.

    `kept_rows`, if any, are rows of tier `kept_tier`, one for every row of the object, into
    which a load from a file reads the whole object, so that it stays there as a copy.
    """

    tier: int
    group: int
    tier_rows: tuple[int, ...]
    block_ids: tuple[int, ...]
    stamps: bytes
    name: ObjectName | None = None
    kept_tier: int = -1
    kept_rows: tuple[int, ...] = ()


class ObjectCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One object from one tier to another; rows as in `ObjectTransfer`, of all its blocks."""

    name: ObjectName
    source_tier: int
    source_rows: tuple[int, ...]
    target_tier: int
    target_rows: tuple[int, ...]


class StoreJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Paged KV to a tier. Source blocks are held by the scheduler half until the result."""

    job_id: int
    objects: tuple[ObjectTransfer, ...]


class LoadJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tier to paged KV, in prefix order.

    A failure makes every later object of the job fail too: what follows a hole is no prefix.
    `missing_block_ids` are destinations that vLLM expects filled and the books cannot fill.
    `kept_job_id` is a second job, answered on its own: the copies that objects with `kept_rows`
    leave behind, at the same positions. It may end later, when a read that was given up returns.
    """

    job_id: int
    request_id: str
    objects: tuple[ObjectTransfer, ...]
    missing_block_ids: tuple[int, ...] = ()
    kept_job_id: int = 0


class CopyJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Objects from tier to tier, in prefix order. One that fails does not stop the others."""

    job_id: int
    objects: tuple[ObjectCopy, ...]


class DropJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Objects to delete from the files of a tier.

    `object_count` objects of the books stand for it. With `is_wipe` it names none and deletes
    everything of the namespace.
    """

    job_id: int
    tier: int
    names: tuple[ObjectName, ...]
    is_wipe: bool = False
    object_count: int = 0


class JobResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one rank did for one job.

    `failed` maps positions in the job's objects to why they failed; `moved` maps a tier's place to
    the bytes that were really copied and the seconds that it took.
    """

    job_id: int
    rank: int
    failed: dict[int, FailureKind] = {}
    moved: dict[int, tuple[int, float]] = {}


class JobBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All new jobs of one step.

    `touches` maps a tier's place to object keys that were used, the most recent last, for tiers
    whose order of use is to survive a restart.
    """

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    copies: tuple[CopyJob, ...] = ()
    drops: tuple[DropJob, ...] = ()
    touches: dict[int, tuple[bytes, ...]] = {}

    def __bool__(self) -> bool:
        """Whether the step has any job."""
        return bool(self.loads or self.stores or self.copies or self.drops or self.touches)


NO_JOBS = JobBatch()


class TierHealth(StrEnum):
    """What a tier can do now, as its worker sees it. The value is a metric label."""

    OK = "ok"
    OPENING = "opening"  # its contents are not known yet
    NO_SPACE = "no_space"  # loads go on, stores are shed until space returns
    SUSPENDED = "suspended"  # neither, until a probe succeeds


class Question(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a shared tier may hold of a sequence, beyond what is known.

    `chain` are whole chunks in order, of which only a beginning without a gap is of use; `tails`
    are what may stand behind all of them, the longest first, of which one is of use; `singles` are
    of use each by itself.
    """

    question_id: int
    tier: int
    chain: tuple[ObjectName, ...]
    tails: tuple[ObjectName, ...]
    singles: tuple[ObjectName, ...] = ()


class SharedNews(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is heard of a shared tier: answers, what others did, and leave to write.

    `answered` names questions; `found` are objects that are there, `gone` keys of objects that are
    not any more. With `is_grant`, `granted_bytes` may be written in addition; `was_crowded` says
    that others had to go for it, or that there was no room. `generation` is that of the tier's
    wipes when it was looked.
    """

    tier: int
    answered: tuple[int, ...] = ()
    found: tuple[ObjectName, ...] = ()
    gone: tuple[bytes, ...] = ()
    is_grant: bool = False
    granted_bytes: int = 0
    was_crowded: bool = False
    generation: int = 0


class InventoryPage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Objects that a tier had before this process, the least recently used first.

    `is_last` ends the pages of one rank and tier. `foreign_bytes` is what this rank has less room
    for because of what others have under the tier's directory, for the last page to say. It also
    says whether the tier `is_borrowed`: its objects are those that another rank stores, and names.
    """

    tier: int
    rank: int
    names: tuple[ObjectName, ...] = ()
    is_last: bool = False
    foreign_bytes: int = 0
    is_borrowed: bool = False
