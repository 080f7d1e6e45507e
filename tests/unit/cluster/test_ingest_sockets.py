"""A feed over real sockets: real publishers over real books, engines, dead and broken peers."""

import asyncio
import random
from collections.abc import Coroutine, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from engine_server import EngineServer, eventually
from naive_kvbm import Key
from publisher_world import Publisher, books_blocks, held, open_channel, shuffle, three_tiers
from simulated_engine import SimulatedEngine
from tier_world import World

from opal_connector.cli.server_process import free_port
from opal_connector.cluster.ingest import KVBMFeed, NativeSource, Source, SourceState, VllmSource
from opal_connector.cluster.kvbm import KVBM
from opal_connector.events import KVCEvent
from opal_connector.events.channel import Published
from opal_connector.managers import OpalKVCacheManager

WORLDS: WeakKeyDictionary[OpalKVCacheManager, World] = WeakKeyDictionary()  # who does their jobs


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 60))


def known(kvbm: KVBM, worker_id: str) -> dict[Key, set[bytes]]:
    worker = kvbm.workers.get(worker_id)
    counts = worker.block_counts if worker is not None else {}
    return {
        key: {block for _, block in kvbm.contents(worker_id, *key)}
        for key, count in counts.items()
        if count
    }


def source_of(publisher: Publisher) -> NativeSource:
    assert publisher.endpoint is not None
    return NativeSource(publisher.endpoint.announced)


def busy(manager: OpalKVCacheManager, seed: int, steps: int) -> None:
    world = WORLDS.setdefault(manager, World())
    generator = random.Random(seed)
    for _ in range(steps):
        shuffle(manager, world, generator)


def test_a_feed_that_comes_late_knows_what_the_books_hold_and_follows_them() -> None:
    """A router newer than the engines finds all that they hold, not only what is stored later."""
    manager = three_tiers()
    publisher = open_channel(manager)
    busy(manager, 1, 100)

    async def body() -> None:
        kvbm = KVBM()
        async with KVBMFeed(kvbm) as feed:
            feed.add(source_of(publisher))
            await eventually(lambda: known(kvbm, "one") == held(books_blocks(manager)))
            for seed in range(5):
                busy(manager, seed, 60)
                await eventually(lambda: known(kvbm, "one") == held(books_blocks(manager)))
            kvbm.check()
            (status,) = feed.statuses()
            assert status.state is SourceState.LIVE
            assert status.worker_ids == ("one",)
            assert status.metrics.events > 0

    try:
        run(body())
    finally:
        publisher.close()


def test_a_bad_link_to_real_books_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores, demotions, evictions and resets, whose batches are lost, repeated and reordered."""
    manager = three_tiers()
    publisher = open_channel(manager)

    async def body() -> None:
        kvbm = KVBM()
        async with KVBMFeed(kvbm) as feed:
            feed.add(source_of(publisher))
            await eventually(lambda: feed.statuses()[0].is_settled)
            machine = feed._shells[source_of(publisher).name].machine
            real, generator = machine.on_published, random.Random(3)

            late: list[tuple[Published, int]] = []

            def lossy(message: Published, size: int, now: float) -> list[Any]:
                actions = []
                fate = generator.random()
                if fate < 0.15:
                    late.append((message, size))
                for _ in range((fate >= 0.4) + (fate >= 0.8)):
                    actions += real(message, size, now)
                if late and generator.random() < 0.4:
                    actions += real(*late.pop(), now)
                return actions

            monkeypatch.setattr(machine, "on_published", lossy)
            for seed in range(8):
                busy(manager, seed, 20)
                await eventually(lambda: known(kvbm, "one") == held(books_blocks(manager)))
            assert machine.metrics.gaps > 0
            assert machine.metrics.replayed_batches > 0
            assert machine.metrics.duplicates > 0
            assert machine.metrics.purges == 0

    try:
        run(body())
    finally:
        publisher.close()


def test_a_batch_that_cannot_be_applied_makes_its_source_begin_again() -> None:
    """A fault inside the index is not the end of a source, nor of the loop."""

    class Failing(KVBM):
        faults = 3

        def process_kvc_events(self, worker_id: str, events: Iterable[KVCEvent]) -> None:
            if self.faults:
                self.faults -= 1
                raise RuntimeError("on purpose")
            super().process_kvc_events(worker_id, events)

    manager = three_tiers()
    publisher = open_channel(manager)

    async def body() -> None:
        kvbm = Failing()
        async with KVBMFeed(kvbm) as feed:
            feed.add(source_of(publisher))
            await eventually(lambda: feed.statuses()[0].is_settled)
            busy(manager, 9, 40)
            await eventually(lambda: known(kvbm, "one") == held(books_blocks(manager)))
            await eventually(lambda: feed.statuses()[0].is_settled)
            assert feed.statuses()[0].metrics.faults > 0

    try:
        run(body())
    finally:
        publisher.close()


def test_an_instance_that_is_replaced_in_place_is_known_anew() -> None:
    """The restarted engine's old blocks score no more, and its new ones do from the first."""
    first, second = three_tiers(), three_tiers()
    publisher = open_channel(first)
    busy(first, 5, 60)

    async def body() -> None:
        kvbm = KVBM()
        async with KVBMFeed(kvbm) as feed:
            source = source_of(publisher)
            feed.add(source)
            await eventually(lambda: known(kvbm, "one") == held(books_blocks(first)))
            await asyncio.to_thread(publisher.close)
            again = await asyncio.to_thread(
                open_channel,
                second,
                endpoint=publisher.endpoint,
                publish_endpoint=publisher.publish_endpoint,
            )
            try:
                busy(second, 6, 20)
                await eventually(lambda: known(kvbm, "one") == held(books_blocks(second)))
                await eventually(lambda: feed.statuses()[0].is_settled)
                assert feed.metrics()[source.name].restarts >= 1
            finally:
                await asyncio.to_thread(again.close)

    run(body())


