"""`SharedPool`: one process's rows, read by another one of the same host, and nobody else's."""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fakes import stamp

from opal_connector.tiers import ArrayBlocks, ChecksumMismatchError, CPUMemory
from opal_connector.tiers.shared_pool import PoolAddress, SharedPool
from opal_connector.transfers import ObjectTransfer

ROW_BYTES = 512
RUN = stamp(1) + stamp(2)
READER = """
import sys
import msgspec, numpy
from opal_connector.tiers import ArrayBlocks, CPUMemory
from opal_connector.tiers.shared_pool import PoolAddress, SharedPool
from opal_connector.transfers import ObjectTransfer

pool = SharedPool.map(msgspec.json.decode(sys.argv[1], type=PoolAddress))
blocks = ArrayBlocks(numpy.zeros((4, 512), dtype=numpy.uint8))
item = ObjectTransfer(0, 0, (3, 1), (0, 2), bytes.fromhex(sys.argv[2]))
CPUMemory(pool.rows, pool.checks).read(item, blocks, None)
print(blocks.blocks.tobytes().hex(), pool.slot)
"""


def transfer(tier_rows: tuple[int, ...], block_ids: tuple[int, ...]) -> ObjectTransfer:
    return ObjectTransfer(0, 0, tier_rows, block_ids, RUN)


def random_blocks() -> ArrayBlocks:
    rows = np.random.default_rng(3).integers(0, 256, (4, ROW_BYTES), dtype=np.uint8)
    return ArrayBlocks(rows)


def stored(pool: SharedPool) -> ArrayBlocks:
    """Blocks 1 and 3 in rows 3 and 1, by the process that has the memory."""
    blocks = random_blocks()
    CPUMemory(pool.rows, pool.checks).write(transfer((3, 1), (1, 3)), blocks, None)
    return blocks


def test_another_process_reads_what_was_stored(tmp_path: Path) -> None:
    """Rows and check values are the same memory, and the directory's number comes along."""
    pool = SharedPool.create(row_count=5, row_bytes=ROW_BYTES)
    blocks = stored(pool)
    assert pool.slot == -1
    pool.slot = 7

    address = msgspec.json.encode(pool.address).decode()
    found = subprocess.run(
        [sys.executable, "-c", READER, address, RUN.hex()],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )

    data, slot = found.stdout.split()
    read = np.frombuffer(bytes.fromhex(data), dtype=np.uint8).reshape(4, ROW_BYTES)
    assert np.array_equal(read[0], blocks.blocks[1])
    assert np.array_equal(read[2], blocks.blocks[3])
    assert not read[[1, 3]].any()
    assert slot == "7"


def test_a_row_that_changes_is_no_hit_for_the_reader() -> None:
    """The check values are shared, so what does not fit them does not reach a block."""
    pool = SharedPool.create(row_count=5, row_bytes=ROW_BYTES)
    stored(pool)
    reader = SharedPool.map(pool.address)
    pool.rows[1, 9] ^= 1
    blocks = ArrayBlocks(np.zeros((4, ROW_BYTES), dtype=np.uint8))

    with pytest.raises(ChecksumMismatchError):
        CPUMemory(reader.rows, reader.checks).read(transfer((3, 1), (0, 2)), blocks, None)


def test_a_pool_without_rows_still_tells_the_directory() -> None:
    """Without a tier of memory there is nothing but the note."""
    pool = SharedPool.create(row_count=0, row_bytes=ROW_BYTES)
    reader = SharedPool.map(pool.address)
    pool.slot = 0

    assert reader.rows.shape == (0, ROW_BYTES)
    assert reader.slot == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("token", 1), ("row_count", 6), ("rows_file", 0), ("notes_file", 9999), ("process", 0)],
)
def test_something_else_is_never_mapped(field: str, value: int) -> None:
    """Numbers of processes and files are used again: what is there must say that it is meant."""
    pool = SharedPool.create(row_count=5, row_bytes=ROW_BYTES)
    wrong: PoolAddress = msgspec.structs.replace(pool.address, **{field: value})

    with pytest.raises(OSError, match=r"another|size|No such"):
        SharedPool.map(wrong)
