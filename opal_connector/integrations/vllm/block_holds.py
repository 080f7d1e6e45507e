"""Keeps the source blocks of running stores from being given to another request.

vLLM frees a request's blocks when it ends or is preempted, also while a store still reads them. A
reference of our own in its block pool keeps them until the result is in.
"""

from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

_SHARE = 0.5  # of the device's blocks that stores may hold at once
_MINIMUM = 16


class BlockHolds:
    """Blocks held per store job, until every rank has answered.

    The answers are counted here and not taken from the books: the blocks are vLLM's, and a fault
    in the books must not keep them. Mutable state: per job its blocks, the ranks that owe an
    answer and since when; used by the engine core's thread only.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[int, list[KVCacheBlock]] = {}
        self._ranks_left: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self._limit = max(_MINIMUM, int(pool.num_gpu_blocks * _SHARE))
        self._count = 0

    @property
    def spare_blocks(self) -> int:
        """Blocks that further stores may hold now. The first one may hold any number."""
        return max(0, self._limit - self._count) if self._count else self._pool.num_gpu_blocks

    def hold(self, job_id: int, addresses: Sequence[int], *, ranks: int, now: float) -> None:
        """Keep the blocks at these addresses, of any kv group, until `ranks` answers to the job."""
        count = self._pool.num_gpu_blocks  # one pool for all groups: no two own a block at a time
        blocks = [self._pool.blocks[address % count] for address in addresses]
        self._pool.touch(blocks)
        self._held[job_id] = blocks
        self._ranks_left[job_id] = ranks
        self._since[job_id] = now
        self._count += len(blocks)

    def answer(self, job_id: int) -> None:
        """One rank has ended a job. With the last one its blocks go, the tail first.

        That is vLLM's own order. Jobs that hold nothing are ignored.
        """
        if job_id not in self._held:
            return
        self._ranks_left[job_id] -= 1
        if self._ranks_left[job_id]:
            return
        blocks = self._held.pop(job_id)
        del self._ranks_left[job_id], self._since[job_id]
        self._count -= len(blocks)
        self._pool.free_blocks(reversed(blocks))

    def frees_soon(self, now: float, patience_seconds: float) -> bool:
        """Whether a block waits for nothing but a store that began a moment ago."""
        return any(
            now - self._since[job_id] < patience_seconds
            and any(block.ref_cnt == 1 for block in blocks)
            for job_id, blocks in self._held.items()
        )

    def __len__(self) -> int:
        return self._count