def test_a_removed_source_leaves_nothing_behind_at_once() -> None:
    manager = three_tiers()
    publisher = open_channel(manager)
    busy(manager, 2, 50)

    async def body() -> None:
        kvbm = KVBM()
        async with KVBMFeed(kvbm) as feed:
            feed.add(source_of(publisher))
            await eventually(lambda: known(kvbm, "one"))
            feed.remove(source_of(publisher).name)
            assert "one" not in kvbm.workers
            assert kvbm.used_bytes == 0
            feed.add(source_of(publisher))
            await eventually(lambda: known(kvbm, "one") == held(books_blocks(manager)))

    try:
        run(body())
    finally:
        publisher.close()


def test_dead_and_broken_sources_disturb_nobody() -> None:
    """One endpoint that nobody serves, one that sends nonsense, one that works."""
    manager = three_tiers()
    publisher = open_channel(manager)
    busy(manager, 2, 50)

    async def body() -> None:
        kvbm = KVBM()
        with EngineServer(SimulatedEngine()) as nonsense:
            async with KVBMFeed(kvbm) as feed:
                feed.add(NativeSource("tcp://127.0.0.1:9"))
                feed.add(VllmSource(worker="broken", endpoint=nonsense.endpoint))
                feed.add(source_of(publisher))
                await eventually(lambda: feed.states()["broken"] is SourceState.LIVE)
                nonsense.send_raw([b"", b"\0" * 8, b"\xc1 no msgpack"])
                nonsense.send_raw([b"alone"])
                await eventually(lambda: feed.metrics()["broken"].malformed >= 1)
                await eventually(lambda: known(kvbm, "one") == held(books_blocks(manager)))
                assert feed.states()["tcp://127.0.0.1:9"] is SourceState.INIT

    try:
        run(body())
    finally:
        publisher.close()


@pytest.mark.parametrize(
    "source",
    [
        NativeSource("no endpoint"),
        VllmSource(worker="v", endpoint="no endpoint"),
        VllmSource(worker="v", endpoint="tcp://127.0.0.1:9", replay_endpoint="no endpoint"),
    ],
    ids=repr,
)
def test_a_source_that_cannot_be_one_is_refused_when_it_is_added(source: Source) -> None:
    async def body() -> None:
        async with KVBMFeed(KVBM()) as feed:
            with pytest.raises(ValueError, match="names an endpoint that is none"):
                feed.add(source)
            assert feed.statuses() == []

    run(body())


def test_a_source_is_added_once() -> None:
    async def body() -> None:
        async with KVBMFeed(KVBM()) as feed:
            feed.add(NativeSource("tcp://127.0.0.1:9"))
            with pytest.raises(ValueError, match="followed already"):
                feed.add(NativeSource("tcp://127.0.0.1:9"))

    run(body())


