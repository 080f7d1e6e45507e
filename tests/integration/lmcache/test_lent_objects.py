"""LMCache's buffers as blocks: any rows in any order, adjoining or not, bring the same bytes."""

import itertools

import numpy as np
import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")

from l2_world import buffer_of

from opal_connector.integrations.lmcache.identity import ROW_BYTES
from opal_connector.integrations.lmcache.lent_objects import LentObjects
from opal_connector.tiers.base import Rows

ROWS = 5
SIZE = 3 * ROW_BYTES + 1000  # the last row is padded
# Rows of a tier for a buffer's four: adjoining, in two pieces, in reverse, far apart.
PLACES = ([0, 1, 2, 3], [3, 4, 0, 1], [3, 2, 1, 0], [4, 0, 2, 1])


def rows_of(*, are_packed: bool) -> Rows:
    """Rows that are full of something else; those that are not packed have bytes between them."""
    width = ROW_BYTES if are_packed else ROW_BYTES + 4096
    return np.full((ROWS, width), 0xEE, dtype=np.uint8)[:, :ROW_BYTES]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("are_packed", [True, False])
def test_bytes_come_back_from_any_rows(places: list[int], are_packed: bool) -> None:
    """Each row has its piece of the buffer, the last one zeros behind it, and no other is touched.

    What is copied at once depends on where rows lie; what is copied must not.
    """
    objects, rows = LentObjects(), rows_of(are_packed=are_packed)
    source, target = buffer_of(SIZE, 1), buffer_of(SIZE)
    lent = objects.lend(source, SIZE)
    objects.gather(lent.addresses, rows, places, None)
    expected = source.raw_data.numpy()
    padded = np.concatenate([expected, np.zeros(-SIZE % ROW_BYTES, dtype=np.uint8)])
    for row, piece in zip(places, padded.reshape(-1, ROW_BYTES), strict=True):
        assert np.array_equal(rows[row], piece)
    assert (rows[sorted(set(range(ROWS)).difference(places))] == 0xEE).all()
    rows.flags.writeable = False
    objects.scatter(objects.lend(target, SIZE).addresses, rows, places, None)
    assert np.array_equal(target.raw_data.numpy(), expected)


def test_neighbours_in_a_tier_of_two_buffers_stay_apart() -> None:
    """Rows that adjoin may belong to different buffers: each goes to its own."""
    objects, rows = LentObjects(), rows_of(are_packed=True)
    sources = [buffer_of(SIZE, fill) for fill in (1, 2)]
    targets = [buffer_of(SIZE) for _ in sources]
    half = 2  # rows of each, of those that are full
    for buffers, copy in ((sources, objects.gather), (targets, objects.scatter)):
        addresses = [objects.lend(buffer, SIZE).addresses[:half] for buffer in buffers]
        copy(list(itertools.chain(*addresses)), rows, range(2 * half), None)
    for source, target in zip(sources, targets, strict=True):
        length = half * ROW_BYTES
        assert source.raw_data[:length].equal(target.raw_data[:length])
        assert not target.raw_data[length:].any()


def test_a_buffer_that_was_returned_is_not_touched() -> None:
    """A thread that comes late finds nothing to copy to: its memory is somebody else's by then."""
    objects, rows = LentObjects(), rows_of(are_packed=True)
    target = buffer_of(SIZE)
    lent = objects.lend(target, SIZE)
    objects.give_back(lent)
    with pytest.raises(KeyError):
        objects.scatter(lent.addresses, rows, range(len(lent.addresses)), None)
    assert not target.raw_data.any()
