"""Jobs and their results: what the books ask the bytes to do, and what really happened.

The scheduler half sends jobs in a step's connector metadata; the worker half answers with one
`JobResult` per job and rank. Nothing here holds a buffer.
"""

from enum import StrEnum

import msgspec


class FailureKind(StrEnum):
    """Why an object could not be moved. The value is a metric label."""

    CHECKSUM = "checksum"  # what was read is not what was written
    IO = "io"  # the tier or the copy raised
    MISSING = "missing"  # the books had nothing to load from
    AFTER_FAILURE = "after_failure"  # intact, but an earlier object of the prefix failed


class ObjectTransfer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One object's part of a job.

    `tier_rows[i]` in tier `tier` holds, or will hold, the bytes of the paged KV block
    `block_ids[i]` of kv group `group`; `stamps` is the concatenation of those blocks' hashes.
    """

    tier: int
    group: int
    tier_rows: tuple[int, ...]
    block_ids: tuple[int, ...]
    stamps: bytes


class StoreJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Paged KV to a tier. Source blocks are held by the scheduler half until the result."""

    job_id: int
    objects: tuple[ObjectTransfer, ...]


class LoadJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tier to paged KV, in prefix order.

    A failure makes every later object of the job fail too: what follows a hole is no prefix.
    `missing_block_ids` are destinations that vLLM expects filled and the books cannot fill.
    """

    job_id: int
    request_id: str
    objects: tuple[ObjectTransfer, ...]
    missing_block_ids: tuple[int, ...] = ()


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
    """All new jobs of one step."""

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()

    def __bool__(self) -> bool:
        """Whether the step has any job."""
        return bool(self.loads or self.stores)


NO_JOBS = JobBatch()
