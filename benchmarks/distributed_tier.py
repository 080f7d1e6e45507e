"""Loads from and stores to engines that others run, against each engine's own client used bare.

Both sides move the same bytes, with as many threads, to one server on this machine, turn about.
Bare is what a program does that wants bytes and no more: a value from one buffer, a value into
one, or into the library's own memory where the library fills no other; both load the very same
values. Opal's side also names, checks and verifies every row.

Loads are measured three ways: up to where a worker copies rows into the engine's blocks, which is
as far as bare goes and what the bar is for; to rows of memory that keep them; and into blocks.
Beside the last two stands bare with a copy to one buffer, where it did not read into that.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from bare_stores import BARE_CLIENTS, BareClient
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
from seaweed import running_seaweed

from opal_connector.cli.demo_stores import DEMO_STORES, DemoStore, running_store
from opal_connector.cli.progress import ConsoleReporter
from opal_connector.config import EngineTierConfig, load_config
from opal_connector.tiers import (
    ArrayBlocks,
    PagedBlocks,
    allocate_host_rows,
    make_keyed_tier,
)
from opal_connector.tiers.base import Rows
from opal_connector.tiers.checks import row_check
from opal_connector.tiers.engines import EngineTier
from opal_connector.tiers.engines.names import rank_prefix, value_key
from opal_connector.tiers.file_moves import Staging, load_object
from opal_connector.tiers.file_names import object_key
from opal_connector.tiers.record import file_bytes
from opal_connector.transfers import ObjectName, ObjectTransfer

THREADS = 2
BAR = 0.9
NAMESPACE = sha256(b"benchmark").digest()


@dataclass(frozen=True)
class Shape:
    """Objects of so many blocks of so many bytes."""

    name: str
    row_bytes: int
    blocks: int
    objects: int


SHAPES = (
    Shape("smollm2_135m_float32", 1_474_560, 8, 16),  # 11.8 MB, a chunk of 256 tokens
    Shape("four_mebibytes", 512 << 10, 8, 32),
)


class NoBlocks(ArrayBlocks):
    """Blocks that nothing is copied to: what was loaded stays where it lies."""

    def scatter(
        self, block_ids: Sequence[int], rows: Rows, tier_rows: Sequence[int], after: object
    ) -> None:
        """Nothing."""


class Bench:
    """One shape on one engine: Opal's tier, a bare client, and the rows of every thread."""

    def __init__(self, shape: Shape, store: DemoStore, bare: BareClient) -> None:
        self.shape = shape
        settings = tier_settings(store)
        tier, _ = make_keyed_tier(store.tier, settings, row_bytes=shape.row_bytes, rank=0)
        assert isinstance(tier, EngineTier)
        self.tier = tier
        assert not list(tier.open(NAMESPACE))
        self.names = [self._name(number) for number in range(shape.objects)]
        self.size_bytes = file_bytes(shape.blocks, shape.row_bytes)
        self.moved_bytes = shape.objects * self.size_bytes
        self.rows = [
            allocate_host_rows(row_count=shape.blocks, row_bytes=shape.row_bytes)
            for _ in range(THREADS)
        ]
        source = np.random.default_rng(1)
        for rows in self.rows:
            rows[...] = source.integers(0, 256, rows.shape, dtype=np.uint8)
        self.targets = [ArrayBlocks(np.zeros_like(rows)) for rows in self.rows]
        self.nowhere = NoBlocks(np.zeros((1, shape.row_bytes), np.uint8))
        self.staging = Staging()
        self.bare = bare
        self.buffers = [bare.buffer(self.size_bytes) for _ in range(THREADS)]
        for buffer in self.buffers:
            buffer[:] = os.urandom(self.size_bytes)
        self.pool = ThreadPoolExecutor(THREADS)

    def _name(self, number: int) -> ObjectName:
        hashes = [sha256(b"%d/%d" % (number, block)).digest() for block in range(self.shape.blocks)]
        return ObjectName(0, NAMESPACE, b"".join(hashes))

    def in_threads(self, work: Callable[[int, Sequence[int]], None]) -> None:
        """The objects, divided among the threads."""
        parts = [(thread, range(thread, len(self.names), THREADS)) for thread in range(THREADS)]
        for _ in self.pool.map(lambda part: work(*part), parts):
            pass

    def store(self) -> None:
        """Objects to the tier, checked on the way."""

        def work(thread: int, numbers: Sequence[int]) -> None:
            rows, blocks = self.rows[thread], range(self.shape.blocks)
            for number in numbers:
                name = self.names[number]
                checks = [row_check(rows[at], name.stamps, at) for at in blocks]
                self.tier.write_object(name, rows, blocks, checks)

        self.in_threads(work)

    def load(self) -> None:
        """Objects from the tier, verified, as a worker loads them, up to the copy to its blocks."""
        self._load_to([self.nowhere] * THREADS)

    def load_to_blocks(self) -> None:
        """Objects from the tier, verified, into blocks in memory."""
        self._load_to(self.targets)

    def _load_to(self, targets: Sequence[PagedBlocks]) -> None:
        blocks = tuple(range(self.shape.blocks))

        def work(thread: int, numbers: Sequence[int]) -> None:
            for number in numbers:
                name = self.names[number]
                item = ObjectTransfer(0, 0, blocks, blocks, name.stamps, name)
                load_object(item, [self.tier], targets[thread], None, self.staging)

        self.in_threads(work)

    def load_to_rows(self) -> None:
        """Objects from the tier, verified, to rows that keep them."""

        def work(thread: int, numbers: Sequence[int]) -> None:
            blocks = range(self.shape.blocks)
            for number in numbers:
                self.tier.read_object(self.names[number], blocks, self.rows[thread], blocks)

        self.in_threads(work)

    def bare_store(self) -> None:
        """As many bytes under other keys, from one buffer."""

        def work(thread: int, numbers: Sequence[int]) -> None:
            for number in numbers:
                self.bare.put(f"bare-{number}", self.buffers[thread])

        self.in_threads(work)

    def bare_load(self) -> None:
        """The very values that Opal loads."""
        self._bare_load(self.bare.get)

    def bare_copy(self) -> None:
        """The very values that Opal loads, into one buffer, whatever that takes."""
        self._bare_load(self.bare.fill)

    def _bare_load(self, call: Callable[[str, Any], None]) -> None:
        prefix = f"{self.bare.prefix}{rank_prefix(NAMESPACE, 0)}"

        def work(thread: int, numbers: Sequence[int]) -> None:
            for number in numbers:
                key = value_key(prefix, object_key(self.names[number]))
                call(key, self.buffers[thread])

        self.in_threads(work)

    def empty(self) -> None:
        """Remove what was stored, so that every store is into emptiness."""
        self.tier.wipe()
        self.bare.remove([f"bare-{number}" for number in range(len(self.names))])

    def close(self) -> None:
        """End the threads and the tier."""
        self.empty()
        self.pool.shutdown()
        self.tier.close()


