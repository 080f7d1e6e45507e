"""Ranks with the same KV store it once: how they agree, and what each of them then does."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
import torch
from kv_models import (
    MODELS,
    allocated,
    by_hand,
    full,
    grouped,
    mla,
    spoil,
    vllm_config,
)
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from opal_connector.integrations.vllm import replica_set, worker_half
from opal_connector.integrations.vllm.connector import OpalConnector
from opal_connector.integrations.vllm.host_resources import CudaPins
from opal_connector.integrations.vllm.messages import OpalStepJobs, OpalStepResults
from opal_connector.integrations.vllm.replica_set import (
    ReplicaSet,
    is_replicated,
    join_replica_set,
)
from opal_connector.keys import CHAIN_ROOT
from opal_connector.tiers.base import Rows
from opal_connector.tiers.shared_pool import SharedPool
from opal_connector.transfers import (
    CopyJob,
    DropJob,
    FailureKind,
    InventoryPage,
    JobBatch,
    JobResult,
    LoadJob,
    ObjectCopy,
    ObjectName,
    ObjectTransfer,
    StoreJob,
    TierHealth,
)

pytestmark = pytest.mark.vllm

RUN = bytes(range(64))  # two blocks
NAME = ObjectName(0, CHAIN_ROOT, RUN)
NAMESPACE = bytes(32)
DEADLINE_SECONDS = 20.0
ROW_BYTES = 4096


class Ranks:
    """A group of threads that speak to each other as vLLM's ranks do."""

    def __init__(self, size: int, other_stages: Sequence[bool] = ()) -> None:
        self.size = size
        self.other_stages = other_stages
        self._barrier = threading.Barrier(size, timeout=DEADLINE_SECONDS)
        self._said: list[Any] = [None] * size
        self._of_thread = threading.local()

    @property
    def rank(self) -> int:
        return int(self._of_thread.rank)

    def gather(self, said: Any) -> list[Any]:
        self._said[self.rank] = said
        self._barrier.wait()
        heard = list(self._said)
        self._barrier.wait()
        return heard

    def gather_stages(self, said: Any) -> list[Any]:
        return [said, *self.other_stages]

    def run(self, call: Callable[[int], Any]) -> list[Any]:
        """One call per rank, at a time."""

        def one(rank: int) -> Any:
            self._of_thread.rank = rank
            return call(rank)

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(one, range(self.size)))


def joined(
    size: int = 3, *, other_stages: Sequence[bool] = (), **changes: Callable[[int], Any]
) -> list[ReplicaSet | None]:
    """What every rank comes to, with arguments that may differ by rank."""
    ranks = Ranks(size, other_stages)

    def join(rank: int) -> ReplicaSet | None:
        given = {"row_bytes": ROW_BYTES, "pool_bytes": 4 * ROW_BYTES}
        given |= {name: value(rank) for name, value in changes.items()}
        return join_replica_set(ranks, stage=5, **given)

    return ranks.run(join)


# Who shares.


@pytest.mark.parametrize("model", MODELS)
def test_only_latents_are_the_same_on_every_rank(model: str) -> None:
    """Other kinds of attention split their heads over the ranks."""
    assert is_replicated(grouped(MODELS[model])) == (model == "mla")


def test_a_model_with_one_other_layer_is_stored_by_every_rank() -> None:
    """A row holds all layers of a rank, and a part of it would be the rank's own."""
    specs = {"layers.0": mla(), "layers.1": mla(), "layers.2": full(head_size=10)}

    assert not is_replicated(grouped(specs))


def test_a_stage_without_layers_of_the_other_kind_knows_of_it() -> None:
    """Of a pipeline, one stage may have nothing but latents."""
    config = by_hand(mla(), full())
    config.kv_cache_groups[1].layer_names.clear()

    assert not is_replicated(config)


# How they agree.


def test_all_ranks_have_the_memory_of_the_first() -> None:
    """What the holder writes is what the others read."""
    found = joined()

    assert [one is not None and one.is_holder for one in found] == [True, False, False]
    sets = [one for one in found if one is not None]
    assert {(one.stage, one.size) for one in sets} == {(5, 3)}
    assert sets[0].pool.rows.shape == (4, ROW_BYTES)
    sets[0].pool.rows[2, 7] = 9
    sets[0].pool.checks[2] = 11
    assert [int(one.pool.rows[2, 7]) for one in sets] == [9, 9, 9]
    assert [int(one.pool.checks[2]) for one in sets] == [11, 11, 11]


