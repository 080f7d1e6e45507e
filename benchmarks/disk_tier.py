"""Loads from and stores to LocalNVMe, against raw reads and writes of the same bytes.

Both sides use the same number of threads, the same kind of I/O, pieces of the same size and the
same check value for every row. A raw read goes through one open file per thread, piece by piece; a
raw write makes a new file of each piece, in one directory. Every file that is written is new on
both sides. `raw_stream` is a raw write to one file per thread: what any tier of one file per
object pays its filesystem for the files, beside the bar.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
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

from opal_connector.tiers import allocate_host_rows, file_io
from opal_connector.tiers.checks import row_check
from opal_connector.tiers.file_tier import file_bytes
from opal_connector.tiers.local_nvme import LocalNVMe
from opal_connector.tiers.record import header_bytes
from opal_connector.transfers import ObjectName

THREADS = 2
LOAD_BAR = 0.9
STORE_BAR = 0.8
NAMESPACE = sha256(b"benchmark").digest()


@dataclass(frozen=True)
class Shape:
    """Objects of so many blocks of so many bytes."""

    name: str
    row_bytes: int
    blocks: int
    objects: int


SHAPES = (
    Shape("smollm2_135m_float32", 1_474_560, 8, 40),
    Shape("small_chunks", 64 << 10, 4, 1024),
)


class Bench:
    """One shape's tier, its raw files, and the rows between them and memory."""

    def __init__(self, shape: Shape, root: Path) -> None:
        self.shape = shape
        self.root = root
        self.tier = LocalNVMe(root / "tier", row_bytes=shape.row_bytes, rank=0)
        assert not list(self.tier.open(NAMESPACE))
        self.is_direct = file_io.supports_direct(str(root))
        self.names = [self._name(number) for number in range(shape.objects)]
        # Every thread has rows of its own, for one object.
        self.rows = [
            allocate_host_rows(row_count=shape.blocks, row_bytes=shape.row_bytes)
            for _ in range(THREADS)
        ]
        source = np.random.default_rng(1)
        for rows in self.rows:
            rows[...] = source.integers(0, 256, rows.shape, dtype=np.uint8)
        self.heads = [
            memoryview(file_io.aligned_buffer(header_bytes(shape.blocks))) for _ in range(THREADS)
        ]
        self.pool = ThreadPoolExecutor(THREADS)
        self.moved_bytes = shape.objects * file_bytes(shape.blocks, shape.row_bytes)

    def _name(self, number: int) -> ObjectName:
        hashes = [sha256(b"%d/%d" % (number, block)).digest() for block in range(self.shape.blocks)]
        return ObjectName(0, NAMESPACE, b"".join(hashes))

    def in_threads(self, work: Callable[[int, Sequence[ObjectName]], None]) -> None:
        """The objects, divided among the threads."""
        parts = [(thread, self.names[thread::THREADS]) for thread in range(THREADS)]
        for _ in self.pool.map(lambda part: work(*part), parts):
            pass

    def checks(self, thread: int, name: ObjectName) -> list[int]:
        """What both sides do with every byte."""
        rows = self.rows[thread]
        return [row_check(rows[at], name.run, at) for at in range(self.shape.blocks)]

    def store(self) -> None:
        """Objects to new files of the tier."""

        def work(thread: int, names: Sequence[ObjectName]) -> None:
            numbers = range(self.shape.blocks)
            for name in names:
                checks = self.checks(thread, name)
                self.tier.write_object(name, self.rows[thread], numbers, checks)

        self.in_threads(work)

    def load(self) -> None:
        """Objects from the tier, verified."""

        def work(thread: int, names: Sequence[ObjectName]) -> None:
            numbers = range(self.shape.blocks)
            for name in names:
                self.tier.read_object(name, numbers, self.rows[thread], numbers)

        self.in_threads(work)

    def raw_store(self) -> None:
        """The same bytes to as many new files."""

        def work(thread: int, names: Sequence[ObjectName]) -> None:
            for number, name in enumerate(names):
                self.checks(thread, name)
                path = f"{self.root}/raw/{thread}-{number}"
                file = file_io.create(path, direct=self.is_direct)
                os.pwritev(file, [self.heads[thread], self.rows[thread].data], 0)
                os.close(file)

        self.in_threads(work)

    def raw_stream(self) -> None:
        """The same bytes to one new file for each thread: what files of their own cost."""

        def work(thread: int, names: Sequence[ObjectName]) -> None:
            file = file_io.create(self.raw_path(thread), direct=self.is_direct)
            offset = 0
            for name in names:
                self.checks(thread, name)
                buffers = [self.heads[thread], self.rows[thread].data]
                offset += os.pwritev(file, buffers, offset)
            os.close(file)

        self.in_threads(work)

    def raw_load(self) -> None:
        """The same bytes from one file for each thread."""

        def work(thread: int, names: Sequence[ObjectName]) -> None:
            file = file_io.open_for_reading(self.raw_path(thread), direct=self.is_direct)
            offset = 0
            for name in names:
                buffers = [self.heads[thread], self.rows[thread].data]
                offset += os.preadv(file, buffers, offset)
                self.checks(thread, name)
            os.close(file)
            assert offset == len(names) * file_bytes(self.shape.blocks, self.shape.row_bytes)

        self.in_threads(work)

    def raw_path(self, thread: int) -> str:
        """The one raw file of a thread."""
        return f"{self.root}/raw/stream-{thread}"

    def empty(self) -> None:
        """Remove what was stored, and let the filesystem settle."""
        for name in self.names:
            self.tier.remove_object(name)
        shutil.rmtree(self.root / "raw", ignore_errors=True)
        (self.root / "raw").mkdir()
        os.sync()

    def close(self) -> None:
        """End the threads and the tier."""
        self.pool.shutdown()
        self.tier.close()


