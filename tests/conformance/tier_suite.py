"""What every tier store does. One subclass per tier supplies a factory and two raw accessors.

The accessors go around the class, so that a test can do to the bytes what a disk or a neighbour
does. The suite's docstrings are the specification.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fakes import ROW_BYTES, Row, content, stamp, transfer

from opal_connector.tiers import ArrayBlocks, ChecksumMismatchError, TierStore
from opal_connector.transfers import row_stamps

ROWS = 12
BLOCKS = 24
UNTOUCHED = 0xA5


class BrokenBlocks(ArrayBlocks):
    """Paged blocks whose gather raises from the call on that is given."""

    def __init__(self, inner: ArrayBlocks, first_failure: int) -> None:
        super().__init__(inner.blocks)
        self.batch_blocks = inner.batch_blocks
        self._calls_left = first_failure

    def gather(self, *args: Any) -> None:
        if self._calls_left == 0:
            raise OSError("the device is gone")
        self._calls_left -= 1
        super().gather(*args)


class StoppedBlocks(ArrayBlocks):
    """Paged blocks whose gather stops half-way until the test goes on."""

    def __init__(self, inner: ArrayBlocks) -> None:
        super().__init__(inner.blocks)
        self.is_inside = threading.Event()
        self.go_on = threading.Event()

    def gather(self, *args: Any) -> None:
        super().gather(*args)
        self.is_inside.set()
        assert self.go_on.wait(30)


class TierSuite:
    """Inherit, name the class `Test...`, and supply the three methods below."""

    def make(self, row_count: int, row_bytes: int) -> TierStore:
        """An empty store."""
        raise NotImplementedError

    def raw_get(self, store: TierStore, row: int) -> bytes:
        """The bytes of a row, around the class."""
        raise NotImplementedError

    def raw_set(self, store: TierStore, row: int, data: bytes) -> None:
        """Overwrite a row, around the class."""
        raise NotImplementedError

    members = 1  # kv groups of the objects whose rows these are

    def stamp_of(self, number: int) -> bytes:
        """What row `number` holds: with several members, those of a block follow one another."""
        block, member = divmod(number, self.members)
        return row_stamps(stamp(block), self.members)[32 * member :][:32]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if name.startswith("test_") and hasattr(TierSuite, name):
                raise TypeError(f"{cls.__name__} overrides {name}: the suite is for all tiers")

    @pytest.fixture
    def store(self) -> TierStore:
        return self.make(ROWS, ROW_BYTES)

    @pytest.fixture
    def paged(self) -> ArrayBlocks:
        """Blocks that hold the content of their own number's hash; batches of three."""
        blocks = np.stack([content(self.stamp_of(number)) for number in range(BLOCKS)])
        paged = ArrayBlocks(blocks)
        paged.batch_blocks = 3
        return paged

    @pytest.fixture
    def target(self) -> ArrayBlocks:
        """Blocks to load into."""
        paged = ArrayBlocks(np.full((BLOCKS, ROW_BYTES), UNTOUCHED, dtype=np.uint8))
        paged.batch_blocks = 3
        return paged

    def expect_blocks(self, target: ArrayBlocks, expected: dict[int, Row]) -> None:
        """These blocks hold that, all others are untouched."""
        for block_id in range(BLOCKS):
            wanted = expected.get(block_id, np.full(ROW_BYTES, UNTOUCHED, dtype=np.uint8))
            assert np.array_equal(target.blocks[block_id], wanted), f"block {block_id}"

    # What was written is read.

    @pytest.mark.parametrize(
        ("rows", "sources", "targets"),
        [
            ([0], [0], [0]),
            ([ROWS - 1], [BLOCKS - 1], [5]),
            ([2, 3, 4], [7, 8, 9], [7, 8, 9]),
            ([9, 0, 5], [4, 20, 11], [3, 1, 2]),
            ([5, 4, 3, 2], [9, 8, 7, 6], [0, 2, 4, 6]),
            ([8, 1, 9, 2, 10, 3, 11], [0, 2, 4, 6, 8, 10, 12], [12, 13, 1, 0, 20, 22, 21]),
        ],
        ids=["one", "last", "adjacent", "scattered", "descending", "several-batches"],
    )
    def test_what_was_written_is_read(
        self,
        store: TierStore,
        paged: ArrayBlocks,
        target: ArrayBlocks,
        rows: Sequence[int],
        sources: Sequence[int],
        targets: Sequence[int],
    ) -> None:
        """Rows and blocks anywhere, in any order, also more than one call of the copier takes."""
        names = [self.stamp_of(source) for source in sources]

        written = store.write(transfer(rows, sources, names), paged, None)
        read = store.read(transfer(rows, targets, names), target, None)

        assert written == read == len(rows) * ROW_BYTES
        self.expect_blocks(
            target, {block: content(name) for block, name in zip(targets, names, strict=True)}
        )

    def test_part_of_an_object_is_read(
        self, store: TierStore, paged: ArrayBlocks, target: ArrayBlocks
    ) -> None:
        """A load may need the middle of an object; every block stands for itself."""
        names = [self.stamp_of(number) for number in range(5)]
        store.write(transfer([7, 2, 9, 4, 1], range(5), names), paged, None)

        store.read(transfer([9, 4], [20, 21], names[2:4]), target, None)

        self.expect_blocks(target, {20: content(names[2]), 21: content(names[3])})

    def test_nothing_is_moved_for_nothing(
        self, store: TierStore, paged: ArrayBlocks, target: ArrayBlocks
    ) -> None:
        """A transfer without blocks moves no byte and fails nobody."""
        assert store.write(transfer([], [], []), paged, None) == 0
        assert store.read(transfer([], [], []), target, None) == 0
        self.expect_blocks(target, {})

    def test_rewritten_row_is_read_under_its_new_name_only(
        self, store: TierStore, paged: ArrayBlocks, target: ArrayBlocks
    ) -> None:
        """A row that was given to another object is a miss for the old one."""
        store.write(transfer([3], [0], [self.stamp_of(0)]), paged, None)
        store.write(transfer([3], [1], [self.stamp_of(1)]), paged, None)

        with pytest.raises(ChecksumMismatchError):
            store.read(transfer([3], [0], [self.stamp_of(0)]), target, None)
        self.expect_blocks(target, {})
        store.read(transfer([3], [0], [self.stamp_of(1)]), target, None)
        self.expect_blocks(target, {0: content(self.stamp_of(1))})

    def test_same_bytes_can_be_written_again(
        self, store: TierStore, paged: ArrayBlocks, target: ArrayBlocks
    ) -> None:
        """Storing twice is harmless."""
        for _ in range(2):
            store.write(transfer([3], [0], [self.stamp_of(0)]), paged, None)

        store.read(transfer([3], [0], [self.stamp_of(0)]), target, None)
        self.expect_blocks(target, {0: content(self.stamp_of(0))})

    # What was not written is a miss.

    @pytest.mark.parametrize("name", [stamp(1), bytes(32), b"\xff" * 32])
    def test_row_that_was_never_written_is_a_miss(
        self, store: TierStore, target: ArrayBlocks, name: bytes
    ) -> None:
        """Fresh memory is zeros, and zeros are nobody's KV."""
        with pytest.raises(ChecksumMismatchError):
            store.read(transfer([3], [0], [name]), target, None)
        self.expect_blocks(target, {})

    def test_read_under_other_names_is_a_miss(
        self, store: TierStore, paged: ArrayBlocks, target: ArrayBlocks
    ) -> None:
        """Another hash, or the right hashes in another order, is not what was stored."""
        names = [self.stamp_of(0), self.stamp_of(1)]
        store.write(transfer([3, 4], [0, 1], names), paged, None)

        for wrong in (
            [self.stamp_of(2), self.stamp_of(1)],
            [self.stamp_of(0), self.stamp_of(2)],
            names[::-1],
        ):
            with pytest.raises(ChecksumMismatchError):
                store.read(transfer([3, 4], [0, 1], wrong), target, None)
        self.expect_blocks(target, {})

    def test_equal_bytes_of_two_blocks_are_still_two_blocks(
        self, store: TierStore, target: ArrayBlocks
    ) -> None:
        """Zeroed KV of one block is not readable as the zeroed KV of another."""
        zeros = ArrayBlocks(np.zeros((2, ROW_BYTES), dtype=np.uint8))
        store.write(transfer([3, 4], [0, 1], [self.stamp_of(0), self.stamp_of(1)]), zeros, None)

        with pytest.raises(ChecksumMismatchError):
            store.read(transfer([4, 3], [0, 1], [self.stamp_of(0), self.stamp_of(1)]), target, None)
        self.expect_blocks(target, {})

    # HT-13: same length, other bytes.

    @pytest.mark.parametrize(
        ("offset", "bit"), [(0, 0), (0, 7), (ROW_BYTES // 2, 3), (ROW_BYTES - 1, 0)]
    )
    def test_ht_13_flipped_bit_is_a_miss(
        self, store: TierStore, paged: ArrayBlocks, target: ArrayBlocks, offset: int, bit: int
    ) -> None:
        """One bit, anywhere in a row, is found before the row is used."""
        store.write(transfer([3], [0], [self.stamp_of(0)]), paged, None)
        data = bytearray(self.raw_get(store, 3))
        data[offset] ^= 1 << bit
        self.raw_set(store, 3, bytes(data))

        with pytest.raises(ChecksumMismatchError):
            store.read(transfer([3], [0], [self.stamp_of(0)]), target, None)
        self.expect_blocks(target, {})

    def damage_cases(self) -> dict[str, Callable[[TierStore], None]]:
        def zero_fill(store: TierStore) -> None:
            self.raw_set(store, 3, bytes(ROW_BYTES))

        def swap(store: TierStore) -> None:
            third, fourth = self.raw_get(store, 3), self.raw_get(store, 4)
            self.raw_set(store, 3, fourth)
            self.raw_set(store, 4, third)

        def overwrite_half(store: TierStore) -> None:
            half = ROW_BYTES // 2
            self.raw_set(store, 3, self.raw_get(store, 4)[:half] + self.raw_get(store, 3)[half:])

        def shift(store: TierStore) -> None:
            data = self.raw_get(store, 3)
            self.raw_set(store, 3, data[1:] + data[:1])

        return {
            "zero_fill": zero_fill,
            "swap": swap,
            "overwrite_half": overwrite_half,
            "shift": shift,
        }

    @pytest.mark.parametrize("damage", ["zero_fill", "swap", "overwrite_half", "shift"])
    def test_ht_13_damaged_row_is_a_miss_until_it_is_written_again(
        self, store: TierStore, paged: ArrayBlocks, target: ArrayBlocks, damage: str
    ) -> None:
        """Zeroed, exchanged, half overwritten or shifted: a miss, and the next write repairs it."""
        names = [self.stamp_of(0), self.stamp_of(1)]
        item = transfer([3, 4], [0, 1], names)
        store.write(item, paged, None)
        self.damage_cases()[damage](store)

        with pytest.raises(ChecksumMismatchError):
            store.read(item, target, None)
        self.expect_blocks(target, {})

        store.write(item, paged, None)
        store.read(item, target, None)
        self.expect_blocks(target, {0: content(names[0]), 1: content(names[1])})

    @pytest.mark.parametrize("bad", range(7))
    def test_block_of_a_damaged_row_is_never_written(
        self, store: TierStore, paged: ArrayBlocks, target: ArrayBlocks, bad: int
    ) -> None:
        """What verified may be in its block already; what did not is in none."""
        rows, names = [8, 1, 9, 2, 10, 3, 11], [self.stamp_of(number) for number in range(7)]
        store.write(transfer(rows, range(7), names), paged, None)
        data = bytearray(self.raw_get(store, rows[bad]))
        data[5] ^= 1
        self.raw_set(store, rows[bad], bytes(data))

        with pytest.raises(ChecksumMismatchError):
            store.read(transfer(rows, range(7), names), target, None)

        for position, name in enumerate(names):
            block = target.blocks[position]
            is_right = np.array_equal(block, content(name)) and position != bad
            assert is_right or np.all(block == UNTOUCHED), f"block {position}"

    def test_neighbours_of_a_damaged_row_are_read(
        self, store: TierStore, paged: ArrayBlocks, target: ArrayBlocks
    ) -> None:
        """Damage costs the row that has it, not those beside it."""
        names = [self.stamp_of(number) for number in range(3)]
        store.write(transfer([3, 4, 5], range(3), names), paged, None)
        self.raw_set(store, 4, bytes(ROW_BYTES))

        store.read(transfer([3], [0], names[:1]), target, None)
        store.read(transfer([5], [2], names[2:]), target, None)
        self.expect_blocks(target, {0: content(names[0]), 2: content(names[2])})

    # A write that did not end.

    @pytest.mark.parametrize("first_failure", [0, 1, 2])
    def test_failed_write_leaves_nothing_readable(
        self, store: TierStore, paged: ArrayBlocks, target: ArrayBlocks, first_failure: int
    ) -> None:
        """All of an object or nothing: also what was there before and what went well is gone."""
        rows = [8, 1, 9, 2, 10, 3, 11]
        old = [self.stamp_of(number + 10) for number in range(7)]
        names = [self.stamp_of(number) for number in range(7)]
        store.write(transfer(rows, range(10, 17), old), paged, None)

        with pytest.raises(OSError, match="gone"):
            store.write(transfer(rows, range(7), names), BrokenBlocks(paged, first_failure), None)

        for row, before, name in zip(rows, old, names, strict=True):
            for wanted in (before, name):
                with pytest.raises(ChecksumMismatchError):
                    store.read(transfer([row], [0], [wanted]), target, None)
        self.expect_blocks(target, {})

    def test_ht_10_read_during_a_write_is_a_miss(
        self, store: TierStore, paged: ArrayBlocks, target: ArrayBlocks
    ) -> None:
        """Bytes that are on their way are not served, under no name."""
        store.write(transfer([3], [0], [self.stamp_of(0)]), paged, None)
        stopped = StoppedBlocks(paged)
        writer = threading.Thread(
            target=store.write, args=(transfer([3], [1], [self.stamp_of(1)]), stopped, None)
        )
        writer.start()
        assert stopped.is_inside.wait(30)
        try:
            for name in (self.stamp_of(0), self.stamp_of(1)):
                with pytest.raises(ChecksumMismatchError):
                    store.read(transfer([3], [0], [name]), target, None)
        finally:
            stopped.go_on.set()
            writer.join(30)

        store.read(transfer([3], [0], [self.stamp_of(1)]), target, None)
        self.expect_blocks(target, {0: content(self.stamp_of(1))})

    def test_close_ends_without_a_sound(self, store: TierStore, paged: ArrayBlocks) -> None:
        """A tier with something in it can be given up."""
        store.write(transfer([3], [0], [self.stamp_of(0)]), paged, None)

        store.close()
