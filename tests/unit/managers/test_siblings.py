"""Runs of blocks that begin alike: the longest common beginning, and nothing else."""

import random

import pytest
from fakes import stamp

from opal_connector.managers.siblings import SiblingIndex, common_blocks


def run(*blocks: int) -> bytes:
    """A run whose hashes include what is before them, as in a chain."""
    hashes = []
    for place in range(len(blocks)):
        number = 0
        for block in blocks[: place + 1]:
            number = number * 7 + block + 1
        hashes.append(stamp(number))
    return b"".join(hashes)


@pytest.mark.parametrize(
    ("left", "right", "blocks"),
    [
        ((1,), (2,), 0),
        ((1,), (1,), 1),
        ((1, 2, 3), (1, 2, 4), 2),
        ((1, 2, 3), (1, 2), 2),
        ((1, 2, 3, 4, 5, 6, 1), (1, 2, 3, 4, 5, 6, 2), 6),
        ((), (1,), 0),
    ],
)
def test_common_beginning(left: tuple[int, ...], right: tuple[int, ...], blocks: int) -> None:
    """Blocks from the start that are equal, whichever run is the shorter."""
    assert common_blocks(run(*left), run(*right)) == blocks
    assert common_blocks(run(*right), run(*left)) == blocks


def test_longest_agrees_with_looking_at_every_run() -> None:
    """The neighbour in sorted order is the best of all, for thousands of random families."""
    draw = random.Random(5)
    index = SiblingIndex()
    held: set[bytes] = set()
    for _ in range(3000):
        candidate = run(*(draw.randint(0, 2) for _ in range(draw.randint(1, 6))))
        if candidate in held:
            index.discard(candidate, 0)
            held.discard(candidate)
        else:
            index.add(candidate, 0)
            held.add(candidate)
        wanted = run(*(draw.randint(0, 2) for _ in range(draw.randint(1, 6))))
        best = max((common_blocks(wanted, other) for other in held), default=0)

        found, blocks = index.longest(wanted, 0)

        assert blocks == best
        assert (found in held) if blocks else (found == b"")
        assert {*index.prefixes(wanted, 0)} == {
            other for other in held if wanted.startswith(other) and other != wanted
        }
        assert len(index) == len(held)


def test_groups_do_not_see_each_other() -> None:
    """The same tokens in two kv groups are two objects."""
    index = SiblingIndex()
    index.add(run(1, 2), 0)

    assert index.longest(run(1, 2), 1) == (b"", 0)
    index.discard(run(1, 2), 1)
    assert index.longest(run(1, 2), 0) == (run(1, 2), 2)


def test_run_that_was_added_twice_leaves_twice() -> None:
    """Two writes of one run, before and after a reset, end one by one."""
    index = SiblingIndex()
    index.add(run(1, 2), 0)
    index.add(run(1, 2), 0)
    index.discard(run(1, 2), 0)

    assert index.longest(run(1, 2), 0)[1] == 2
    index.discard(run(1, 2), 0)
    index.discard(run(1, 2), 0)
    assert index.longest(run(1, 2), 0)[1] == 0
    assert len(index) == 0


def test_clear_forgets_everything() -> None:
    """Nothing of a family survives."""
    index = SiblingIndex()
    index.add(run(1), 0)
    index.clear()

    assert index.longest(run(1), 0) == (b"", 0)
