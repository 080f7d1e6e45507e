"""What tests look at in an `Engine`: its parts, its contents, and that nothing was left behind."""

from collections.abc import Sequence
from typing import Any

from byte_model import ByteModel, Identity
from transfer_fakes import ManualMover, flip_bit
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from vllm_parts import Lookup, Result

from opal_connector.integrations.vllm.connector import OpalConnector
from opal_connector.keys import HASH_BYTES
from opal_connector.managers import ObjectRecord, OpalKVCacheManager, object_key


class EngineView:
    """The read-only half of `Engine`."""

    scheduler: Scheduler
    workers: list[OpalConnector]
    model: ByteModel
    requests: dict[str, Request]
    results: dict[str, Result]
    identities: dict[str, Identity]
    lookups: list[Lookup]

    @property
    def connector(self) -> OpalConnector:
        """The scheduler's."""
        return self.scheduler.connector

    @property
    def half(self) -> Any:
        """The connector's scheduler half."""
        return self.connector.scheduler_half

    @property
    def manager(self) -> OpalKVCacheManager:
        """The books."""
        return self.half.books.manager

    @property
    def pool(self) -> Any:
        """The device's blocks, as vLLM counts them."""
        return self.scheduler.kv_cache_manager.block_pool

    def mover(self, rank: int = 0) -> Any:
        """What moves a rank's bytes."""
        return self.workers[rank].worker_half._mover

    def tier(self, rank: int = 0) -> Any:
        """A rank's first tier, with its wrapper if it has one."""
        mover = self.mover(rank)
        return mover.tiers[0] if isinstance(mover, ManualMover) else mover._tiers[0]

    def block_ids(self, request_id: str) -> list[int]:
        """A request's block table now."""
        return self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]

    def held_hashes(self) -> set[bytes]:
        """The hashes of all blocks that could be loaded now."""
        return {
            record.run[start : start + HASH_BYTES]
            for tier in self.manager.storage.tiers
            for key in tier.index.readable_keys()
            if (record := tier.get(key)) is not None
            for start in range(0, len(record.run), HASH_BYTES)
        }

    def record_of_chunk(self, tokens: Sequence[int], *, chunk: int) -> ObjectRecord:
        """The books' record of chunk `chunk` of these tokens."""
        hashes = [span.chunk_hash for span in self.manager.database.process_tokens(tokens)]
        found = self.manager.storage.find(object_key(hashes[chunk], 0))
        assert found is not None
        return found[1]

    def damage_chunk(self, tokens: Sequence[int], *, chunk: int, rank: int = 0) -> None:
        """Flip a bit of a stored chunk."""
        flip_bit(self.tier(rank).rows, self.record_of_chunk(tokens, chunk=chunk).rows[0], byte=0)

    def expected(self, request_id: str) -> list[int]:
        """What a request must have answered, computed without any cache."""
        request = self.requests[request_id]
        return self.model.expected(
            request.prompt_token_ids, request.max_tokens, self.identities[request_id]
        )

    def assert_answers(self, *request_ids: str) -> None:
        """These requests ended well, with the tokens that they would have without a cache."""
        for request_id in request_ids:
            result = self.results[request_id]
            assert result.finish_reason == "length", request_id
            assert result.tokens == self.expected(request_id), request_id

    def assert_idle(self) -> None:
        """Nothing is left of any request: I8."""
        half, manager = self.half, self.manager
        assert not self.scheduler.requests
        assert not self.scheduler.has_requests()
        assert not self.connector.has_pending_push_work()
        assert not half._trackers
        assert not half._fetching
        assert not half._loads
        assert not half._stores
        assert len(half.holds) == 0
        assert manager.open_job_count == 0
        assert manager.lease_count == 0
        for worker in self.workers:
            assert worker.worker_half._mover.open_job_count == 0
            assert not worker.worker_half._results
            assert not worker.worker_half._load_errors
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        manager.check()
