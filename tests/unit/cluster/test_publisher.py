"""The event channel of an instance: real sockets, the real thread, real books."""

import random
import socket
import threading
import time
from collections.abc import Iterator

from fakes import make_manager, store
from publisher_world import (
    BooksSource,
    Listener,
    Present,
    apply,
    blocks_in,
    books_blocks,
    open_channel,
    settled,
    shuffle,
    three_tiers,
    wait_until,
)
from tier_world import World

from opal_connector.cluster.publisher import Publisher
from opal_connector.events import ObjectFact
from opal_connector.events.channel import (
    FORMAT_VERSION,
    AskReplay,
    Contents,
    Description,
    DigestsNow,
    Replay,
    SystemEvent,
    TierDescription,
)
from opal_connector.events.digests import BucketDigests
from opal_connector.transfers import TierHealth

TIER = "CPUMemory"


def test_events_reach_a_subscriber_while_the_engine_is_idle(channels: list[Publisher]) -> None:
    manager = make_manager(rows=64)
    channels.append(open_channel(manager, coalesce_seconds=0.05))
    with Listener(channels[0]) as listener:
        store(manager, range(8))
        began = time.monotonic()
        wait_until(lambda: listener.batches, "the events")
        assert time.monotonic() - began < 1.0
        settled(listener, manager)
        batch = listener.batches[0]
        assert (batch.instance_id, batch.model, batch.sequence) == ("one", "m", 0)
        assert all(not getattr(event, "token_ids", ()) for event in listener.events())


def test_a_heartbeat_names_the_last_batch_the_load_and_the_blocks(
    channels: list[Publisher],
) -> None:
    manager = make_manager(rows=64)
    source = BooksSource(manager)
    source.load = SystemEvent(queue_depth=3, running=2)
    channels.append(open_channel(manager, source=source))
    with Listener(channels[0]) as listener:
        assert listener.beats[0].sequence == -1
        assert listener.beats[0].digests[0].block_count == 0
        store(manager, range(6))
        settled(listener, manager)
        wait_until(lambda: listener.beats[-1].sequence == listener.batches[-1].sequence)
        beat = listener.beats[-1]
        assert beat.system == source.load
        expected = BucketDigests()
        expected.flip_all(list(books_blocks(manager)[0, TIER]))
        assert beat.digests[0].buckets == expected.buckets()
        assert beat.digests[0].block_count == 6


def test_a_replay_gives_the_batches_from_a_number_on(channels: list[Publisher]) -> None:
    manager = make_manager(rows=512)
    channels.append(open_channel(manager))
    with Listener(channels[0]) as listener:
        for number in range(8):
            store(manager, [number * 10])
            wait_until(lambda count=number: len(listener.batches) > count)  # type: ignore[misc]
        assert listener.replay(3) == listener.batches[3:]
        assert listener.replay(0) == listener.batches
        assert listener.replay(len(listener.batches)) == []


def test_a_replay_that_is_gone_ends_without_batches(channels: list[Publisher]) -> None:
    manager = make_manager(rows=512)
    channels.append(open_channel(manager, replay_bytes=2_000))
    with Listener(channels[0]) as listener:
        for number in range(40):
            store(manager, [number * 10])
            wait_until(lambda count=number: len(listener.batches) > count)  # type: ignore[misc]
        parts = listener.ask(AskReplay(FORMAT_VERSION, 7, 0))
        assert parts == [Replay(FORMAT_VERSION, 7, listener.batches[0].incarnation, (), True)]
        assert listener.replay(39) == listener.batches[39:]


def test_contents_and_the_batches_behind_them_are_the_books_whenever_asked(
    channels: list[Publisher],
) -> None:
    """Asked again and again in the middle of stores, evictions, moves and resets."""
    manager = three_tiers()
    channels.append(open_channel(manager, coalesce_seconds=0.002))
    world, generator = World(), random.Random(5)
    asked: list[list[Contents]] = []
    is_over = threading.Event()
    with Listener(channels[0]) as listener:

        def ask() -> None:
            while not is_over.is_set():
                asked.extend(listener.contents(tier) for tier in ("memory", "near", "far"))

        asker = threading.Thread(target=ask)
        asker.start()
        deadline = time.monotonic() + 20
        steps = 0
        while (steps < 2_000 or len(asked) < 60) and time.monotonic() < deadline:
            shuffle(manager, world, generator)
            steps += 1
        is_over.set()
        asker.join()
        settled(listener, manager)
        assert [batch.sequence for batch in listener.batches] == list(range(len(listener.batches)))
        assert len(asked) > 30
        final = books_blocks(manager)
        for number, parts in enumerate(asked):
            tier = ("memory", "near", "far")[number % 3]
            assert len({part.sequence for part in parts}) == 1
            assert [part.part for part in parts] == list(range(len(parts)))
            present: Present = {(0, tier): blocks_in(parts)}
            for batch in listener.batches[parts[0].sequence + 1 :]:
                for event in batch.events:
                    apply(present, event)
            assert present[0, tier] == final.get((0, tier), set())


