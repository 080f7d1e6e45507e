"""What is told and listed of keys: sizes that add up, pages in one order, several followers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")

import torch
from l2_world import SIZE, Host, buffer_of, hosted, key_of, store_some, tiers_of
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener

from opal_connector.integrations.lmcache.bindings import TokenBindings
from opal_connector.integrations.lmcache.catalog import Catalog
from opal_connector.integrations.lmcache.placements import PlacementBooks
from opal_connector.integrations.lmcache.tier_follower import TierFollower


class Balance(L2AdapterListener):
    """Bytes by key, as whoever adds up what LMCache is told has them."""

    def __init__(self) -> None:
        self.total_bytes = 0

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.total_bytes += sum(sizes)

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        """Changes nothing."""

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        """Sizes are for LMCache's own books: see `told_of`."""


def told_of(host: Host, monkeypatch: pytest.MonkeyPatch) -> Balance:
    """What LMCache's own books of an adapter would add up to."""
    balance = Balance()
    kept = host.adapter._notify_keys_deleted

    def deleted(keys: list[ObjectKey], sizes: list[int]) -> None:
        balance.total_bytes -= sum(sizes)
        kept(keys, sizes)

    monkeypatch.setattr(host.adapter, "_notify_keys_deleted", deleted)
    host.adapter.register_listener(balance)
    return balance


def test_a_key_goes_with_as_many_bytes_as_it_came_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key may have objects of several layouts; LMCache adds up what it is told."""
    with hosted(tiers_of(None)) as host:
        balance = told_of(host, monkeypatch)
        store_some(host, range(2), SIZE)
        for number in range(2):
            other = buffer_of(3 * SIZE, 1, dtype=torch.float32)
            assert host.store([key_of(number)], [other]).is_successful()
        late = Balance()
        host.adapter.register_listener(late)
        assert late.total_bytes == balance.total_bytes == 2 * SIZE
        assert host.adapter.get_usage().total_bytes_used == 8 * SIZE
        host.adapter.delete([key_of(0), key_of(1)])
        assert balance.total_bytes == 0


def pages(
    host: Host, size: int, between: Callable[[], Any] = lambda: None, model: str | None = None
) -> list[str]:
    """A listing in pages."""
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = host.adapter.list_l2_keys(model, page_size=size, cursor=cursor)
        found += [entry.key.chunk_hash_hex for entry in page.entries]
        cursor = page.next_page_token
        if cursor is None:
            return found
        between()


def test_a_listing_reads_the_books_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each page, in the time of everybody who waits for the books."""
    readings: list[int] = []
    read = Catalog.places

    def counted(self: Catalog, model_name: str | None, after: bytes) -> Any:
        readings.append(1)
        return read(self, model_name, after)

    monkeypatch.setattr(Catalog, "places", counted)
    with hosted(tiers_of(None)) as host:
        store_some(host, range(12))
        assert len(set(pages(host, 1))) == 12
        assert len(readings) == 1
        assert len(host.adapter._listings) == 0


def test_two_listings_at_once_are_complete_each() -> None:
    """Of one model or another, or both the same: they meet at equal cursors."""
    with hosted(tiers_of(None)) as host:
        store_some(host, range(8))
        expected = pages(host, 100)
        inner: list[list[str]] = []
        outer = pages(host, 2, lambda: inner.append(pages(host, 3, model="model")))
        assert outer == expected
        assert inner == [expected] * 3
        assert pages(host, 2, lambda: inner.append(pages(host, 2))) == expected
        assert inner[3:] == [expected] * 3
        assert len(host.adapter._listings) == 0


def test_what_is_gone_is_not_listed_and_what_stays_is() -> None:
    """Whatever happens between two pages."""
    with hosted(tiers_of(None)) as host:
        store_some(host, range(8))
        expected = pages(host, 100)
        gone = [ObjectKey(bytes.fromhex(expected[4]), "model", 0, 0, "")]
        found = pages(host, 2, lambda: host.adapter.delete(gone))
        assert found == [one for one in expected if one != expected[4]]


def test_listings_that_nobody_ends_are_few_and_go_on_all_the_same() -> None:
    """What is kept is bounded; a page that is asked for again is the same."""
    with hosted(tiers_of(None)) as host:
        store_some(host, range(12))
        expected = pages(host, 100)
        cursors = [
            host.adapter.list_l2_keys(page_size=size).next_page_token for size in range(1, 9)
        ]
        assert len(host.adapter._listings) == 4
        for _ in range(2):
            for size, cursor in enumerate(cursors, 1):
                page = host.adapter.list_l2_keys(page_size=100, cursor=cursor)
                assert [entry.key.chunk_hash_hex for entry in page.entries] == expected[size:]
        assert len(host.adapter._listings) == 0


def test_one_follower_that_leaves_takes_no_other_along(tmp_path: Path) -> None:
    """Two server modules may follow one adapter, and end in any order."""

    def follower(host: Host) -> tuple[TierFollower, Callable[[], set[ObjectKey]]]:
        placements = PlacementBooks(TokenBindings(16), lambda event: None, "model")
        return TierFollower(host.books, placements, "opal"), lambda: {
            key for _, key in placements.keys("opal")
        }

    with hosted(tiers_of(tmp_path)) as host:
        store_some(host, range(2))
        first, of_first = follower(host)
        second, of_second = follower(host)
        first.detach()
        first.detach()
        store_some(host, range(2, 4))
        host.adapter.delete([key_of(0)])
        host.settle()
        assert of_first() == {key_of(0), key_of(1)}
        assert of_second() == {key_of(1), key_of(2), key_of(3)}
        second.detach()
        store_some(host, range(4, 5))
        assert of_second() == {key_of(1), key_of(2), key_of(3)}
        assert host.look_up([key_of(4)]) == [True]
