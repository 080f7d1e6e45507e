"""Names of files: one object one name, and who writes a temporary file can be told."""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from opal_connector.tiers.file_names import (
    LEFTOVER_SECONDS,
    TemporaryName,
    host_digits,
    is_alive,
    is_leftover,
    namespace_name,
    new_temporary_name,
    object_key,
    object_path,
    parse_object_file,
    parse_slot,
    parse_temporary,
    slot_name,
)
from opal_connector.transfers import ObjectName

HASH = sha256(b"chunk").digest()


@given(chunk_hash=st.binary(min_size=32, max_size=32), group=st.integers(0, 0xFFFF))
def test_name_of_an_object_is_parsed_back(chunk_hash: bytes, group: int) -> None:
    """A listing gives the keys, without a file being opened."""
    key = object_key(ObjectName(group, HASH, HASH + chunk_hash))

    path = Path(object_path("/root/r0", key))

    assert path.parent == Path("/root/r0") / chunk_hash.hex()[:2]
    assert parse_object_file(path.name) == key
    assert parse_temporary(path.name) is None


@given(name=st.text(max_size=90))
@example(f"{HASH.hex()}-g65536.opal")
@example(f"{HASH.hex()}-g07.opal")
@example(f"{HASH.hex()}-g1_0.opal")
@example(f"{HASH.hex()}-g-1.opal")
@example(f"{HASH.hex()}-g٣.opal")
@example(f"{HASH.hex()}-g.opal")
@example(f"{HASH.hex()}-g0")
@example(f"{HASH.hex().upper()}-g0.opal")
@example(f"{HASH.hex()[:-2]}-g0.opal")
@example(f" {HASH.hex()[:-1]}-g0.opal")
def test_any_other_name_is_no_object(name: str) -> None:
    """What people and other programs put there, and near misses."""
    assert parse_object_file(name) is None


def test_names_of_directories() -> None:
    """Short enough for a person, different per rank and slot."""
    assert namespace_name(HASH) == HASH.hex()[:16]
    assert [slot_name(0, 0), slot_name(0, 1), slot_name(10, 2)] == ["r0", "r0-1", "r10-2"]


@given(rank=st.integers(0, 9999), slot=st.integers(0, 1023))
def test_name_of_a_rank_s_directory_is_parsed_back(rank: int, slot: int) -> None:
    """Which ranks are of one engine can be told from a listing."""
    assert parse_slot(slot_name(rank, slot)) == (rank, slot)


@pytest.mark.parametrize("name", ["r", "r1-0", "r01", "r1-01", "r-1", "r1-", "r1-2-3", "x1", "r٣"])
def test_any_other_directory_is_of_no_rank(name: str) -> None:
    """Near misses, which no engine ever takes."""
    assert parse_slot(name) is None


def test_temporary_names_are_unique_and_say_who() -> None:
    """Two calls never give the same name, and this process is the one that writes."""
    names = [new_temporary_name() for _ in range(100)]
    parsed = [parse_temporary(name) for name in names]

    assert len(set(names)) == 100
    for temporary in parsed:
        assert temporary is not None
        assert (temporary.pid, temporary.host) == (os.getpid(), host_digits())
        assert is_alive(temporary.pid, temporary.start_time)
        assert not is_leftover(temporary, age_seconds=1e9)
    assert parse_object_file(names[0]) is None


def test_forked_child_has_names_of_its_own() -> None:
    """A copy of the counter does not make copies of names."""
    program = (
        "import os\n"
        "from opal_connector.tiers.file_names import new_temporary_name\n"
        "new_temporary_name()\n"
        "child = os.fork()\n"
        "print(new_temporary_name(), flush=True)\n"
        "if child: os.waitpid(child, 0)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()
    first, second = (parse_temporary(name) for name in output)

    assert first is not None
    assert second is not None
    assert first.pid != second.pid


def test_temporary_of_a_dead_process_is_a_leftover() -> None:
    """Dead is: no such process, or one that got the same id later."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine = parse_temporary(new_temporary_name())
    assert mine is not None
    dead = TemporaryName(ended.pid, mine.start_time, host_digits())
    earlier = TemporaryName(mine.pid, mine.start_time - 1, host_digits())

    assert is_leftover(dead, age_seconds=0)
    assert is_leftover(earlier, age_seconds=0)


def test_temporary_of_another_host_is_a_leftover_after_an_hour() -> None:
    """Its process ids say nothing here."""
    other = TemporaryName(os.getpid(), 0, "0" * 16)

    assert not is_leftover(other, age_seconds=LEFTOVER_SECONDS)
    assert is_leftover(other, age_seconds=LEFTOVER_SECONDS + 1)