def test_digests_are_those_of_the_books_after_a_random_load(channels: list[Publisher]) -> None:
    manager = three_tiers()
    channels.append(open_channel(manager))
    world, generator = World(), random.Random(6)
    with Listener(channels[0]) as listener:
        for _ in range(300):
            shuffle(manager, world, generator)
        settled(listener, manager)
        now = listener.digests()
        assert isinstance(now, DigestsNow)
        assert now.sequence == listener.batches[-1].sequence
        present = books_blocks(manager)
        for digest in now.digests:
            expected = BucketDigests()
            blocks = present.get((digest.group, digest.tier), set())
            expected.flip_all(list(blocks))
            assert (digest.buckets, digest.block_count) == (expected.buckets(), len(blocks))
        assert {digest.tier for digest in now.digests} == {"memory", "near", "far"}


def test_contents_of_some_buckets_are_the_blocks_of_those(channels: list[Publisher]) -> None:
    manager = make_manager(rows=512)
    channels.append(open_channel(manager))
    for number in range(50):
        store(manager, range(number * 10, number * 10 + 5))
    with Listener(channels[0]) as listener:
        everything = books_blocks(manager)[0, TIER]
        buckets = bytes(sorted({block[0] for block in list(everything)[:5]}))
        parts = listener.contents(TIER, buckets)
        assert blocks_in(parts) == {block for block in everything if block[0] in buckets}
        whole = {
            (fact.block_hashes[start : start + 32], parent)
            for part in listener.contents(TIER)
            for fact in part.facts
            for start, parent in _parents(fact)
        }
        singles = [fact for part in parts for fact in part.facts]
        assert {(fact.block_hashes, fact.parent_hash) for fact in singles} <= whole


def _parents(fact: ObjectFact) -> Iterator[tuple[int, bytes]]:
    parent = fact.parent_hash
    for place in range(0, len(fact.block_hashes), 32):
        yield place, parent
        parent = fact.block_hashes[place : place + 32]


def test_large_contents_come_in_bounded_parts(channels: list[Publisher]) -> None:
    manager = make_manager(rows=40_000, chunk_blocks=16)
    channels.append(open_channel(manager))
    store(manager, range(30_000))
    with Listener(channels[0]) as listener:
        parts = listener.contents(TIER)
        assert len(parts) > 3
        assert blocks_in(parts) == books_blocks(manager)[0, TIER]


def test_a_tier_that_still_opens_is_not_complete(channels: list[Publisher]) -> None:
    manager = make_manager(rows=64)
    manager.storage.tiers[0].health = TierHealth.OPENING
    channels.append(open_channel(manager))
    with Listener(channels[0]) as listener:
        assert not listener.beats[-1].digests[0].is_complete
        assert not listener.contents(TIER)[-1].is_complete
        manager.storage.tiers[0].health = TierHealth.OK
        wait_until(lambda: listener.beats[-1].digests[0].is_complete, "the tier to be complete")


def test_the_description_says_who_and_where_and_its_revision_grows(
    channels: list[Publisher],
) -> None:
    manager = make_manager(rows=64)
    source = BooksSource(manager)
    channels.append(open_channel(manager, source=source, id_suffix="/dp1"))
    publisher = channels[0]
    assert publisher.publish_endpoint is not None
    with Listener(publisher) as listener:
        first = listener.description()
        assert isinstance(first, Description)
        assert first.instance.instance_id == "one/dp1"
        assert first.publish_endpoint == publisher.publish_endpoint.announced
        assert first.instance.tiers == (TierDescription(TIER),)
        assert first.instance.incarnation == listener.beats[0].incarnation
        source.model = "another"
        wait_until(lambda: listener.beats[-1].revision == first.revision + 1, "a revision")
        second = listener.description()
        assert isinstance(second, Description)
        assert second.instance.model == "another"


def test_without_a_name_an_instance_is_called_after_its_host_and_port(
    channels: list[Publisher],
) -> None:
    channels.append(open_channel(make_manager(rows=8), instance_id=None))
    endpoint = channels[0].endpoint
    assert endpoint is not None
    with Listener(channels[0]) as listener:
        assert listener.beats[0].instance_id == f"{socket.gethostname()}:{endpoint.port}"
