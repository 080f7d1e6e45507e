"""Store and load between vLLM's paged KV blocks and CPUMemory, against a memcpy of the same bytes.

The tensors are vLLM's own views of one allocation in the layout of its CPU backend; jobs go through
the mover with two threads and the check values, as in a worker. The memcpy is one `numpy.copyto` in
one thread between buffers whose pages are there already.
"""

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from common import (
    Figures,
    OtherLoad,
    at_least,
    emit,
    interleaved,
    machine_facts,
    median_ratio,
    note,
    parser,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)

from opal_connector.integrations.vllm.layout import block_views
from opal_connector.integrations.vllm.paged_copy import paged_blocks
from opal_connector.keys import HASH_BYTES
from opal_connector.tiers import (
    CPUMemory,
    LaneSettings,
    Mover,
    PagedBlocks,
    allocate_host_rows,
    execute_job,
)
from opal_connector.transfers import JobResult, LoadJob, ObjectTransfer, StoreJob

BLOCK_COUNT = 512
MOVED_BLOCKS = 64
CONCURRENCY = 2
BAR = 0.8


@dataclass(frozen=True)
class Shape:
    """The KV shape of a model."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype
    chunk_tokens: int = 256

    @property
    def spec(self) -> FullAttentionSpec:
        """One layer, as vLLM describes it."""
        return FullAttentionSpec(
            block_size=self.block_tokens,
            num_kv_heads=self.kv_heads,
            head_size=self.head_dim,
            dtype=self.dtype,
        )


SHAPES = (
    Shape("smollm2_135m_float32", 30, 3, 64, 32, torch.float32),
    Shape("llama_8b_bfloat16", 32, 8, 128, 16, torch.bfloat16),
)


class Bench:
    """One model's paged cache, its pool and the jobs between them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        names = [f"layers.{index}" for index in range(shape.layers)]
        page_bytes = shape.spec.page_size_bytes
        layout = KVCacheLayout.LBHNC
        raw = torch.randint(
            -128, 127, (BLOCK_COUNT * shape.layers * page_bytes,), dtype=torch.int8,
            generator=torch.Generator().manual_seed(1),
        )  # fmt: skip
        strides = compute_layout_strides(shape.spec, BLOCK_COUNT, shape.layers, layout)
        place = KVCacheTensor(raw.numel(), names, layer_stride=strides[0], block_stride=strides[1])
        tensors = create_kv_cache_views(raw, shape.spec, BLOCK_COUNT, layout, place)
        caches = dict(zip(names, tensors, strict=True))
        views = block_views(caches, dict.fromkeys(names, page_bytes), BLOCK_COUNT)
        self.paged: PagedBlocks = paged_blocks({0: views}, BLOCK_COUNT)
        self.tier = CPUMemory(
            allocate_host_rows(row_count=MOVED_BLOCKS, row_bytes=self.paged.row_bytes)
        )
        self.mover = Mover(
            [self.tier], self.paged, rank=0, lanes=[LaneSettings(threads=CONCURRENCY)]
        )
        self.moved_bytes = MOVED_BLOCKS * self.paged.row_bytes
        self.source = np.ones(self.moved_bytes, dtype=np.uint8)
        self.target = np.zeros(self.moved_bytes, dtype=np.uint8)
        self._job_id = 0

    def objects(self, block_ids: Sequence[int]) -> tuple[ObjectTransfer, ...]:
        """Chunks over these blocks, in adjacent rows as a fresh pool hands them out."""
        chunk_blocks = self.shape.chunk_tokens // self.shape.block_tokens
        return tuple(
            ObjectTransfer(
                tier=0,
                group=0,
                tier_rows=tuple(range(first, first + chunk_blocks)),
                block_ids=tuple(block_ids[first : first + chunk_blocks]),
                stamps=b"".join(
                    sha256(str(block).encode()).digest()
                    for block in range(first, first + chunk_blocks)
                ),
            )
            for first in range(0, MOVED_BLOCKS, chunk_blocks)
        )

    def memcpy(self) -> None:
        """The same number of bytes, flat."""
        np.copyto(self.target, self.source)

    def store(self, objects: tuple[ObjectTransfer, ...], *, threaded: bool) -> None:
        """Paged blocks to rows."""
        self._job_id += 1
        self._run(StoreJob(self._job_id, objects), threaded=threaded)

    def load(self, objects: tuple[ObjectTransfer, ...], *, threaded: bool) -> None:
        """Rows to paged blocks, verified."""
        self._job_id += 1
        self._run(LoadJob(self._job_id, "request", objects), threaded=threaded)

    def close(self) -> None:
        """End the threads."""
        self.mover.close()

    def _run(self, job: StoreJob | LoadJob, *, threaded: bool) -> None:
        if threaded:
            self.mover.submit(job)
            result = self._wait()
        else:
            result = execute_job(job, tiers=[self.tier], paged=self.paged)
        assert not result.failed, result.failed

    def _wait(self) -> JobResult:
        while not (taken := self.mover.take_results()):
            time.sleep(0.0001)
        return taken[0][1]


