"""Which source feeds which worker, when instances change places."""

import asyncio
import os
from pathlib import Path

from engine_server import eventually
from fakes import make_manager, store
from publisher_world import open_channel

from opal_connector.cluster.ingest import KVBMFeed, NativeSource
from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.publisher import Publisher


def source_of(publisher: Publisher) -> NativeSource:
    assert publisher.endpoint is not None
    return NativeSource(publisher.endpoint.announced)


def test_an_instance_whose_place_another_took_is_followed_at_its_new_one() -> None:
    """Else its old source owns its name for ever, and follows somebody else."""
    books = make_manager(rows=16)
    store(books, range(4))
    old = open_channel(books, instance_id="one")

    async def body() -> None:
        kvbm = KVBM()
        async with KVBMFeed(kvbm) as feed:
            feed.add(source_of(old))
            await eventually(lambda: set(kvbm.workers) == {"one"})
            await asyncio.to_thread(old.close)
            taker = await asyncio.to_thread(
                open_channel,
                make_manager(rows=16),
                instance_id="two",
                endpoint=old.endpoint,
                publish_endpoint=old.publish_endpoint,
            )
            moved = await asyncio.to_thread(open_channel, books, instance_id="one")
            try:
                await eventually(lambda: set(kvbm.workers) == {"two"})
                feed.add(source_of(moved))
                await eventually(lambda: set(kvbm.workers) == {"one", "two"})
                feed.remove(source_of(old).name)
                assert set(kvbm.workers) == {"one"}
            finally:
                await asyncio.to_thread(taker.close)
                await asyncio.to_thread(moved.close)

    asyncio.run(asyncio.wait_for(body(), 60))


def test_two_that_change_places_are_both_followed() -> None:
    """Each waits for the other's name until the other source gives it free."""
    first = open_channel(make_manager(rows=16), instance_id="one")
    second = open_channel(make_manager(rows=16), instance_id="two")

    async def body() -> None:
        kvbm = KVBM()
        async with KVBMFeed(kvbm) as feed:
            feed.add(source_of(first))
            feed.add(source_of(second))
            await eventually(lambda: set(kvbm.workers) == {"one", "two"})
            await asyncio.to_thread(first.close)
            await asyncio.to_thread(second.close)
            changed = [
                await asyncio.to_thread(
                    open_channel,
                    make_manager(rows=16),
                    instance_id=name,
                    endpoint=place.endpoint,
                    publish_endpoint=place.publish_endpoint,
                )
                for name, place in (("two", first), ("one", second))
            ]
            try:
                await eventually(
                    lambda: [one.worker_ids for one in feed.statuses()] == [("two",), ("one",)]
                )
                await eventually(lambda: all(one.is_settled for one in feed.statuses()))
                assert set(kvbm.workers) == {"one", "two"}
            finally:
                for publisher in changed:
                    await asyncio.to_thread(publisher.close)

    asyncio.run(asyncio.wait_for(body(), 60))


def test_descriptors_do_not_leak_when_sources_come_and_go() -> None:
    publisher = open_channel(make_manager(rows=16))

    async def body() -> None:
        async with KVBMFeed(KVBM()) as feed:
            counts = []
            for _ in range(12):
                feed.add(source_of(publisher))
                await eventually(lambda: feed.statuses()[0].is_settled)
                feed.remove(source_of(publisher).name)
                counts.append(len(os.listdir(Path("/proc/self/fd"))))
            await eventually(
                lambda: len(os.listdir(Path("/proc/self/fd"))) <= counts[1], "descriptors to close"
            )

    try:
        asyncio.run(asyncio.wait_for(body(), 60))
    finally:
        publisher.close()
