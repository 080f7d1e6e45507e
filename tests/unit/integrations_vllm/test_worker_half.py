"""The worker half over a model of several kinds: its facts, its jobs, and how loads fail."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
import torch
from kv_models import (
    BLOCKS,
    FIELDS,
    MODELS,
    allocated,
    by_hand,
    full,
    grouped,
    memory,
    spoil,
    vllm_config,
)
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import CircularBufferSpec, CrossAttentionSpec, KVCacheConfig

from opal_connector.integrations.vllm.connector import OpalConnector
from opal_connector.integrations.vllm.messages import OpalStepJobs, OpalStepResults, WorkerFacts
from opal_connector.integrations.vllm.worker_half import FinishedLoads, WorkerHalf
from opal_connector.transfers import (
    JobBatch,
    JobResult,
    LoadJob,
    ObjectTransfer,
    StoreJob,
    row_stamps,
)

pytestmark = pytest.mark.vllm

RUN = bytes(range(64))  # two blocks
DEADLINE_SECONDS = 20.0


def connector(config: KVCacheConfig) -> OpalConnector:
    """A worker's connector with a little memory."""
    settings: Any = vllm_config(
        layers={
            name: SimpleNamespace(head_size=32)
            for group in config.kv_cache_groups
            for name in group.layer_names
        }
    )
    settings.kv_transfer_config = KVTransferConfig(
        kv_connector="OpalConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"CPUMemory": {"capacity_GB": "1MiB"}},
    )
    return OpalConnector(settings, KVConnectorRole.WORKER, config)


@contextmanager
def worker(config: KVCacheConfig, caches: dict[str, torch.Tensor]) -> Iterator[OpalConnector]:
    """A connector that has seen its tensors."""
    made = connector(config)
    made.register_kv_caches(caches)
    try:
        yield made
    finally:
        made.shutdown()


def half(made: OpalConnector) -> WorkerHalf:
    assert made.worker_half is not None
    return made.worker_half


def facts(made: OpalConnector) -> WorkerFacts:
    found = half(made).facts
    assert found is not None
    return found


def transfer(members: int, addresses: tuple[int, ...], *, run: bytes = RUN) -> ObjectTransfer:
    """Two blocks of every member, from or to row 0 on."""
    rows = tuple(range(len(addresses)))
    return ObjectTransfer(0, 0, rows, addresses, row_stamps(run, members))


def step(made: OpalConnector, batch: JobBatch) -> None:
    """One step with these jobs, as vLLM's runner takes it."""
    made.bind_connector_metadata(OpalStepJobs(batch))
    made.start_load_kv(SimpleNamespace())  # type: ignore[arg-type]
    made.wait_for_save()
    made.clear_connector_metadata()


def run_store(made: OpalConnector, item: ObjectTransfer) -> None:
    """Store and wait for the result."""
    step(made, JobBatch(stores=(StoreJob(1, (item,)),)))
    deadline = time.monotonic() + DEADLINE_SECONDS
    results: list[JobResult] = []
    while not results:
        assert time.monotonic() < deadline
        made.get_transfer_results(set())
        meta = made.build_connector_worker_meta()
        results += meta.results if isinstance(meta, OpalStepResults) else []
    assert results == [JobResult(1, 0, moved=results[0].moved)]


def run_load(
    made: OpalConnector, item: ObjectTransfer | None, missing: tuple[int, ...] = ()
) -> tuple[set[str], set[int]]:
    """Load and wait for it: the requests that failed, and the blocks."""
    objects = (item,) if item is not None else ()
    step(made, JobBatch(loads=(LoadJob(2, "request", objects, missing),)))
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        results = made.get_transfer_results(set())
        blocks = made.get_block_ids_with_load_errors()
        if results.finished_recving:
            assert results.finished_recving == {"request"}
            assert results.failed_recving <= results.finished_recving
            return results.failed_recving, blocks
        assert time.monotonic() < deadline
        assert not blocks
        assert not results.failed_recving


# What the worker says of itself.


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_served_by_the_worker(model: str) -> None:
    """No refusal, a row for the largest page, and a page format where there are several kinds."""
    config = grouped(MODELS[model])
    with worker(config, allocated(config)) as made:
        found = facts(made)

        assert found.refusal == ""
        assert found.block_count == BLOCKS
        assert found.row_bytes > 0
        assert bool(found.page_format) == (model not in ("dense", "two_sizes", "mla"))
        assert half(made).facts is found


