"""The header of an object's file: what is written is read, and nothing else is."""

import random
import struct
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opal_connector.tiers import ChecksumMismatchError
from opal_connector.tiers.record import (
    ALIGNMENT,
    MAX_BLOCKS,
    RecordHeader,
    announced_header_bytes,
    encode_header,
    expect_header,
    expected_checks,
    file_bytes,
    header_bytes,
    parse_header,
    row_stride,
)
from opal_connector.transfers import ObjectName

NAMESPACE = sha256(b"namespace").digest()
hashes = st.binary(min_size=32, max_size=32)


def header(blocks: int = 8, **changes: object) -> RecordHeader:
    """A header; `changes` to its fields or to its name's."""
    run = b"".join(sha256(bytes([number % 256])).digest() for number in range(blocks))
    name = {"group": 3, "parent_hash": sha256(b"parent").digest(), "run": run}
    fields = {
        "namespace": NAMESPACE,
        "rank": 5,
        "row_bytes": 1000,
        "checks": tuple(range(1, blocks + 1)),
    }
    for field, value in changes.items():
        (name if field in name else fields)[field] = value
    return RecordHeader(name=ObjectName(**name), **fields)


@given(
    namespace=hashes,
    parent=hashes,
    group=st.integers(0, 0xFFFF),
    rank=st.integers(0, 0xFFFFFFFF),
    row_bytes=st.integers(1, 1 << 40),
    blocks=st.lists(st.tuples(hashes, st.integers(0, (1 << 64) - 1)), min_size=1, max_size=300),
    behind=st.binary(max_size=100),
)
def test_what_was_encoded_is_parsed(
    namespace: bytes,
    parent: bytes,
    group: int,
    rank: int,
    row_bytes: int,
    blocks: list[tuple[bytes, int]],
    behind: bytes,
) -> None:
    """Every field of every size comes back, whatever follows the header."""
    run = b"".join(block_hash for block_hash, _ in blocks)
    checks = tuple(check for _, check in blocks)
    wanted = RecordHeader(namespace, rank, row_bytes, ObjectName(group, parent, run), checks)

    data = encode_header(wanted)

    assert len(data) == header_bytes(len(blocks))
    assert len(data) % ALIGNMENT == 0
    assert announced_header_bytes(data[:ALIGNMENT]) == len(data)
    assert parse_header(data + behind) == wanted


@given(data=st.binary(max_size=9000))
def test_any_bytes_give_a_clean_error(data: bytes) -> None:
    """Noise is no header, and no other exception than the one that says so."""
    with pytest.raises(ChecksumMismatchError):
        parse_header(data)


@given(data=st.data())
def test_damaged_header_is_never_another_header(data: st.DataObject) -> None:
    """Fields overwritten with anything, cut and lengthened: the same header or a clean error."""
    whole = encode_header(header(data.draw(st.integers(1, 200))))
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.one_of(st.integers(0, 130), st.integers(0, len(whole) - 1)))
        piece = data.draw(st.binary(min_size=1, max_size=8))
        changed[at : at + len(piece)] = piece
    kept = bytes(changed[: data.draw(st.integers(0, len(changed)))])

    try:
        parsed = parse_header(kept)
    except ChecksumMismatchError:
        return
    assert kept[: len(whole)] == whole
    assert parsed == parse_header(whole)


def test_every_flipped_bit_is_found() -> None:
    """All 32,768 of them."""
    one = header()
    identity = {"rank": one.rank, "row_bytes": one.row_bytes, "name": one.name}
    identity["namespace"] = one.namespace
    whole = encode_header(one)
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChecksumMismatchError):
            parse_header(damaged)
        with pytest.raises(ChecksumMismatchError):
            expected_checks(memoryview(damaged), **identity)


def forged(**fields: int) -> bytes:
    """A header with a right checksum over wrong sizes."""
    from xxhash import xxh3_64_intdigest

    data = bytearray(encode_header(header()))
    places = {"size": (16, "<I"), "count": (20, "<I"), "stride": (32, "<Q"), "payload": (40, "<Q")}
    places |= {"version": (8, "<H"), "digest": (48, "<Q")}
    for field, value in fields.items():
        offset, kind = places[field]
        struct.pack_into(kind, data, offset, value)
    struct.pack_into("<Q", data, len(data) - 8, xxh3_64_intdigest(bytes(data[:-8])))
    return bytes(data)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 2}, "format version 2"),
        ({"count": 0}, "cannot name 0 blocks"),
        ({"count": 300}, "cannot name 300 blocks"),
        ({"count": MAX_BLOCKS + 1}, "cannot name"),
        ({"size": 8192}, "8192 bytes cannot name"),
        ({"stride": 8192}, "contradict"),
        ({"payload": 0}, "contradict"),
        ({"digest": 1}, "token digest"),
        ({"count": 7}, "contradict"),
    ],
)
def test_forged_sizes_are_refused(fields: dict[str, int], message: str) -> None:
    """A right checksum does not make wrong sizes right: nobody reads beyond what there is."""
    with pytest.raises(ChecksumMismatchError, match=message):
        parse_header(forged(**fields))


