"""`opal tiers`: what a person sees of a directory, and that no good or living file is touched."""

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fakes import content, stamp

from opal_connector.cli import tiers_removal
from opal_connector.cli.main import opal
from opal_connector.tiers import allocate_host_rows
from opal_connector.tiers.checks import row_check
from opal_connector.tiers.directory import find_slots, verify_file
from opal_connector.tiers.distributed_fs import DistributedFS
from opal_connector.tiers.file_errors import ObjectGoneError
from opal_connector.tiers.file_names import new_temporary_name, object_key, object_path
from opal_connector.tiers.file_tier import FileTier, file_bytes
from opal_connector.tiers.local_nvme import LocalNVMe
from opal_connector.transfers import ObjectName

NAMESPACE = sha256(b"namespace").digest()
SPACE = NAMESPACE.hex()[:16]
OTHER = sha256(b"other").digest()
ROW_BYTES = 1000
BLOCKS = 3


def name(number: int) -> ObjectName:
    run = b"".join(stamp(10 * number + block) for block in range(BLOCKS))
    return ObjectName(0, stamp(999), run)


def opened(
    root: Path, kind: type[FileTier] = LocalNVMe, namespace: bytes = NAMESPACE, rank: int = 0
) -> FileTier:
    tier = kind(root, row_bytes=ROW_BYTES, rank=rank)
    for _ in tier.open(namespace):
        pass
    return tier


def write(tier: FileTier, *numbers: int) -> list[Path]:
    rows = allocate_host_rows(row_count=BLOCKS, row_bytes=ROW_BYTES)
    paths = []
    for number in numbers:
        run = name(number).run
        for at in range(BLOCKS):
            rows[at] = content(run[32 * at :][:32], row_bytes=ROW_BYTES)
        checks = [row_check(rows[at], run, at) for at in range(BLOCKS)]
        tier.write_object(name(number), rows, range(BLOCKS), checks)
        paths.append(Path(object_path(str(tier.directory), object_key(name(number)))))
    return paths


def read(tier: FileTier, number: int) -> None:
    rows = allocate_host_rows(row_count=BLOCKS, row_bytes=ROW_BYTES)
    tier.read_object(name(number), range(BLOCKS), rows, range(BLOCKS))


