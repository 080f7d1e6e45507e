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
    """Blocks held per store job.

    Mutable state: `_held`, used by the engine core's thread only.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[int, list[KVCacheBlock]] = {}
        self._since: dict[int, float] = {}
        self._limit = max(_MINIMUM, int(pool.num_gpu_blocks * _SHARE))
        self._count = 0

    @property
    def spare_blocks(self) -> int:
        """Blocks that further stores may hold now. The first one may hold any number."""
        return max(0, self._limit - self._count) if self._count else self._pool.num_gpu_blocks

    def hold(self, job_id: int, block_ids: Sequence[int], now: float) -> None:
        """Keep these blocks until `release(job_id)`."""
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        self._held[job_id] = blocks
        self._since[job_id] = now
        self._count += len(blocks)

    def release(self, job_id: int) -> None:
        """Let the blocks of a job go, the last first, as vLLM does. Unknown jobs are ignored."""
        blocks = self._held.pop(job_id, None)
        if blocks is None:
            return
        del self._since[job_id]
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