def test_forging_nothing_is_no_damage() -> None:
    """The test above fails for what it changes."""
    assert parse_header(forged()) == header()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("namespace", sha256(b"other").digest(), "namespace"),
        ("rank", 6, "rank"),
        ("row_bytes", 1001, "row size"),
        ("group", 4, "kv group"),
        ("parent_hash", sha256(b"other").digest(), "parent hash"),
        ("run", header(8).name.run[::-1], "run"),
        ("run", header(7).name.run, "run"),
    ],
)
def test_ht_13_header_of_another_object_is_a_mismatch(
    field: str, value: object, message: str
) -> None:
    """Every field that tells two objects apart is compared; the error says which differs."""
    wanted, found = header(), header(**{field: value})

    fields = {
        "namespace": wanted.namespace,
        "rank": wanted.rank,
        "row_bytes": wanted.row_bytes,
        "name": wanted.name,
    }
    expect_header(wanted, **fields)
    assert expected_checks(memoryview(encode_header(wanted)), **fields) == wanted.checks
    with pytest.raises(ChecksumMismatchError, match=f"other {message}$"):
        expect_header(found, **fields)
    if len(found.name.run) == len(found.checks) * 32:
        with pytest.raises(ChecksumMismatchError, match=f"other {message}$"):
            expected_checks(memoryview(encode_header(found)), **fields)


@pytest.mark.parametrize(
    "wrong",
    [
        header(8, checks=(1, 2)),
        header(8, checks=()),
        header(8, namespace=b"short"),
        header(8, parent_hash=b""),
        header(8, run=header(8).name.run[:-1]),
    ],
)
def test_what_is_no_header_is_not_encoded(wrong: RecordHeader) -> None:
    """A mistake of the caller is found before a file is written."""
    with pytest.raises(ValueError, match="bytes"):
        encode_header(wrong)


def test_sizes_are_aligned_and_exact() -> None:
    """Books and files count alike: a header, then every row on a boundary."""
    assert row_stride(1) == 4096
    assert row_stride(4096) == 4096
    assert row_stride(4097) == 8192
    assert header_bytes(1) == 4096
    assert file_bytes(8, 1_474_560) == 4096 + 8 * 1_474_560
    assert file_bytes(3, 100) == 4096 + 3 * 4096
    random_source = random.Random(1)
    for _ in range(100):
        count, row_bytes = random_source.randrange(1, 2000), random_source.randrange(1, 1 << 20)
        assert file_bytes(count, row_bytes) % ALIGNMENT == 0
        assert header_bytes(count) >= 128 + 40 * count


# Objects of several kv groups.


def shared(blocks: int, members: int, **changes: object) -> RecordHeader:
    """The header of an object of that many members."""
    one = header(blocks)
    name = msgspec.structs.replace(one.name, members=members)
    checks = tuple(range(1, blocks * members + 1))
    fields = {"name": name, "checks": checks, **changes}
    return msgspec.structs.replace(one, **fields)


@pytest.mark.parametrize(
    ("blocks", "digest"),
    [
        (1, "17db5db3e07f900885b42862c6d52fbcc53ff07062e8ffcea5c5d2c1ed7f637e"),
        (8, "114d8d77d3ce6db916141b68abd543842345eca75362fdb761c7ed23a92f0b57"),
        (300, "be7293e3cc4e282bc8282a345cea80e0808c59882436d3e609228ad9b4003543"),
    ],
)
def test_object_of_one_member_is_written_as_ever(blocks: int, digest: str) -> None:
    """Files of a version that knew one kv group only stay readable: not a byte is different."""
    assert sha256(encode_header(header(blocks))).hexdigest() == digest


@given(
    blocks=st.integers(1, 150), members=st.integers(1, 6), row_bytes=st.sampled_from([1000, 8192])
)
def test_number_of_members_comes_back(blocks: int, members: int, row_bytes: int) -> None:
    """It is in the sizes: a scan of a directory finds the whole name again."""
    wanted = shared(blocks, members, row_bytes=row_bytes)

    data = encode_header(wanted)

    assert len(data) == header_bytes(blocks, members)
    assert announced_header_bytes(data[:ALIGNMENT]) == len(data)
    assert parse_header(data) == wanted
    assert wanted.row_count == wanted.name.row_count == blocks * members
    payload_bytes = blocks * members * row_stride(row_bytes)
    assert file_bytes(blocks, row_bytes, members) == len(data) + payload_bytes
    assert (
        expected_checks(
            memoryview(data),
            namespace=wanted.namespace,
            rank=wanted.rank,
            row_bytes=row_bytes,
            name=wanted.name,
        )
        == wanted.checks
    )


@pytest.mark.parametrize("members", [1, 2, 4])
def test_other_number_of_members_is_another_object(members: int) -> None:
    """The same blocks for other groups are not what is asked for, and the error says so."""
    found, wanted = shared(8, members), shared(8, 3)
    fields = {
        "namespace": wanted.namespace,
        "rank": wanted.rank,
        "row_bytes": wanted.row_bytes,
        "name": wanted.name,
    }

    with pytest.raises(ChecksumMismatchError, match=r"other number of members$"):
        expect_header(found, **fields)
    with pytest.raises(ChecksumMismatchError):
        expected_checks(memoryview(encode_header(found)), **fields)


@pytest.mark.parametrize("payload_rows", [0, 7, 9, 15, 17, 8 * 200, 8 * MAX_BLOCKS])
def test_forged_members_are_refused(payload_rows: int) -> None:
    """A payload that does not fit the header names no members that nobody wrote."""
    with pytest.raises(ChecksumMismatchError, match=r"contradict|cannot name"):
        parse_header(forged(payload=payload_rows * row_stride(1000)))


@pytest.mark.parametrize("members", [1, 3])
def test_number_of_checks_is_that_of_all_rows(members: int) -> None:
    """One check value too few or too many would be one of another row."""
    for count in (8 * members - 1, 8 * members + 1):
        with pytest.raises(ValueError, match="does not have"):
            encode_header(shared(8, members, checks=tuple(range(1, count + 1))))
