"""The prefix index against a naive model: any order of facts, with holes, gaps and forks."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opal_connector.cluster.index import PrefixIndex
from opal_connector.cluster.index_audit import audit_index
from opal_connector.cluster.worker_names import WorkerNames
from opal_connector.keys import CHAIN_ROOT

WORKERS = 3
COLUMNS = 3  # the device, a tier of the worker's own, a shared one
SHARED = 2
MOUNTS = 0b011
NAMES = WorkerNames()
for number in range(WORKERS):
    NAMES.add(str(number))


def block_tree(seed: int, count: int) -> list[tuple[bytes, bytes]]:
    """Blocks as (parent, hash), each below an earlier one; mostly long runs with a few forks."""
    rng = random.Random(seed)
    blocks: list[tuple[bytes, bytes]] = []
    for number in range(count):
        name = number.to_bytes(2, "big") * 16
        if not blocks or rng.random() < 0.05:
            parent = CHAIN_ROOT
        elif rng.random() < 0.8:
            parent = blocks[-1][1]
        else:
            parent = rng.choice(blocks)[1]
        blocks.append((parent, name))
    return blocks


class Model:
    """What is held, as sets of blocks by place."""

    def __init__(self, blocks: list[tuple[bytes, bytes]]) -> None:
        self.parents = {name: parent for parent, name in blocks}
        self.held: dict[tuple[int, int], set[bytes]] = {
            (column, worker): set() for column in range(COLUMNS) for worker in range(WORKERS)
        }

    def path(self, name: bytes) -> list[bytes]:
        path = [name]
        while self.parents[path[-1]] != CHAIN_ROOT:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def depths(self, path: list[bytes], worker: int) -> tuple[int, int]:
        """Blocks on the device from the start, and what can be served in all."""
        device = 0
        while device < len(path) and path[device] in self.held[0, worker]:
            device += 1
        end = device
        tiers = self.held[1, worker]
        if MOUNTS >> worker & 1:
            tiers = tiers.union(*(self.held[SHARED, other] for other in range(WORKERS)))
        while end < len(path) and path[end] in tiers:
            end += 1
        return device, end


def index_depths(index: PrefixIndex, path: list[bytes], worker: int) -> tuple[int, int]:
    device = end = 0
    for stop, segment in index.walk(path, 1 << worker):
        if segment.device_reach >> worker & 1:
            device = stop
        if segment.reach >> worker & 1:
            end = stop
    depths = index.depths(path, 1 << worker, NAMES)
    assert depths == ({str(worker): end} if end else {})
    return device, end


def runs(names: set[bytes], model: Model, rng: random.Random) -> list[list[bytes]]:
    """The blocks as runs of one or more, each the parent of the next, in any order."""
    left = sorted(names)
    rng.shuffle(left)
    found: list[list[bytes]] = []
    remaining = set(names)
    for name in left:
        if name not in remaining:
            continue
        run = [name]
        remaining.discard(name)
        while run and model.parents[run[0]] in remaining and rng.random() < 0.8:
            run.insert(0, model.parents[run[0]])
            remaining.discard(run[0])
        found.append(run)
    return found


def expect_equal(index: PrefixIndex, model: Model) -> None:
    for (column, worker), held in model.held.items():
        found = [
            (above, name)
            for parent, run in index.held_by(column, 1 << worker)
            for above, name in zip([parent, *run], run, strict=False)
        ]
        assert sorted(found) == sorted((model.parents[name], name) for name in held)
    for name in model.parents:
        path = model.path(name)
        for worker in range(WORKERS):
            assert index_depths(index, path, worker) == model.depths(path, worker)
        depths = index.depths([*path, b"?" * 32], -1, NAMES)
        for worker in range(WORKERS):
            assert depths.get(str(worker), 0) == model.depths(path, worker)[1]


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 120), steps=st.integers(1, 80))
def test_any_facts_in_any_order_give_what_a_naive_model_gives(
    seed: int, size: int, steps: int
) -> None:
    rng = random.Random(seed)
    blocks = block_tree(seed, size)
    model = Model(blocks)
    index = PrefixIndex()
    index.set_mounts(SHARED, MOUNTS)
    names = [name for _, name in blocks]
    for _ in range(steps):
        column, worker = rng.randrange(COLUMNS), rng.randrange(WORKERS)
        held = model.held[column, worker]
        some = set(rng.sample(names, rng.randint(1, len(names))))
        if rng.random() < 0.08:
            assert index.clear(column, 1 << worker) == len(held)
            held.clear()
        elif rng.random() < 0.55:
            whole = model.path(rng.choice(names)) if rng.random() < 0.5 else None
            for run in [whole] if whole else runs(some, model, rng):
                changed = index.insert(column, 1 << worker, model.parents[run[0]], list(run))
                assert set(changed) == set(run) - held
                held.update(run)
        else:
            for run in runs(some, model, rng):
                if rng.random() < 0.3:
                    rng.shuffle(run)
                changed = index.delete(column, 1 << worker, list(run))
                assert set(changed) == set(run) & held
                held.difference_update(run)
        audit_index(index)
    expect_equal(index, model)
    for (column, worker), held in model.held.items():
        index.delete(column, 1 << worker, sorted(held))
    audit_index(index)
    assert not index.tree.blocks
    assert not index.tree.tops
    assert index.tree.segment_count == 0


def test_a_sequence_longer_than_a_segment_is_walked_to_its_end() -> None:
    path = [number.to_bytes(4, "big") * 8 for number in range(1_500)]
    index = PrefixIndex()
    index.insert(0, 1, CHAIN_ROOT, path[:1_200])
    index.insert(0, 1, path[1_199], path[1_200:])
    index.insert(1, 2, CHAIN_ROOT, path[:700])
    audit_index(index)
    assert index_depths(index, path, 0) == (1_500, 1_500)
    assert index_depths(index, path, 1) == (0, 700)
    assert index_depths(index, [*path[:650], b"x" * 32], 0) == (650, 650)


@pytest.mark.parametrize("hashes", [[b"a" * 32, b"a" * 32], [b"p" * 32, b"a" * 32]])
def test_a_run_that_names_a_block_twice_changes_nothing(hashes: list[bytes]) -> None:
    index = PrefixIndex()
    with pytest.raises(ValueError, match="twice"):
        index.insert(0, 1, b"p" * 32, hashes)
    assert not index.tree.blocks


def test_forged_parents_in_a_ring_neither_hang_nor_reach_anything() -> None:
    one, two = b"1" * 32, b"2" * 32
    index = PrefixIndex()
    index.insert(0, 1, two, [one])
    index.insert(0, 1, one, [two])
    assert index_depths(index, [one, two], 0) == (0, 0)
    index.delete(0, 1, [one])
    index.delete(0, 1, [two])
    assert not index.tree.blocks
