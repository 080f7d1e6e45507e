"""`opal tiers`: what lies in the directory of a tier of files, whether it is good, and its care.

DIRECTORY is the `path` of the tier in the configuration. Every command works on a directory that
engines are using. Standard output has the answer, as a table or with `--json` as one JSON object.
"""

import re
import shutil
import statistics
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from opal_connector.cli.errors import FAILURE, CommandError, plain_failures
from opal_connector.cli.progress import ConsoleReporter
from opal_connector.cli.tiers_output import (
    age_text,
    print_json,
    print_table,
    size_text,
)

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

_directory = click.argument(
    "directory", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group()
def tiers() -> None:
    """The directories of LocalNVMe and DistributedFS: look, verify, clean."""


@tiers.command("ls", short_help="Namespaces and ranks, and how much they hold.")
@_directory
@_as_json
def list_tiers(directory: Path, as_json: bool) -> None:
    """Show namespaces and ranks under DIRECTORY: objects, bytes, and when last used."""
    from opal_connector.tiers.directory import find_slots, summarize

    with plain_failures():
        summaries = [summarize(slot) for slot in find_slots(directory)]
    if as_json:
        print_json({"directory": str(directory), "slots": summaries})
        return
    print_table(
        ("namespace", "rank", "objects", "size", "last used"),
        [
            (one.namespace, one.slot, str(one.objects), size_text(one.used_bytes),
             age_text(one.newest_use))
            for one in summaries
        ],
        empty=f"There is nothing of a tier in {directory}.",
    )  # fmt: skip


@tiers.command("stat", short_help="Counts, sizes, damage and free space.")
@_directory
@_as_json
def show_statistics(directory: Path, as_json: bool) -> None:
    """Show what DIRECTORY holds in all; reads the header of every object."""
    with plain_failures():
        facts = _statistics(directory)
    if as_json:
        print_json(facts)
        return
    sizes = {"used_bytes", "quarantine_bytes", "free_bytes", "object_bytes_median"}
    rows = [
        (name.replace("_", " "), size_text(value) if name in sizes else str(value))
        for name, value in facts.items()
    ]
    print_table(("", "value"), rows, empty="")


def _statistics(directory: Path) -> dict[str, Any]:
    from opal_connector.tiers.directory import find_slots, summarize
    from opal_connector.tiers.file_names import QUARANTINE_NAME
    from opal_connector.tiers.file_sizes import files_under, used_bytes
    from opal_connector.tiers.header_scan import list_directory, scan_headers
    from opal_connector.tiers.record import file_bytes

    slots = find_slots(directory)
    summaries = [summarize(slot) for slot in slots]
    sizes: list[int] = []
    blocks = damaged = unread = 0
    for slot in slots:
        for scanned in scan_headers(slot.path, list_directory(slot.path).keys):
            if scanned.header is not None:
                blocks += scanned.header.name.block_count
                name, row_bytes = scanned.header.name, scanned.header.row_bytes
                sizes.append(file_bytes(name.block_count, row_bytes, name.members))
            elif scanned.is_unread:
                unread += 1
            else:
                damaged += 1
    return {
        "directory": str(directory),
        "namespaces": len({one.namespace for one in summaries}),
        "ranks": len({one.rank for one in summaries}),
        "objects": sum(one.objects for one in summaries),
        "blocks": blocks,
        "used_bytes": sum(one.used_bytes for one in summaries),
        "object_bytes_median": int(statistics.median(sizes)) if sizes else 0,
        "damaged_headers": damaged,
        "unread_headers": unread,
        "temporary_files": sum(one.temporary_files for one in summaries),
        "other_files": sum(one.other_files for one in summaries),
        "quarantine_bytes": used_bytes(files_under(str(directory / QUARANTINE_NAME))),
        "free_bytes": shutil.disk_usage(directory).free,
    }


@tiers.command("verify", short_help="Read everything; put aside what is bad.")
@_directory
@_as_json
@click.option("--dry-run", is_flag=True, help="Only report; leave bad files where they are.")
@click.pass_context
def verify_tiers(context: click.Context, directory: Path, as_json: bool, dry_run: bool) -> None:
    """Read every object under DIRECTORY and compare it with its check values.

    Bad files go to DIRECTORY/quarantine. The exit code is 1 if there are any.
    """
    from opal_connector.cli.tiers_verify import verify

    with plain_failures():
        report = verify(directory, ConsoleReporter(), move=not dry_run)
    if as_json:
        print_json({"directory": str(directory), **msgspec.to_builtins(report)})
    else:
        faults = [*report.bad, *report.unreadable]
        if faults:
            moved = {True: "quarantined", False: "left"}
            print_table(
                ("file", "fault", ""),
                [(one.path, one.fault, moved[one.is_moved]) for one in faults],
                empty="",
            )
        click.echo(
            f"{report.objects} objects, {size_text(report.read_bytes)} good, "
            f"{len(report.bad)} files bad, {len(report.unreadable)} unreadable."
        )
    if report.bad or report.unreadable:
        context.exit(FAILURE)


@tiers.command("gc", short_help="Remove leftovers, and namespaces that nobody uses.")
@_directory
@_as_json
@click.option("--namespace", metavar="DIGITS", default="", help="Also remove this namespace.")
@click.option("--older-than", metavar="AGE", help="Also remove namespaces unused so long: 30d.")
def collect(directory: Path, as_json: bool, namespace: str, older_than: str | None) -> None:
    """Remove what no engine will read: leftovers of dead processes, files with a bad header.

    With --namespace or --older-than also whole namespaces. What a living process has locked stays;
    a DistributedFS has no locks, so there only the age tells.
    """
    from opal_connector.cli import tiers_removal
    from opal_connector.tiers.file_names import NAMESPACE_DIGITS
    from opal_connector.tiers.slot_removal import Removed

    if namespace and not re.fullmatch(rf"[0-9a-f]{{{NAMESPACE_DIGITS},64}}", namespace):
        raise CommandError(f"A namespace has {NAMESPACE_DIGITS} hex digits or more: {namespace!r}.")
    seconds = None if older_than is None else _seconds(older_than)
    removed = Removed()
    with plain_failures():
        tiers_removal.collect_garbage(directory, removed)
        if namespace or seconds is not None:
            tiers_removal.remove_namespaces(
                directory, removed, namespace=namespace, older_than_seconds=seconds
            )
    _report(removed, as_json=as_json)


@tiers.command("clear", short_help="Remove all objects.")
@_directory
@_as_json
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear_tiers(directory: Path, as_json: bool, yes: bool) -> None:
    """Remove all objects under DIRECTORY, of all namespaces and ranks, and its quarantine.

    Engines that use it go on, and find what they look for gone.
    """
    from opal_connector.cli import tiers_removal
    from opal_connector.tiers.slot_removal import Removed

    if not yes:
        click.confirm(f"Remove all cached KV in {directory}?", abort=True, err=True)
    removed = Removed()
    with plain_failures():
        tiers_removal.clear(directory, removed)
    _report(removed, as_json=as_json)


def _report(removed: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(msgspec.to_builtins(removed))
        return
    click.echo(
        f"Removed {removed.objects} objects, {removed.leftovers} leftovers and "
        f"{removed.unreadable} unreadable files: {size_text(removed.freed_bytes)}."
    )
    for slot in removed.in_use:
        click.echo(f"A living process uses {slot}: left alone.")


def _seconds(age: str) -> float:
    match = re.fullmatch(r"(\d+)([smhdw])", age)
    if match is None:
        raise CommandError(f"An age is a number and one of s, m, h, d, w, such as 30d: {age!r}.")
    return int(match[1]) * float(_UNITS[match[2]])