def _fails(*_: object, **__: object) -> Any:
    raise OSError("no such thing here")


class Pins:
    """A device that takes memory, or not."""

    def __init__(self, answer: Callable[[], bool] = lambda: True) -> None:
        self._answer = answer
        self.pinned_bytes = 0

    def pin(self, rows: Rows) -> bool:
        if self._answer():
            self.pinned_bytes += rows.nbytes
            return True
        return False

    def unpin(self, rows: Rows) -> None:
        self.pinned_bytes -= rows.nbytes


@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_that_cannot_share_leaves_all_on_their_own(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All come to the same end: half of a set would wait for the other for ever."""
    nobody = [None, None, None]
    assert joined(row_bytes=lambda own: 0 if own == rank else ROW_BYTES) == nobody
    assert joined(row_bytes=lambda own: 8192 if own == rank else ROW_BYTES) == nobody

    for answer in (lambda: False, _fails):
        pins = [Pins(answer if own == rank else lambda: True) for own in range(3)]
        assert joined(pins=lambda own, pins=pins: pins[own]) == nobody
        assert [one.pinned_bytes for one in pins] == [0, 0, 0]
    with monkeypatch.context() as patch:
        patch.setattr(SharedPool, "create", _fails)
        assert joined() == nobody
    with monkeypatch.context() as patch:
        patch.setattr(SharedPool, "map", _fails)
        assert joined() == nobody


def test_stages_of_a_pipeline_share_all_or_none() -> None:
    """Numbers of ranks that store would mean one thing here and another there."""
    pins = [Pins() for _ in range(3)]
    assert joined(other_stages=[False], pins=lambda own: pins[own]) == [None, None, None]
    assert [one.pinned_bytes for one in pins] == [0, 0, 0]
    assert None not in joined(other_stages=[True], pins=lambda own: pins[own])
    assert [one.pinned_bytes for one in pins] == [4 * ROW_BYTES] * 3


def test_ranks_on_two_hosts_store_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not reach from one host to the other."""
    hosts = iter(("one", "one", "two"))
    monkeypatch.setattr(replica_set, "_host_id", lambda: next(hosts))

    assert joined() == [None, None, None]


def test_pages_are_registered_with_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes, for all contexts; another answer than 0 is a no, whose error is taken away."""
    calls: list[tuple[str, tuple[int, ...]]] = []
    code = 0

    def register(*given: int) -> int:
        calls.append(("register", given))
        return code

    def unregister(*given: int) -> None:
        calls.append(("unregister", given))

    def take_error(*_: object, device: str) -> None:
        calls.append((device, ()))
        raise RuntimeError("the last error")

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", take_error)
    rows = np.zeros((3, 64), dtype=np.uint8)
    pins, place = CudaPins(), rows.ctypes.data

    assert pins.pin(rows)
    pins.unpin(rows)
    code = 712
    assert not pins.pin(rows)
    assert pins.pin(rows[:0])  # a tier of memory is not needed
    pins.unpin(rows[:0])
    registered = ("register", (place, 192, 1))
    assert calls == [registered, ("unregister", (place,)), registered, ("cuda", ())]


# What they then do.


class Engine:
    """The workers of one engine, of which every one is told the same."""

    def __init__(self, made: list[OpalConnector], caches: list[dict[str, torch.Tensor]]) -> None:
        self.made = made
        self.caches = caches
        self.results: list[list[JobResult]] = [[] for _ in made]
        self.pages: list[InventoryPage] = []
        self.health: dict[int, tuple[TierHealth, ...]] = {}
        self.failed: list[set[str]] = [set() for _ in made]
        self.errors: list[set[int]] = [set() for _ in made]

    def step(self, batch: JobBatch, namespace: bytes = b"") -> None:
        for worker in self.made:
            worker.bind_connector_metadata(OpalStepJobs(batch, namespace))
            worker.start_load_kv(SimpleNamespace())  # type: ignore[arg-type]
            worker.wait_for_save()
            worker.clear_connector_metadata()

    def collect(self, is_enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not is_enough():
            assert time.monotonic() < deadline
            for rank, worker in enumerate(self.made):
                self.failed[rank] |= worker.get_transfer_results(set()).failed_recving
                self.errors[rank] |= worker.get_block_ids_with_load_errors()
                meta = worker.build_connector_worker_meta()
                if isinstance(meta, OpalStepResults):
                    self.results[rank] += meta.results
                    self.pages += meta.pages
                    self.health |= meta.health

    def open(self) -> None:
        self.step(JobBatch(), NAMESPACE)
        last = len(self.made) * 2  # two tiers of files
        self.collect(lambda: sum(page.is_last for page in self.pages) == last)

    def run(self, batch: JobBatch, *job_ids: int) -> dict[int, list[JobResult]]:
        """The results of these jobs, by rank."""
        self.step(batch)
        wanted = {(rank, number) for rank in range(len(self.made)) for number in job_ids}
        self.collect(lambda: wanted <= self._answered())
        return {
            number: [
                next(result for result in results if result.job_id == number)
                for results in self.results
            ]
            for number in job_ids
        }

    def _answered(self) -> set[tuple[int, int]]:
        return {
            (rank, result.job_id) for rank, found in enumerate(self.results) for result in found
        }

    def blocks(self, rank: int, *numbers: int) -> bytes:
        return b"".join(
            self.caches[rank][name][list(numbers)].contiguous().view(torch.uint8).numpy().tobytes()
            for name in sorted(self.caches[rank])
        )


def _connector(config: KVCacheConfig, rank: int, directory: Path) -> OpalConnector:
    settings: Any = vllm_config(
        layers={
            name: SimpleNamespace(head_size=32)
            for group in config.kv_cache_groups
            for name in group.layer_names
        }
    )
    settings.parallel_config.rank = rank
    settings.parallel_config.world_size = 2
    settings.parallel_config.tensor_parallel_size = 2
    settings.model_config.use_mla = True
    settings.kv_transfer_config = KVTransferConfig(
        kv_connector="OpalConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "kvc_tiers": ["CPUMemory", "LocalNVMe", "DistributedFS"],
            "CPUMemory": {"capacity_GB": "1MiB"},
            "LocalNVMe": {"path": str(directory / "own"), "capacity_GB": "1MiB"},
            "DistributedFS": {"path": str(directory / "shared"), "capacity_GB": "1MiB"},
        },
    )
    return OpalConnector(settings, KVConnectorRole.WORKER, config)


@contextmanager
def engine(
    directory: Path, monkeypatch: pytest.MonkeyPatch, model: str = "mla"
) -> Iterator[Engine]:
    """Two ranks with equal blocks, joined."""
    config = grouped(MODELS[model])
    ranks = Ranks(2)
    monkeypatch.setattr(worker_half, "VllmRanks", lambda: ranks)
    made = [_connector(config, rank, directory) for rank in (0, 1)]
    caches = [allocated(config) for _ in made]
    ranks.run(lambda rank: made[rank].register_kv_caches(caches[rank]))
    with ExitStack() as stack:
        for one in made:
            stack.callback(one.shutdown)
        yield Engine(made, caches)


def transfer(tier: int, block_ids: tuple[int, ...], **more: Any) -> ObjectTransfer:
    return ObjectTransfer(tier, 0, (0, 1), block_ids, RUN, name=NAME if tier else None, **more)


def test_one_rank_stores_and_both_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory, the disk and the shared directory have one copy, which fills the blocks of both."""
    with engine(tmp_path, monkeypatch) as both:
        facts = [worker.worker_half.facts for worker in both.made if worker.worker_half]
        assert [fact.is_holder for fact in facts if fact] == [True, False]
        assert len({fact.tier_bytes["CPUMemory"] for fact in facts if fact}) == 1
        both.open()
        assert [page.is_borrowed for page in both.pages] == [page.rank == 1 for page in both.pages]

        expected = both.blocks(0, 3, 4)
        assert both.blocks(1, 3, 4) == expected
        for tier in (0, 1, 2):
            store = JobBatch(stores=(StoreJob(10 + tier, (transfer(tier, (3, 4)),)),))
            first, second = both.run(store, 10 + tier)[10 + tier]
            assert not first.failed
            assert first.moved[tier][0] > 0
            assert second == JobResult(10 + tier, 1)
        assert len(list(tmp_path.rglob("*.opal"))) == 2

        for tier in (0, 1, 2):
            for rank in (0, 1):
                spoil(both.caches[rank], seed=1 + tier)
            load = JobBatch(loads=(LoadJob(20 + tier, "request", (transfer(tier, (7, 9)),)),))
            results = both.run(load, 20 + tier)[20 + tier]
            assert not any(result.failed for result in results)
            assert both.blocks(0, 7, 9) == both.blocks(1, 7, 9) == expected
        assert both.failed == [set(), set()]
        assert both.errors == [set(), set()]


def test_copies_and_deletions_are_the_holders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank says at once that it has nothing to do, and what is kept is kept once."""
    with engine(tmp_path, monkeypatch) as both:
        both.open()
        both.run(JobBatch(stores=(StoreJob(1, (transfer(0, (3, 4)),)),)), 1)
        expected = both.blocks(0, 3, 4)
        copy = ObjectCopy(NAME, 0, (0, 1), 1, (0, 1))
        copied = both.run(JobBatch(copies=(CopyJob(2, (copy,)),)), 2)[2]
        assert copied[1] == JobResult(2, 1)
        assert not copied[0].failed
        assert len(list(tmp_path.rglob("*.opal"))) == 1

        kept = transfer(1, (7, 9), kept_tier=0, kept_rows=(2, 3))
        loaded = both.run(JobBatch(loads=(LoadJob(3, "request", (kept,), (), 4),)), 3, 4)
        assert not any(result.failed for number in (3, 4) for result in loaded[number])
        assert both.blocks(0, 7, 9) == both.blocks(1, 7, 9) == expected
        for rank in (0, 1):
            spoil(both.caches[rank], seed=3)
        again = ObjectTransfer(0, 0, (2, 3), (5, 6), RUN)
        both.run(JobBatch(loads=(LoadJob(5, "request", (again,)),)), 5)
        assert both.blocks(0, 5, 6) == both.blocks(1, 5, 6) == expected

        dropped = both.run(JobBatch(drops=(DropJob(6, 1, (NAME,), object_count=1),)), 6)[6]
        assert dropped == [JobResult(6, 0), JobResult(6, 1)]
        assert list(tmp_path.rglob("*.opal")) == []
        missing = both.run(JobBatch(loads=(LoadJob(7, "request", (transfer(1, (7, 9)),)),)), 7)[7]
        assert [result.failed for result in missing] == [{0: FailureKind.GONE}] * 2
        assert both.errors == [{7, 9}, {7, 9}]


def test_heads_that_are_split_are_stored_by_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of a dense model have two halves of everything."""
    with engine(tmp_path, monkeypatch, model="dense") as both:
        both.open()
        spoil(both.caches[1], seed=8)
        expected = [both.blocks(rank, 3, 4) for rank in (0, 1)]
        both.run(JobBatch(stores=(StoreJob(1, (transfer(1, (3, 4)),)),)), 1)
        assert len(list(tmp_path.rglob("*.opal"))) == 2
        both.run(JobBatch(loads=(LoadJob(2, "request", (transfer(1, (7, 9)),)),)), 2)

        assert [both.blocks(rank, 7, 9) for rank in (0, 1)] == expected
        assert expected[0] != expected[1]


REFUSED = by_hand(mla(), full(non_causal=True))


@pytest.mark.parametrize("other", [grouped(MODELS["mla"]), REFUSED], ids=["tensors", "spec"])
def test_a_rank_that_cannot_serve_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: KVCacheConfig
) -> None:
    """It says so to the scheduler, and to the ranks that wait to share with it.

    Whether it lacks tensors, or sees a spec that other stages do not have.
    """
    config = grouped(MODELS["mla"])
    ranks = Ranks(2)
    monkeypatch.setattr(worker_half, "VllmRanks", lambda: ranks)
    made = [_connector(one, rank, tmp_path) for rank, one in enumerate((config, other))]
    caches = [allocated(config), {}]
    ranks.run(lambda rank: made[rank].register_kv_caches(caches[rank]))

    facts = [one.worker_half.facts for one in made if one.worker_half]
    assert [fact.refusal != "" for fact in facts if fact] == [False, True]
    assert all(fact.is_holder for fact in facts if fact)
    for one in made:
        one.shutdown()