def tier_settings(store: DemoStore) -> EngineTierConfig:
    """The settings of the store's tier, as a user writes them."""
    settings = {**store.settings, "concurrency": THREADS, "timeout_seconds": 60}
    if "segment_GB" in settings:
        settings["segment_GB"] = "1536MiB"  # for both sides
    found = load_config({"kvc_tiers": [store.tier], store.tier: settings}).shared_tier()
    assert found is not None
    assert isinstance(found[1], EngineTierConfig)
    return found[1]


def measure(shape: Shape, store: DemoStore, bare: BareClient, repetitions: int) -> Figures:
    """One shape on one engine: rates and ratios."""
    load = OtherLoad()
    bench = Bench(shape, store, bare)

    def emptied(call: Callable[[], None]) -> Callable[[], float]:
        def run() -> float:
            bench.empty()
            began = time.perf_counter()
            call()
            return time.perf_counter() - began

        return run

    try:
        seconds = interleaved(
            {"store": emptied(bench.store), "bare_store": emptied(bench.bare_store)},
            repetitions=repetitions,
        )
        bench.empty()
        bench.store()
        seconds |= interleaved(
            {
                "load": bench.load,
                "bare_load": bench.bare_load,
                "load_to_rows": bench.load_to_rows,
                "load_to_blocks": bench.load_to_blocks,
                "bare_copy": bench.bare_copy,
            },
            repetitions=repetitions,
        )
    finally:
        bench.close()
    figures: Figures = {
        f"{name}_gb_s": bench.moved_bytes / statistics.median(took) / 1e9
        for name, took in seconds.items()
    }
    figures["store_of_bare"] = median_ratio(seconds["bare_store"], seconds["store"])
    figures["load_of_bare"] = median_ratio(seconds["bare_load"], seconds["load"])
    for way in ("load_to_rows", "load_to_blocks"):
        figures[f"{way}_of_bare"] = median_ratio(seconds["bare_load"], seconds[way])
        figures[f"{way}_of_bare_copy"] = median_ratio(seconds["bare_copy"], seconds[way])
    figures["cores_used_by_others"] = load.cores()
    return figures


def running(kind: str, directory: Path) -> AbstractContextManager[DemoStore]:
    """The server; the demo's own for S3 is too slow to tell clients apart."""
    if kind == "s3":
        return running_seaweed(directory)
    return running_store(kind, directory, ConsoleReporter())


@contextmanager
def engine(kind: str) -> Iterator[tuple[DemoStore, BareClient]]:
    """A store that runs on this machine, and its own client."""
    memory = Path("/dev/shm")  # what is measured is the way there, not a disk
    with (
        tempfile.TemporaryDirectory(
            prefix="opal-distributed-", dir=memory if memory.is_dir() else None
        ) as directory,
        running(kind, Path(directory)) as store,
    ):
        os.environ.update(store.environment)
        bare = BARE_CLIENTS[kind](store)
        try:
            yield store, bare
        finally:
            bare.close()


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--engine", choices=list(DEMO_STORES), action="append")
    arguments = options.parse_args()
    facts = machine_facts()
    figures: Figures = {"threads": THREADS}
    bars: dict[str, Any] = {}
    for kind in arguments.engine or DEMO_STORES:
        with engine(kind) as (store, bare):
            for shape in SHAPES:
                note(f"measuring {kind}, {shape.name}")
                measured = measure(shape, store, bare, 3 if arguments.quick else 9)
                figures[f"{kind}_{shape.name}"] = measured
                for way in ("load", "store"):
                    bar = at_least(measured[f"{way}_of_bare"], BAR)
                    bars[f"{kind}_{shape.name}_{way}"] = bar
    emit(
        arguments,
        facts=facts,
        statistic="median over rounds of the ratio within a round",
        figures=figures,
        bars=bars,
    )


if __name__ == "__main__":
    main()