def flip(path: Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(opal, ["tiers", *map(str, arguments)])


def facts(*arguments: str | Path, exit_code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return dict(json.loads(result.stdout))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two ranks of one namespace, and another namespace; nobody uses them."""
    root = tmp_path / "tier"
    for rank, numbers in ((0, (1, 2, 3)), (1, (1, 2))):
        tier = opened(root, rank=rank)
        write(tier, *numbers)
        tier.close()
    tier = opened(root, namespace=OTHER)
    write(tier, 7)
    tier.close()
    return root


# ls and stat.


def test_ls_counts_what_is_there(root: Path) -> None:
    """Per namespace and rank: objects, bytes, and the newest use."""
    slots = facts("ls", root)["slots"]

    size = file_bytes(BLOCKS, ROW_BYTES)
    found = {(one["namespace"], one["slot"]): (one["objects"], one["used_bytes"]) for one in slots}
    assert found == {
        (SPACE, "r0"): (3, 3 * size),
        (SPACE, "r1"): (2, 2 * size),
        (OTHER.hex()[:16], "r0"): (1, size),
    }
    assert all(one["newest_use"] > 1e9 for one in slots)
    text = run("ls", root).stdout
    assert SPACE in text
    assert "48.0 KiB" in text
    assert "s ago" in text


def test_ls_of_nothing_says_so(tmp_path: Path) -> None:
    """An empty directory, and one with other people's files."""
    (tmp_path / "notes").mkdir()
    (tmp_path / ("0" * 16)).write_text("a file with a namespace's name")

    assert facts("ls", tmp_path)["slots"] == []
    assert "nothing of a tier" in run("ls", tmp_path).stdout


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc", "clear"])
def test_directory_that_is_not_there_is_a_mistake(tmp_path: Path, command: str) -> None:
    """One sentence, exit code 2, no traceback."""
    result = run(command, tmp_path / "nowhere")

    assert result.exit_code == 2
    assert "does not exist" in result.stderr


def test_stat_counts_damage_and_what_else_is_there(root: Path) -> None:
    """Headers are read, payloads are not."""
    slot = root / SPACE / "r0"
    paths = sorted(slot.rglob("*.opal"))
    flip(paths[0], 20)
    flip(paths[1])  # in the payload
    (slot / new_temporary_name()).touch()
    (slot / "notes").touch()

    found = facts("stat", root)

    assert {key: found[key] for key in ("namespaces", "ranks", "objects", "blocks")} == {
        "namespaces": 2,
        "ranks": 2,
        "objects": 6,
        "blocks": 5 * BLOCKS,
    }
    assert found["used_bytes"] == 6 * file_bytes(BLOCKS, ROW_BYTES)
    assert found["object_bytes_median"] == file_bytes(BLOCKS, ROW_BYTES)
    assert (found["damaged_headers"], found["unread_headers"]) == (1, 0)
    assert (found["temporary_files"], found["other_files"]) == (1, 1)
    assert found["free_bytes"] > 0
    assert "damaged headers" in run("stat", root).stdout


# verify.


def test_verify_of_good_files_moves_nothing(root: Path) -> None:
    """Every object is read, none is touched."""
    before = sorted(root.rglob("*"))

    found = facts("verify", root)

    assert found["objects"] == 6
    assert found["read_bytes"] == 6 * file_bytes(BLOCKS, ROW_BYTES)
    assert (found["bad"], found["unreadable"]) == ([], [])
    assert sorted(root.rglob("*")) == before
    assert "6 objects" in run("verify", root).stdout


def damage(kind: str, path: Path, other: Path) -> None:
    match kind:
        case "payload":
            flip(path, -4000)
        case "padding":
            flip(path)
        case "header":
            flip(path, 100)
        case "cut":
            os.truncate(path, path.stat().st_size - 1)
        case "name":
            path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("kind", ["payload", "padding", "header", "cut", "name"])
def test_verify_quarantines_what_is_bad(root: Path, kind: str) -> None:
    """Kept for a person to look at, out of the tier; the second run finds nothing."""
    slot = root / SPACE / "r0"
    path, other = sorted(slot.rglob("*.opal"))[:2]
    damage(kind, path, other)
    data = path.read_bytes()

    (bad,) = facts("verify", root, exit_code=1)["bad"]

    assert bad["path"] == str(path)
    assert bad["is_moved"]
    assert not path.exists()
    (kept,) = (root / "quarantine").rglob("*.opal")
    assert kept.read_bytes() == data
    for place in (root / "quarantine").rglob("*"):
        assert place.stat().st_mode & 0o77 == 0
    assert facts("verify", root)["objects"] == 5
    assert facts("stat", root)["quarantine_bytes"] == kept.stat().st_blocks * 512


def test_verify_can_only_report(root: Path) -> None:
    """With --dry-run nothing moves; the exit code says that there is something."""
    path = sorted(root.rglob("*.opal"))[0]
    flip(path)

    (bad,) = facts("verify", root, "--dry-run", exit_code=1)["bad"]

    assert not bad["is_moved"]
    assert path.exists()
    assert run("verify", root, "--dry-run").stdout.count(".opal") == 1


def test_verify_leaves_what_it_cannot_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the disk is not a fault of the file."""

    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        found = facts("verify", root, exit_code=1)

    assert len(found["unreadable"]) == 6
    assert found["bad"] == []
    assert facts("verify", root)["objects"] == 6


def test_good_file_that_took_a_bad_ones_place_goes_back(root: Path) -> None:
    """An engine repairs the object between the look and the move."""
    slot = next(slot for slot in find_slots(root) if slot.namespace == SPACE and slot.rank == 0)
    path = sorted(Path(slot.path).rglob("*.opal"))[0]
    data = path.read_bytes()

    moved = tiers_removal.quarantine(root, slot, str(path), lambda place: verify_file(slot, place))

    assert not moved
    assert path.read_bytes() == data
    assert list((root / "quarantine").rglob("*.opal")) == []


def test_verify_beside_a_living_engine(root: Path) -> None:
    """What is bad is gone for it, what is good is read, and the next store repairs."""
    tier = opened(root)
    (path,) = write(tier, 1)
    flip(path)

    assert facts("verify", root, exit_code=1)["bad"][0]["is_moved"]

    with pytest.raises(ObjectGoneError):
        read(tier, 1)
    read(tier, 2)
    write(tier, 1)
    read(tier, 1)
    tier.close()


# gc.


def dead_temporary() -> str:
    program = "from opal_connector.tiers.file_names import *; print(new_temporary_name())"
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_gc_removes_leftovers_and_unreadable_files_only(root: Path) -> None:
    """What dead processes left, and headers that no reader accepts; all else stays."""
    slot = root / SPACE / "r0"
    paths = sorted(slot.rglob("*.opal"))
    flip(paths[0], 20)
    flip(paths[1])  # a damaged payload is a matter of `verify`
    dead, living = slot / dead_temporary(), slot / new_temporary_name()
    dead.write_bytes(bytes(8192))
    living.touch()
    (slot / "notes").touch()

    found = facts("gc", root)

    assert (found["leftovers"], found["unreadable"], found["objects"]) == (1, 1, 0)
    assert found["freed_bytes"] == 8192 + file_bytes(BLOCKS, ROW_BYTES)
    assert not dead.exists()
    assert not paths[0].exists()
    assert paths[1].exists()
    assert living.exists()
    assert (slot / "notes").exists()
    assert facts("stat", root)["objects"] == 5
    assert "Removed 0 objects, 0 leftovers and 0 unreadable files" in run("gc", root).stdout


def test_gc_leaves_the_temporaries_of_a_shared_directory_their_hour(tmp_path: Path) -> None:
    """Process ids of other hosts say nothing."""
    tier = opened(tmp_path, DistributedFS)
    (path,) = write(tier, 1)
    dead = path.parent / dead_temporary()
    dead.touch()

    assert facts("gc", tmp_path)["leftovers"] == 0
    os.utime(dead, (1, 1))

    assert facts("gc", tmp_path)["leftovers"] == 1
    read(tier, 1)


def test_gc_looks_at_the_root_too(root: Path) -> None:
    """Instances that share a directory write there; what is young may be theirs."""
    old, young = root / dead_temporary(), root / dead_temporary()
    for path in (old, young):
        path.touch()
    os.utime(old, (1, 1))

    assert facts("gc", root)["leftovers"] == 1
    assert not old.exists()
    assert young.exists()


def test_gc_removes_a_namespace(root: Path) -> None:
    """All ranks of it, and no other; by the short or the whole name."""
    found = facts("gc", root, "--namespace", NAMESPACE.hex())

    assert found["objects"] == 5
    assert found["slots"] == [f"{SPACE}/r0", f"{SPACE}/r1"]
    assert not (root / SPACE).exists()
    assert [one["namespace"] for one in facts("ls", root)["slots"]] == [OTHER.hex()[:16]]


def test_gc_leaves_what_a_living_process_uses(root: Path) -> None:
    """Its rank stays as it is, though the namespace was named."""
    tier = opened(root)

    found = facts("gc", root, "--namespace", SPACE)

    assert found["in_use"] == [f"{SPACE}/r0"]
    assert found["slots"] == [f"{SPACE}/r1"]
    read(tier, 1)
    assert "A living process uses" in run("gc", root, "--namespace", SPACE).stdout
    tier.close()


def test_gc_removes_namespaces_that_nobody_used_for_long(root: Path) -> None:
    """By the newest use of any rank of the namespace."""
    for path in (root / SPACE).rglob("*"):
        os.utime(path, (1, 1))
    for path in (root / OTHER.hex()[:16]).rglob("*.opal"):
        os.utime(path, (1, 1))  # its index is young: it was used
    assert facts("gc", root, "--older-than", "20000d")["slots"] != []
    assert [one["namespace"] for one in facts("ls", root)["slots"]] == [OTHER.hex()[:16]]


def test_gc_keeps_young_namespaces(root: Path) -> None:
    """An age is what it says."""
    assert facts("gc", root, "--older-than", "1h")["slots"] == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--namespace", "abc"),
        ("--namespace", "../../../../etc"),
        ("--older-than", "soon"),
        ("--older-than", "-3d"),
        ("--older-than", "3"),
    ],
)
def test_gc_refuses_what_it_does_not_understand(root: Path, option: str, value: str) -> None:
    """Nothing is removed by a mistake."""
    result = run("gc", root, option, value)

    assert result.exit_code == 2
    assert value in result.stderr
    assert facts("stat", root)["objects"] == 6


def test_gc_leaves_a_strangers_files_in_a_namespace(root: Path) -> None:
    """Only what a tier made is removed."""
    kept = [root / SPACE / "r0" / "notes", root / SPACE / "r1" / "ab" / "notes"]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")

    facts("gc", root, "--namespace", SPACE)

    assert all(path.read_text() == "mine" for path in kept)
    assert {path.name for path in (root / SPACE).rglob("*") if path.is_file()} == {"notes"}


# clear.


def test_clear_removes_all_objects_and_the_quarantine(root: Path) -> None:
    """An idle directory is as new, and can be used again."""
    flip(sorted(root.rglob("*.opal"))[0])
    facts("verify", root, exit_code=1)
    (root / "notes").write_text("mine")

    found = facts("clear", root, "--yes")

    assert found["objects"] == 5
    assert sorted(path.name for path in root.iterdir()) == ["notes"]
    tier = opened(root)
    write(tier, 1)
    read(tier, 1)
    tier.close()


def test_clear_asks_first(root: Path) -> None:
    """A no, or no answer, leaves everything."""
    result = CliRunner().invoke(opal, ["tiers", "clear", str(root)], input="n\n")

    assert result.exit_code == 1
    assert facts("stat", root)["objects"] == 6
    result = CliRunner().invoke(opal, ["tiers", "clear", str(root)], input="y\n")
    assert result.exit_code == 0
    assert facts("stat", root)["objects"] == 0


@pytest.mark.parametrize("kind", [LocalNVMe, DistributedFS])
def test_clear_beside_a_living_engine(tmp_path: Path, kind: type[FileTier]) -> None:
    """Its objects are gone, and it goes on: the next store is found, also after a restart."""
    tier = opened(tmp_path, kind)
    write(tier, 1, 2)

    assert facts("clear", tmp_path, "--yes")["objects"] == 2

    with pytest.raises(ObjectGoneError):
        read(tier, 1)
    write(tier, 3)
    read(tier, 3)
    tier.close()
    again = kind(tmp_path, row_bytes=ROW_BYTES, rank=0)
    assert list(again.open(NAMESPACE)) == [(name(3),)]
    again.close()
