"""What every engine that others run does as a tier. One subclass per engine supplies a world.

The world's raw accessors go around the classes, so that a test can do to values what a neighbour,
an eviction or a broken machine does. What happens when the engine itself stops, hangs or forgets
is in `engine_fault_suite`.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
import pytest
from dict_engine import refreshed
from file_tier_suite import OBJECT_ROWS, Pool, Shape, make_name

from opal_connector.tiers import ChecksumMismatchError, allocate_host_rows, file_bytes
from opal_connector.tiers.checks import row_check
from opal_connector.tiers.engines import EngineClient, EngineMedium, EngineTier
from opal_connector.tiers.engines.names import rank_prefix, value_key
from opal_connector.tiers.file_errors import AbandonedError, ObjectGoneError
from opal_connector.tiers.file_names import object_key
from opal_connector.transfers import ObjectName

ROW_SIZES = [4096, 1000, 65536]
_numbers = itertools.count()


class EngineWorld(Protocol):
    """An engine that runs, and ways to its values around our classes.

    Keys are those that our client is given: what its settings put before them is the world's.
    """

    def client(self, timeout_seconds: float = 5.0) -> EngineClient:
        """A new client of the product."""

    def raw_get(self, key: str) -> bytes | None:
        """A value, or None."""

    def raw_put(self, key: str, value: bytes) -> None:
        """Put a value in the place of whatever is there."""

    def raw_delete(self, key: str) -> None:
        """Take a value away."""


class EngineSuite:
    """Inherit, name the class `Test...`, and supply a fixture `world` of the class's scope."""

    members = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[1:]:
            for name in vars(cls):
                if name.startswith("test_") and name in vars(base):
                    raise TypeError(
                        f"{cls.__name__} overrides {name}: the suite is for all engines"
                    )

    @pytest.fixture(autouse=True)
    def shape(self) -> Iterator[None]:
        """Let all objects of a test have so many members."""
        Shape.members = self.members
        yield
        Shape.members = 1

    @pytest.fixture
    def namespace(self) -> bytes:
        """One that no other test uses: the engine is the same for all."""
        return sha256(f"{type(self).__name__} {next(_numbers)}".encode()).digest()

    @pytest.fixture(params=ROW_SIZES)
    def row_bytes(self, request: pytest.FixtureRequest) -> int:
        return int(request.param)

    @pytest.fixture
    def pool(self, row_bytes: int) -> Pool:
        return Pool(row_bytes)

    @pytest.fixture
    def tier(self, world: EngineWorld, namespace: bytes, row_bytes: int) -> Iterator[EngineTier]:
        tier = opened(world, namespace, row_bytes)
        yield tier
        tier.close()

    # What is written comes back.

    @pytest.mark.parametrize("rows", [3, 6, 12])
    def test_object_of_any_length(
        self, tier: EngineTier, pool: Pool, row_bytes: int, rows: int
    ) -> None:
        """Byte for byte, with its check values; the size is told."""
        blocks = rows // Shape.members
        name = make_name(1, blocks)
        assert pool.write(tier, name) == file_bytes(blocks, row_bytes, Shape.members)
        pool.read(tier, name)

    def test_rows_anywhere_in_memory(self, tier: EngineTier, pool: Pool) -> None:
        """In any order, from and to rows that do not adjoin; other rows stay as they are."""
        name = make_name(1)
        pool.write(tier, name, [9, 2, 3, 15, 0, 7])
        pool.read(tier, name, None, [1, 0, 8, 9, 10, 4])

    @pytest.mark.parametrize("positions", [[0], [5], [2, 3], [5, 0, 3], [1, 2, 4, 5]])
    def test_a_part_of_an_object(self, tier: EngineTier, pool: Pool, positions: list[int]) -> None:
        """Some rows, in any order; what is not asked for is not touched."""
        name = make_name(1)
        pool.write(tier, name)
        pool.read(tier, name, positions)

    @pytest.mark.parametrize("positions", [[0], [1, 2], [5, 0, 3], range(OBJECT_ROWS)])
    def test_lent_rows_are_the_objects(
        self, tier: EngineTier, pool: Pool, positions: Sequence[int]
    ) -> None:
        """Where the memory that a value came in is lent, its rows are those that were stored."""
        name = make_name(1)
        pool.write(tier, name)
        lent = tier.lend_rows(name, positions)
        if lent is not None:
            for position in positions:
                assert np.array_equal(lent[position], pool.wanted(name, position))
        with contextlib.suppress(ObjectGoneError):
            assert tier.lend_rows(make_name(2), positions) is lent is None, "there is no such value"

    def test_written_again_is_replaced(self, tier: EngineTier, pool: Pool) -> None:
        """The later one counts, also where the first was damaged."""
        name, other = make_name(1), make_name(1, parent=5)
        pool.write(tier, name)
        pool.write(tier, other)
        pool.read(tier, other)
        with pytest.raises(ChecksumMismatchError):
            pool.read(tier, name)

    def test_large_object(self, world: EngineWorld, namespace: bytes) -> None:
        """Of many rows and several MiB, as real chunks are."""
        row_bytes, blocks = 256 << 10, 30 // Shape.members
        tier = opened(world, namespace, row_bytes)
        name = make_name(1, blocks)
        rows = allocate_host_rows(row_count=name.row_count, row_bytes=row_bytes)
        rows[...] = np.random.default_rng(1).integers(0, 256, rows.shape, np.uint8)
        before = rows.copy()
        checks = [row_check(rows[at], name.stamps, at) for at in range(name.row_count)]
        tier.write_object(name, rows, range(name.row_count), checks)
        rows[...] = 0
        assert tier.read_object(name, range(name.row_count), rows, range(name.row_count)) == checks
        assert np.array_equal(rows, before)
        tier.close()

    # What is not there.

    def test_missing_object_is_gone(self, tier: EngineTier, pool: Pool) -> None:
        """A miss of its own kind."""
        with pytest.raises(ObjectGoneError):
            pool.read(tier, make_name(1))

    def test_removed_object_is_gone(self, tier: EngineTier, pool: Pool) -> None:
        """Removing it again is no error; its neighbour stays."""
        for number in (1, 2):
            pool.write(tier, make_name(number))
        tier.remove_object(make_name(1))
        tier.remove_object(make_name(1))
        with pytest.raises(ObjectGoneError):
            pool.read(tier, make_name(1))
        pool.read(tier, make_name(2))

    def test_evicted_value_is_gone(
        self, world: EngineWorld, tier: EngineTier, pool: Pool, namespace: bytes
    ) -> None:
        """What the engine threw away is a miss, and can be stored again."""
        pool.write(tier, make_name(1))
        world.raw_delete(key_of(namespace, make_name(1)))
        with pytest.raises(ObjectGoneError):
            pool.read(tier, make_name(1))
        pool.write(tier, make_name(1))
        pool.read(tier, make_name(1))

    def test_abandoned_write_is_not_there(self, tier: EngineTier, pool: Pool) -> None:
        """Somebody who gave it up does not want to find it."""
        with pytest.raises(AbandonedError):
            pool.write(tier, make_name(1), may_publish=lambda: False)
        with pytest.raises(ObjectGoneError):
            pool.read(tier, make_name(1))

    def test_wipe_takes_what_is_this_ranks(
        self, world: EngineWorld, tier: EngineTier, pool: Pool, namespace: bytes, row_bytes: int
    ) -> None:
        """All of it, and nothing of other ranks and namespaces."""
        other_rank = opened(world, namespace, row_bytes, rank=1)
        other = opened(world, sha256(namespace).digest(), row_bytes)
        for number in range(12):
            pool.write(tier, make_name(number))
        pool.write(other_rank, make_name(1))
        pool.write(other, make_name(1))
        tier.wipe()
        for number in range(12):
            with pytest.raises(ObjectGoneError):
                pool.read(tier, make_name(number))
        pool.read(other_rank, make_name(1))
        pool.read(other, make_name(1))
        pool.write(tier, make_name(3))
        pool.read(tier, make_name(3))

    def test_ranks_and_groups_have_values_of_their_own(
        self, world: EngineWorld, tier: EngineTier, pool: Pool, namespace: bytes, row_bytes: int
    ) -> None:
        """No key of one is a key of another."""
        name, of_group = make_name(1), make_name(1, group=3)
        other_rank = opened(world, namespace, row_bytes, rank=11)
        pool.write(tier, name)
        for neighbour, wanted in ((other_rank, name), (tier, of_group)):
            with pytest.raises(ObjectGoneError):
                pool.read(neighbour, wanted)
        pool.write(tier, of_group)
        pool.read(tier, of_group)
        other_rank.close()

    # Damage.

    @pytest.mark.parametrize("kind", ["first", "header", "payload", "last", "namespace"])
    def test_a_flipped_bit_is_a_miss(
        self, world: EngineWorld, tier: EngineTier, pool: Pool, namespace: bytes, kind: str
    ) -> None:
        """Wherever it is, no wrong byte is served, and the next store heals it."""
        name = make_name(1)
        pool.write(tier, name)
        key = key_of(namespace, name)
        value = bytearray(present_value(world, key))
        header = len(value) - OBJECT_ROWS * -(-pool.row_bytes // 4096) * 4096
        offset = {
            "first": 0,
            "header": header // 2,
            "payload": header + 10,
            "last": header + (OBJECT_ROWS - 1) * -(-pool.row_bytes // 4096) * 4096 + 1,
            "namespace": 60,
        }[kind]
        value[offset] ^= 4
        world.raw_put(key, bytes(value))
        self.expect_damaged_then_healed(tier, pool, name)

    @pytest.mark.parametrize(
        "change",
        [
            lambda value: value[:-1],
            lambda value: value + b"x",
            lambda value: value[:4096],
            lambda value: b"x",
            lambda value: bytes(len(value)),
        ],
        ids=["cut", "grown", "header-only", "something-else", "zeroed"],
    )
    def test_a_value_of_another_size_is_a_miss(
        self,
        world: EngineWorld,
        tier: EngineTier,
        pool: Pool,
        namespace: bytes,
        change: Callable[[bytes], bytes],
    ) -> None:
        """Short, long or not ours at all; the next store heals it."""
        name = make_name(1)
        pool.write(tier, name)
        key = key_of(namespace, name)
        world.raw_put(key, change(present_value(world, key)))
        self.expect_damaged_then_healed(tier, pool, name)

    def expect_damaged_then_healed(self, tier: EngineTier, pool: Pool, name: ObjectName) -> None:
        with pytest.raises(ChecksumMismatchError):
            pool.read(tier, name)
        with pytest.raises(ChecksumMismatchError):
            pool.read(tier, name, [OBJECT_ROWS - 1, 0, 2, 3, 4, 1])
        with contextlib.suppress(ChecksumMismatchError):
            assert tier.lend_rows(name, range(OBJECT_ROWS)) is None, "a damaged value was lent"
        tier.remove_object(name)
        pool.write(tier, name)
        pool.read(tier, name)

    def test_swapped_values_are_misses(
        self, world: EngineWorld, tier: EngineTier, pool: Pool, namespace: bytes
    ) -> None:
        """A name promises nothing: the header says whose bytes they are."""
        keys = [key_of(namespace, make_name(number)) for number in (1, 2)]
        for number in (1, 2):
            pool.write(tier, make_name(number))
        first, second = (present_value(world, key) for key in keys)
        world.raw_put(keys[0], second)
        world.raw_put(keys[1], first)
        for number in (1, 2):
            with pytest.raises(ChecksumMismatchError):
                pool.read(tier, make_name(number))

    # Many at once.

    def test_threads_on_different_objects(self, tier: EngineTier, row_bytes: int) -> None:
        """Writes, reads and removals side by side do not disturb each other."""
        errors: list[BaseException] = []

        def work(first: int) -> None:
            mine = Pool(row_bytes)
            try:
                for number in range(first, first + 10):
                    mine.write(tier, make_name(number))
                for number in range(first, first + 10):
                    mine.read(tier, make_name(number))
                    if number % 2:
                        tier.remove_object(make_name(number))
            except BaseException as error:  # noqa: BLE001 - the test's thread must hear of it
                errors.append(error)

        threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        mine = Pool(row_bytes)
        for first in (100, 200, 300, 400):
            mine.read(tier, make_name(first))
            with pytest.raises(ObjectGoneError):
                mine.read(tier, make_name(first + 1))

    def test_probe_leaves_nothing(
        self, tier: EngineTier, world: EngineWorld, namespace: bytes
    ) -> None:
        """It writes, reads and removes; nobody takes what it wrote for an object."""
        tier.probe()
        medium = make_medium(world, namespace)
        assert refreshed(medium).names == ()

    # What the scheduler's process sees.

    def test_present_for_all_ranks(
        self, world: EngineWorld, tier: EngineTier, pool: Pool, namespace: bytes, row_bytes: int
    ) -> None:
        """An object counts when every rank has it, however many are asked about at once."""
        second = opened(world, namespace, row_bytes, rank=1)
        for number in range(20):
            pool.write(tier, make_name(number))
            if number % 3:
                pool.write(second, make_name(number))
        medium = make_medium(world, namespace, ranks=2)
        names = [make_name(number) for number in range(25)]
        wanted = [bool(number % 3) and number < 20 for number in range(25)]
        assert medium.present(names) == wanted
        assert medium.present([]) == []
        second.close()

    def test_refresh_tells_what_others_wrote_and_what_went(
        self, world: EngineWorld, tier: EngineTier, pool: Pool, namespace: bytes
    ) -> None:
        """Whole names, once; and keys of what was known and is not there any more."""
        known: set[bytes] = set()
        medium = make_medium(world, namespace, known=known)
        for number in range(10):
            pool.write(tier, make_name(number))
        for number in (0, 1):
            known.add(object_key(make_name(number)))
        found = refreshed(medium)
        if medium_lists(world):
            names = {make_name(number) for number in range(2, 10)}
            assert set(found.names) == names
            known |= {object_key(name) for name in found.names}
        assert found.gone == ()
        world.raw_delete(key_of(namespace, make_name(1)))
        assert refreshed(medium).gone == (object_key(make_name(1)),)

    def test_refresh_passes_over_what_is_not_ours(
        self, world: EngineWorld, tier: EngineTier, pool: Pool, namespace: bytes
    ) -> None:
        """Somebody else's values, and damaged ones, are no objects; and no error."""
        pool.write(tier, make_name(1))
        value = present_value(world, key_of(namespace, make_name(1)))
        prefix = rank_prefix(namespace, 0)
        world.raw_put(f"{prefix}notes.txt", b"hello")
        world.raw_put(key_of(namespace, make_name(2)), b"hello")
        world.raw_put(key_of(namespace, make_name(3)), value)
        medium = make_medium(world, namespace)
        wanted = (make_name(1),) if medium_lists(world) else ()
        assert refreshed(medium).names == wanted

    def test_listing_of_many(self, world: EngineWorld, namespace: bytes) -> None:
        """More than any page has: every one is told."""
        if not medium_lists(world):
            pytest.skip("this engine cannot say what it holds")
        pool = Pool(4096)
        small = opened(world, namespace, 4096)
        names = {make_name(number, 1) for number in range(1100)}
        first = make_name(0, 1)
        pool.write(small, first)
        value = present_value(world, key_of(namespace, first))
        for name in names:
            world.raw_put(key_of(namespace, name), value)
        pages = small.client.list_values(rank_prefix(namespace, 0))
        told = {listed.key for page in pages for listed in page}
        assert told == {key_of(namespace, name) for name in names}
        small.wipe()
        assert not [page for page in small.client.list_values(rank_prefix(namespace, 0)) if page]


def opened(
    world: EngineWorld,
    namespace: bytes,
    row_bytes: int,
    *,
    rank: int = 0,
    timeout_seconds: float = 5.0,
) -> EngineTier:
    """A tier of a client of its own, open."""
    client = world.client(timeout_seconds)
    tier = EngineTier("Engine", client, row_bytes=row_bytes, rank=rank)
    assert list(tier.open(namespace)) == []
    return tier


def make_medium(
    world: EngineWorld, namespace: bytes, *, ranks: int = 1, known: set[bytes] | None = None
) -> EngineMedium:
    """What a scheduler's process would see; `known` is what its books hold."""
    return EngineMedium(
        world.client(),
        identity="engine",
        namespace=namespace,
        ranks=ranks,
        knows=lambda key: key in (known or ()),
        known_keys=lambda: sorted(known or ()),
    )


def medium_lists(world: EngineWorld) -> bool:
    """Whether the engine can say what it holds."""
    client = world.client()
    client.close()
    return client.can_list


def key_of(namespace: bytes, name: ObjectName, rank: int = 0) -> str:
    """The engine's key of an object."""
    return value_key(rank_prefix(namespace, rank), object_key(name))


def present_value(world: EngineWorld, key: str) -> bytes:
    """A value that must be there."""
    value = world.raw_get(key)
    assert value is not None, f"{key} is not there"
    return value