def test_worker_refuses_what_the_scheduler_cannot_see() -> None:
    """The reason goes to the scheduler, and every hook is a no-op."""
    config = by_hand(full(), CrossAttentionSpec(**FIELDS))
    with worker(config, {}) as made:
        assert "kv group 1 (CrossAttentionSpec)" in facts(made).refusal
        assert half(made).take_finished_loads() == FinishedLoads(set(), set())


def test_rank_without_any_cached_layer_is_refused() -> None:
    """There is nothing to copy, and the engine still starts."""
    with worker(by_hand(full()), {}) as made:
        assert "no KV tensor" in facts(made).refusal


# What it does.


def test_object_of_several_kv_groups_comes_back_whole() -> None:
    """Rows of the first member's blocks, then of the next: stored together, loaded elsewhere."""
    config = grouped(MODELS["llama4"])
    caches = allocated(config)
    kv_groups = (0, 1, 2)
    sources = tuple(group * BLOCKS + 3 + 2 * group + i for group in kv_groups for i in (0, 1))
    targets = tuple(group * BLOCKS + 13 + 2 * group + i for group in kv_groups for i in (0, 1))
    with worker(config, caches) as made:
        run_store(made, transfer(3, sources))
        before = memory(caches).copy()
        spoil(caches, seed=1)

        assert run_load(made, transfer(3, targets)) == (set(), set())

    for name, tensor in caches.items():
        group = next(
            number
            for number, kv_group in enumerate(config.kv_cache_groups)
            if name in kv_group.layer_names
        )
        if group not in kv_groups:
            continue
        held = memory(caches).copy()
        memory(caches)[...] = before
        expected = tensor[3 + 2 * group : 5 + 2 * group].clone()
        memory(caches)[...] = held
        found = tensor[13 + 2 * group : 15 + 2 * group]
        assert np.array_equal(
            found.contiguous().view(torch.uint8).numpy(), expected.view(torch.uint8).numpy()
        ), name


def test_failed_load_of_a_dense_model_is_said_in_blocks() -> None:
    """What came before the failure is used."""
    config = grouped(MODELS["dense"])
    with worker(config, allocated(config)) as made:
        run_store(made, transfer(1, (3, 4)))

        assert run_load(made, transfer(1, (5, 6))) == (set(), set())
        assert run_load(made, transfer(1, (5, 6), run=bytes(64))) == (set(), {5, 6})
        assert run_load(made, None, missing=(7, 8)) == (set(), {7, 8})


@pytest.mark.parametrize("model", ["window_only", "gemma3", "mamba", "llama4"])
def test_failed_load_of_any_other_model_fails_its_request(model: str) -> None:
    """The request computes everything itself, and no block is named.

    A block's number would end an engine with several kv groups, and a window with a hole is of no
    use wherever the load is cut.
    """
    config = grouped(MODELS[model])
    with worker(config, allocated(config)) as made:
        run_store(made, transfer(1, (3, 4)))

        assert run_load(made, transfer(1, (5, 6))) == (set(), set())
        assert run_load(made, transfer(1, (5, 6), run=bytes(64))) == ({"request"}, set())
        assert run_load(made, None, missing=(7, 8)) == ({"request"}, set())


def test_dense_model_with_a_scratch_group_fails_by_request() -> None:
    """VLLM counts groups that are never cached when it decides whether blocks may be named."""
    scratch = CircularBufferSpec(**{**FIELDS, "block_size": 8})
    config = by_hand(full(), scratch)
    caches = {name: torch.zeros((BLOCKS, 1, 32, 8)) for name in ("g0.a", "g0.b")}
    with worker(config, caches) as made:
        run_store(made, transfer(1, (3, 4)))

        assert run_load(made, transfer(1, (5, 6), run=bytes(64))) == ({"request"}, set())


def test_older_hook_for_finished_transfers_says_the_same() -> None:
    """Whoever still asks `get_finished` hears which loads have ended."""
    config = grouped(MODELS["dense"])
    with worker(config, allocated(config)) as made:
        step(made, JobBatch(loads=(LoadJob(2, "request", (), (7,)),)))
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (found := made.get_finished(set()))[1] is None:
            assert time.monotonic() < deadline
        assert found == (None, {"request"})
        assert made.get_block_ids_with_load_errors() == {7}