def timed_store(bench: Bench, store: Callable[[], None]) -> float:
    """Seconds of a store into emptiness."""
    bench.empty()
    began = time.perf_counter()
    store()
    return time.perf_counter() - began


def measure(shape: Shape, directory: Path | None, repetitions: int) -> Figures:
    """One shape: rates and ratios."""
    root = Path(tempfile.mkdtemp(prefix="opal-disk-tier-", dir=directory))
    load = OtherLoad()
    try:
        bench = Bench(shape, root)
        seconds = interleaved(
            {
                "store": lambda: timed_store(bench, bench.store),
                "raw_store": lambda: timed_store(bench, bench.raw_store),
                "raw_stream": lambda: timed_store(bench, bench.raw_stream),
            },
            repetitions=repetitions,
        )
        bench.empty()
        bench.store()
        bench.raw_stream()
        seconds |= interleaved(
            {"load": bench.load, "raw_load": bench.raw_load}, repetitions=2 * repetitions
        )
        bench.close()
    finally:
        shutil.rmtree(root)
    figures: Figures = {
        f"{name}_gb_s": bench.moved_bytes / statistics.median(took) / 1e9
        for name, took in seconds.items()
    }
    figures["is_direct"] = bench.is_direct
    figures["store_of_stream"] = median_ratio(seconds["raw_stream"], seconds["store"])
    figures["store_of_raw"] = median_ratio(seconds["raw_store"], seconds["store"])
    figures["load_of_raw"] = median_ratio(seconds["raw_load"], seconds["load"])
    figures["cores_used_by_others"] = load.cores()
    return figures


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--directory", type=Path, help="where to measure [default: the usual one]")
    arguments = options.parse_args()
    facts = machine_facts()
    figures: Figures = {"threads": THREADS}
    bars: dict[str, Any] = {}
    for shape in SHAPES:
        note(f"measuring {shape.name}")
        measured = measure(shape, arguments.directory, 3 if arguments.quick else 9)
        figures[shape.name] = measured
        bars[f"{shape.name}_load"] = at_least(measured["load_of_raw"], LOAD_BAR)
        bars[f"{shape.name}_store"] = at_least(measured["store_of_raw"], STORE_BAR)
    emit(
        arguments,
        facts=facts,
        statistic="median over rounds of the ratio within a round",
        figures=figures,
        bars=bars,
    )


if __name__ == "__main__":
    main()
