"""`opal tiers` and the files in an LMCache server's directory that say what names refer to."""

import os
from pathlib import Path

import pytest
from test_tiers_command import NAMESPACE, OTHER, SPACE, dead_temporary, facts, opened, write

from opal_connector.tiers.distributed_fs import DistributedFS
from opal_connector.tiers.file_names import new_temporary_name
from opal_connector.tiers.file_tier import FileTier
from opal_connector.tiers.local_nvme import LocalNVMe

CONTEXT = "0123456789abcdef.json"


def contexts(root: Path, space: str = SPACE) -> Path:
    """A folder as the LMCache integration makes it, with a file that a crash has torn."""
    folder = root / space / "contexts"
    folder.mkdir(parents=True)
    (folder / CONTEXT).write_text("{}")
    (folder / dead_temporary()).write_text("{")
    return folder


@pytest.mark.parametrize("kind", [LocalNVMe, DistributedFS])
@pytest.mark.parametrize("command", [["clear", "--yes"], ["gc", "--namespace", NAMESPACE.hex()]])
def test_contexts_go_with_their_namespace(
    tmp_path: Path, kind: type[FileTier], command: list[str]
) -> None:
    """Else the folder would stay for ever, and nobody would ever use it."""
    tier = opened(tmp_path, kind)
    write(tier, 1)
    tier.close()
    contexts(tmp_path)

    found = facts(command[0], tmp_path, *command[1:])

    assert found["objects"] == 1
    assert not (tmp_path / SPACE).exists()


@pytest.mark.parametrize("command", [["clear", "--yes"], ["gc", "--namespace", SPACE]])
def test_contexts_that_were_left_alone_before_go_too(tmp_path: Path, command: list[str]) -> None:
    """All ranks of the namespace may have gone earlier."""
    contexts(tmp_path)
    other = contexts(tmp_path, OTHER.hex()[:16])

    assert facts(command[0], tmp_path, *command[1:])["freed_bytes"] > 0

    assert not (tmp_path / SPACE).exists()
    assert other.exists() == (command[0] == "gc")


def test_contexts_that_nobody_used_for_long_go(tmp_path: Path) -> None:
    """Without a rank their own age counts."""
    old, young = contexts(tmp_path), contexts(tmp_path, OTHER.hex()[:16])
    for path in (*old.iterdir(), old):
        os.utime(path, (1, 1))

    facts("gc", tmp_path, "--older-than", "1h")

    assert not old.exists()
    assert (young / CONTEXT).exists()


@pytest.mark.parametrize("command", [["clear", "--yes"], ["gc", "--namespace", SPACE]])
def test_contexts_of_a_living_server_stay(tmp_path: Path, command: list[str]) -> None:
    """What it stores next has to have a name after its restart."""
    tier = opened(tmp_path)
    folder = contexts(tmp_path)

    assert facts(command[0], tmp_path, *command[1:])["in_use"] == [f"{SPACE}/r0"]

    assert (folder / CONTEXT).exists()
    tier.close()


def test_gc_removes_what_a_crash_has_torn_there(tmp_path: Path) -> None:
    """As in a rank's directory: what the dead left, and nothing else."""
    tier = opened(tmp_path)
    write(tier, 1)
    folder = contexts(tmp_path)
    living = folder / new_temporary_name()
    living.touch()

    assert facts("gc", tmp_path)["leftovers"] == 1

    assert {path.name for path in folder.iterdir()} == {CONTEXT, living.name}
    tier.close()


@pytest.mark.parametrize("command", [["clear", "--yes"], ["gc", "--namespace", SPACE]])
def test_a_strangers_files_among_contexts_stay(tmp_path: Path, command: list[str]) -> None:
    """Only what the integration made is removed."""
    folder = contexts(tmp_path)
    (folder / "notes").write_text("mine")
    (folder / "notes.json").write_text("mine")
    (folder / f"{0:016x}.json").mkdir()
    (folder / f"{0:016x}.json" / "inside").write_text("mine")

    facts(command[0], tmp_path, *command[1:])

    assert {path.name for path in folder.rglob("*")} == {
        *("notes", "notes.json"),
        *(f"{0:016x}.json", "inside"),
    }
