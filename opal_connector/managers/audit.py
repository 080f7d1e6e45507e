"""Recomputes every book of a tier from its records: used by `check()` and by tests."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from opal_connector.managers.jobs import JobKind, OpenJob, PlannedCopy, PlannedObject
from opal_connector.managers.records import ObjectRecord
from opal_connector.managers.storage_backend import OpalStorageBackend


def audit_tier(tier: OpalStorageBackend) -> None:
    """Compare every derived book of a tier with its records.

    Raises:
        AssertionError: They differ.
    """
    tier.space.check()
    tier.order.check()
    tier.leaving.check()
    leaving = tier.leaving.records()
    tier.index.check(leaving)
    everything = [*tier.index.records.values(), *leaving]
    assert sum(record.size_bytes for record in everything) == tier.used_bytes
    for record in everything:
        members = tier.groups[record.group].members
        assert len(record.rows) == record.block_count * members, "rows and blocks differ"
        size_bytes = tier.space.size_bytes(record.block_count, members)
        assert record.size_bytes == size_bytes, "rows and size differ"
    if not tier.space.frees_later:
        rows = [row for record in everything for row in record.rows]
        assert len(rows) == len(set(rows)), "a row is held twice"
        assert tier.used_bytes <= tier.capacity_bytes


def audit_leases(tier: OpalStorageBackend, expected: Mapping[int, int]) -> None:
    """Compare every lease count of a tier with `expected`, counted by record identity.

    Raises:
        AssertionError: They differ.
    """
    for record in (*tier.index.records.values(), *tier.leaving.doomed.values()):
        assert record.leases == expected.get(id(record), 0), f"leases of {record} differ"


def audit_promises(
    tiers: Sequence[OpalStorageBackend],
    promised: Sequence[ObjectRecord],
    jobs: Iterable[OpenJob],
) -> list[PlannedCopy]:
    """Compare all lease counts with the promises and the open jobs; returns the open copies.

    Raises:
        AssertionError: They differ.
    """
    held = list(promised)
    copies: list[PlannedCopy] = []
    for job in jobs:
        for item in job.objects:
            if isinstance(item, PlannedObject) and job.kind is JobKind.LOAD:
                held.append(item.record)
            elif isinstance(item, PlannedCopy):
                copies.append(item)
    held += [item.source for item in copies if item.source is not None]
    leases = Counter(id(record) for record in held)
    for tier in tiers:
        audit_leases(tier, leases)
    return copies