def test_a_second_source_for_the_same_worker_is_refused() -> None:
    """Two that both say they are one worker would overwrite each other for ever."""
    manager = three_tiers()
    first, second = open_channel(manager), open_channel(three_tiers())
    busy(manager, 2, 20)

    async def body() -> None:
        kvbm = KVBM()
        async with KVBMFeed(kvbm) as feed:
            feed.add(source_of(first))
            await eventually(lambda: feed.statuses()[0].is_settled)
            feed.add(source_of(second))
            await eventually(lambda: feed.metrics()[source_of(second).name].conflicts)
            assert feed.states()[source_of(second).name] is SourceState.INIT
            assert known(kvbm, "one") == held(books_blocks(manager))

    try:
        run(body())
    finally:
        first.close()
        second.close()


def test_an_engine_is_followed_through_losses_and_a_restart_in_place() -> None:
    """What vLLM's sequence numbers alone cannot tell, its replay socket does."""

    async def body() -> None:
        kvbm, generator = KVBM(), random.Random(4)
        engine = SimulatedEngine()
        engine.live(generator, 30)
        engine.flush(2)  # before anybody listened
        with EngineServer(engine) as server:
            async with KVBMFeed(kvbm) as feed:
                feed.add(
                    VllmSource(
                        worker="v",
                        endpoint=server.endpoint,
                        replay_endpoint=server.replay_endpoint,
                        model="m",
                    )
                )
                await eventually(lambda: known(kvbm, "v") == engine.blocks())
                for lost in (0, 2, 0, 1):
                    server.to_lose = lost
                    engine.live(generator, 30)
                    server.publish()
                    engine.clear()
                    server.publish()
                    await eventually(lambda: known(kvbm, "v") == engine.blocks())
                metrics = feed.metrics()["v"]
                assert metrics.gaps > 0
                assert metrics.purges == 0
                with server.lock:
                    engine.restart()
                    engine.live(generator, 30)
                server.publish()
                await eventually(lambda: known(kvbm, "v") == engine.blocks())
                assert metrics.restarts == 1

    run(body())


def test_an_engine_that_goes_away_is_not_scored_and_comes_back() -> None:
    async def body() -> None:
        kvbm, engine = KVBM(), SimulatedEngine()
        engine.store(0)
        server = EngineServer(engine)
        endpoint, replay = server.endpoint, server.replay_endpoint
        async with KVBMFeed(kvbm) as feed:
            feed.add(VllmSource(worker="v", endpoint=endpoint, replay_endpoint=replay))
            server.publish()
            await eventually(lambda: known(kvbm, "v") == engine.blocks())
            server.close()
            await eventually(lambda: feed.states()["v"] is SourceState.STALE)
            assert not kvbm.workers["v"].is_live
            engine.restart()
            engine.store(0)
            engine.store(1)
            ports = [int(one.rpartition(":")[2]) for one in (endpoint, replay)]
            with EngineServer(engine, port=ports[0], replay_port=ports[1]) as again:
                again.publish()
                await eventually(lambda: known(kvbm, "v") == engine.blocks())
                await eventually(lambda: kvbm.workers["v"].is_live)

    run(body())


@pytest.mark.vllm
def test_vllms_own_publisher_is_read() -> None:
    """The real one, its wire form and its replay: what was published before is known, too."""
    kv_events = pytest.importorskip("vllm.distributed.kv_events")
    first_port = free_port(4)
    ports = [first_port, first_port + 2]
    endpoints = [f"tcp://*:{port}" for port in ports]
    publisher = kv_events.ZmqEventPublisher(1, *endpoints)  # the ports of rank 1 are the next ones
    reached = [f"tcp://127.0.0.1:{port + 1}" for port in ports]

    def stored(hashes: list[int], parent: int | None, token: int) -> Any:
        event = kv_events.BlockStored(hashes, parent, [token] * 16, 16, None, "GPU", None)
        return kv_events.KVEventBatch(ts=1.0, events=[event])

    async def body() -> None:
        kvbm = KVBM()
        publisher.publish(stored([1], None, 7))
        async with KVBMFeed(kvbm) as feed:
            feed.add(VllmSource(worker="v", endpoint=reached[0], replay_endpoint=reached[1]))
            await eventually(lambda: "v/dp1" in kvbm.workers, "the replay")
            publisher.publish(stored([2], 1, 8))
            await eventually(lambda: kvbm.workers["v/dp1"].block_counts.get((0, "Device")) == 2)

    try:
        run(body())
    finally:
        publisher.shutdown()
