"""What seeds the check values of an object's rows: the block's hash, and whose row it is."""

import numpy as np
import pytest
from fakes import ROW_BYTES, stamp

from opal_connector.keys import CHAIN_ROOT, HASH_BYTES
from opal_connector.tiers.checks import row_check
from opal_connector.transfers import ObjectName, row_stamps

RUN = b"".join(stamp(number) for number in range(4))


def cut(stamps: bytes) -> list[bytes]:
    return [stamps[start : start + HASH_BYTES] for start in range(0, len(stamps), HASH_BYTES)]


def test_rows_of_one_member_are_stamped_with_their_blocks() -> None:
    """As it always was: what a tier holds from before stays readable."""
    assert row_stamps(RUN, 1) == RUN
    assert ObjectName(0, CHAIN_ROOT, RUN).stamps == RUN


@pytest.mark.parametrize("members", [2, 3, 7, 256, 700])
def test_every_row_of_an_object_has_its_own_stamp(members: int) -> None:
    """Member by member: those of the first are the blocks' hashes, and no two are alike."""
    name = ObjectName(0, CHAIN_ROOT, RUN, members)

    stamps = cut(name.stamps)

    assert len(stamps) == name.row_count == 4 * members
    assert stamps[:4] == cut(RUN)
    assert len(set(stamps)) == len(stamps)


def test_part_of_an_object_is_stamped_like_the_whole() -> None:
    """A load of some blocks must find what the store of all wrote."""
    whole = cut(row_stamps(RUN, 3))

    part = cut(row_stamps(RUN[HASH_BYTES : 3 * HASH_BYTES], 3))

    assert part == [whole[member * 4 + block] for member in range(3) for block in (1, 2)]


def test_equal_bytes_of_two_members_are_not_taken_for_each_other() -> None:
    """Zeroed rows of one block in two kv groups have different check values."""
    zeros = np.zeros(ROW_BYTES, dtype=np.uint8)
    stamps = row_stamps(RUN, 3)

    checks = {row_check(zeros, stamps, position) for position in range(12)}

    assert len(checks) == 12