class BusyThread:
    """A Python thread that never gives up the GIL by itself, like a busy engine loop."""

    def __enter__(self) -> "BusyThread":
        self._stop = False
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop = True
        self._thread.join()

    def _spin(self) -> None:
        count = 0
        while not self._stop:
            count += 1


def block_orders() -> dict[str, list[int]]:
    """Blocks as vLLM hands them out fresh, and in an order without any run."""
    start = 17
    shuffled = list(range(1, BLOCK_COUNT))
    random.Random(1).shuffle(shuffled)
    return {
        "contiguous": list(range(start, start + MOVED_BLOCKS)),
        "shuffled": shuffled[:MOVED_BLOCKS],
    }


def calls_for(
    bench: Bench, objects: tuple[ObjectTransfer, ...]
) -> dict[str, Callable[[], float | None]]:
    """What is compared in one round."""
    return {
        "memcpy": bench.memcpy,
        "store": lambda: bench.store(objects, threaded=True),
        "load": lambda: bench.load(objects, threaded=True),
        "store_one_thread": lambda: bench.store(objects, threaded=False),
        "load_one_thread": lambda: bench.load(objects, threaded=False),
    }


def check_round_trip(bench: Bench, objects: tuple[ObjectTransfer, ...]) -> None:
    """What comes back is what went: a fast copy of other bytes is worth nothing."""
    before = bench.tier.rows.copy()
    bench.load(objects, threaded=True)
    bench.tier.rows[...] = 0
    bench.store(objects, threaded=True)
    assert np.array_equal(before, bench.tier.rows)
    assert len(objects[0].stamps) == len(objects[0].tier_rows) * HASH_BYTES


def rates(seconds: dict[str, list[float]], moved_bytes: int) -> dict[str, float]:
    """Median GB/s of every call, and each call's ratio to the memcpy."""
    out = {
        f"{name}_gb_s": moved_bytes / statistics.median(values) / 1e9
        for name, values in seconds.items()
    }
    for name, values in seconds.items():
        if name != "memcpy":
            out[f"{name}_of_memcpy"] = median_ratio(seconds["memcpy"], values)
    return out


def main() -> None:
    """Run and print."""
    arguments = parser(__doc__).parse_args()
    facts = machine_facts()
    load = OtherLoad()
    repetitions = 11 if arguments.quick else 41
    figures: Figures = {"concurrency": CONCURRENCY, "blocks": MOVED_BLOCKS}
    bars = {}
    for shape in SHAPES:
        note(f"{shape.name} ...")
        bench = Bench(shape)
        figures[shape.name] = {
            "row_bytes": bench.paged.row_bytes,
            "moved_mib": bench.moved_bytes / (1 << 20),
        }
        for order, block_ids in block_orders().items():
            objects = bench.objects(block_ids)
            bench.store(objects, threaded=True)
            check_round_trip(bench, objects)
            seconds = interleaved(calls_for(bench, objects), repetitions=repetitions, warm_up=3)
            found = rates(seconds, bench.moved_bytes)
            with BusyThread():
                busy = interleaved(
                    calls_for(bench, objects),
                    repetitions=max(5, repetitions // 4),
                    warm_up=1,
                    patience=1,
                )
            figures[shape.name][order] = found
            figures[shape.name][f"{order}_beside_a_busy_thread"] = rates(busy, bench.moved_bytes)
            for verb in ("store", "load"):
                bars[f"{shape.name}_{order}_{verb}"] = at_least(found[f"{verb}_of_memcpy"], BAR)
        bench.close()
    statistic = f"medians of {repetitions} interleaved rounds; ratios are medians over rounds"
    figures["cores_used_by_others"] = round(load.cores(), 2)
    emit(arguments, facts=facts, statistic=statistic, figures=figures, bars=bars)


if __name__ == "__main__":
    main()
