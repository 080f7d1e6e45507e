"""Fingerprints of sets of blocks."""

import random

import pytest

from opal_connector.events.digests import BucketDigests, differing


def _hashes(count: int, seed: int = 7) -> list[bytes]:
    generator = random.Random(seed)
    return [generator.randbytes(32) for _ in range(count)]


def _naive(hashes: list[bytes]) -> bytes:
    buckets = [0] * 256
    for block in hashes:
        buckets[block[0]] ^= int.from_bytes(block[:8], "little")
    return b"".join(bucket.to_bytes(8, "little") for bucket in buckets)


@pytest.mark.parametrize("count", [0, 1, 255, 4_095, 4_096, 10_000])
def test_a_fingerprint_is_that_of_the_definition(count: int) -> None:
    hashes = _hashes(count)
    digests = BucketDigests()
    for block in hashes:
        digests.flip(block)
    assert digests.buckets() == _naive(hashes)


def test_order_and_grouping_do_not_matter() -> None:
    hashes = _hashes(5_000)
    in_runs, at_once = BucketDigests(), BucketDigests()
    for start in range(0, len(hashes), 16):
        in_runs.flip(b"".join(hashes[start : start + 16]))
    random.Random(3).shuffle(hashes)
    at_once.flip_all(hashes)
    assert in_runs.buckets() == at_once.buckets()


def test_a_block_flipped_twice_leaves_nothing_also_between_two_readings() -> None:
    hashes = _hashes(300)
    digests = BucketDigests()
    digests.flip_all(hashes)
    assert digests.buckets() != bytes(2_048)
    digests.flip_all(hashes[::-1])
    assert digests.buckets() == bytes(2_048)


def test_cleared_digests_forget_what_was_not_folded_yet_too() -> None:
    digests = BucketDigests()
    digests.flip_all(_hashes(5_000))
    digests.flip(_hashes(1, seed=8)[0])
    digests.clear()
    assert digests.buckets() == bytes(2_048)


def test_an_empty_run_changes_nothing() -> None:
    digests = BucketDigests()
    digests.flip(b"")
    digests.flip_all([])
    assert digests.buckets() == bytes(2_048)


def test_differing_names_exactly_the_buckets_of_blocks_that_one_lacks() -> None:
    hashes = _hashes(1_000)
    lacking = [hashes[3], hashes[500], hashes[999]]
    all_of_them, some = BucketDigests(), BucketDigests()
    all_of_them.flip_all(hashes)
    some.flip_all([block for block in hashes if block not in lacking])
    expected = bytes(sorted({block[0] for block in lacking}))
    assert differing(all_of_them.buckets(), some.buckets()) == expected
    assert differing(some.buckets(), some.buckets()) == b""
