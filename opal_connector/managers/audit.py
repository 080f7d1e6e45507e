"""Recomputes every book of a tier from its records: used by `check()` and by tests."""

from collections.abc import Mapping

from opal_connector.managers.storage_backend import OpalStorageBackend


def audit_tier(tier: OpalStorageBackend) -> None:
    """Compare every derived book of a tier with its records.

    Raises:
        AssertionError: They differ.
    """
    tier.space.check()
    tier.order.check()
    tier.leaving.check()
    doomed = list(tier.doomed.values())
    records = list(tier.index.records.values())
    leaving = tier.leaving.records()
    tier.index.check([*doomed, *leaving])
    everything = [*records, *doomed, *leaving]
    assert sum(record.size_bytes for record in everything) == tier.used_bytes
    for record in everything:
        assert record.size_bytes == tier.space.size_bytes(len(record.rows)), "rows and size differ"
    if not tier.space.frees_later:
        rows = [row for record in everything for row in record.rows]
        assert len(rows) == len(set(rows)), "a row is held twice"
        assert tier.used_bytes <= tier.capacity_bytes
    assert all(record.is_held for record in doomed)


def audit_leases(tier: OpalStorageBackend, expected: Mapping[int, int]) -> None:
    """Compare every lease count of a tier with `expected`, counted by record identity.

    Raises:
        AssertionError: They differ.
    """
    for record in (*tier.index.records.values(), *tier.doomed.values()):
        assert record.leases == expected.get(id(record), 0), f"leases of {record} differ"
