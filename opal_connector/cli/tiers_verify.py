"""Reading all that is in a directory, and putting aside what is bad."""

from functools import partial
from pathlib import Path

import msgspec

from opal_connector.cli.progress import Reporter
from opal_connector.cli.tiers_removal import quarantine
from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.tiers.directory import Slot, find_slots, object_paths, verify_file
from opal_connector.tiers.header_scan import list_directory, map_ahead


class BadFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is not what it should be. `is_moved` says whether it went to quarantine."""

    path: str
    fault: str
    is_moved: bool


class VerifyReport(msgspec.Struct, kw_only=True):
    """What a verification found. Unreadable files may be good: they stay where they are."""

    objects: int = 0
    read_bytes: int = 0
    bad: list[BadFile] = []
    unreadable: list[BadFile] = []


class _Verdict(msgspec.Struct, frozen=True):
    path: str
    read_bytes: int = 0
    fault: str = ""
    is_bad: bool = False


def verify(root: Path, reporter: Reporter, *, move: bool) -> VerifyReport:
    """Read every object under a root; bad files go to its quarantine if `move`. Blocks.

    Raises:
        OSError: The root cannot be read, or a file cannot be moved.
    """
    report = VerifyReport()
    slots = [(slot, list_directory(slot.path).keys) for slot in find_slots(root)]
    total = sum(len(keys) for _, keys in slots)
    with reporter.step(f"Reading {total} objects", total) as advance:
        for slot, keys in slots:
            paths = object_paths(slot, keys)
            for verdict in map_ahead(partial(_judge, slot), paths):
                advance(1)
                _note(root, slot, verdict, report, move=move)
    return report


def _judge(slot: Slot, path: str) -> _Verdict | None:
    """None for a file that was removed meanwhile."""
    try:
        return _Verdict(path, verify_file(slot, path))
    except ChecksumMismatchError as error:
        return _Verdict(path, fault=str(error), is_bad=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        return _Verdict(path, fault=error.strerror or str(error))


def _note(
    root: Path, slot: Slot, verdict: _Verdict | None, report: VerifyReport, *, move: bool
) -> None:
    if verdict is None:
        return
    report.objects += 1
    report.read_bytes += verdict.read_bytes
    if not verdict.fault:
        return
    path = verdict.path
    if not verdict.is_bad:
        report.unreadable.append(BadFile(path=path, fault=verdict.fault, is_moved=False))
        return
    is_moved = move and quarantine(root, slot, path, partial(verify_file, slot))
    if is_moved or not move:
        report.bad.append(BadFile(path=path, fault=verdict.fault, is_moved=is_moved))
