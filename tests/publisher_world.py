"""A real publisher over real books, and somebody who listens to it over real sockets."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq
from fakes import BLOCK_TOKENS, ROW_BYTES, start
from tier_world import World, tiered_manager

from opal_connector.cluster.publisher import ChannelSettings, Publisher
from opal_connector.cluster.publisher_sources import DeviceSource
from opal_connector.config import Endpoint
from opal_connector.events import Copy, Delete, Insert, KVCEvent, Move, ObjectFact
from opal_connector.events.channel import (
    FORMAT_VERSION,
    AskContents,
    AskDescription,
    AskDigests,
    AskReplay,
    Batch,
    Contents,
    Heartbeat,
    InstanceDescription,
    Published,
    Question,
    Reply,
    SystemEvent,
    TierDescription,
    decode_published,
    decode_reply,
    encode_message,
)
from opal_connector.integrations.vllm.book_facts import BookFacts
from opal_connector.managers import OpalKVCacheManager, one_table

Present = dict[tuple[int, str], set[bytes]]
PATIENCE_SECONDS = 20.0


def blocks_of(run: bytes) -> list[bytes]:
    return [run[start : start + 32] for start in range(0, len(run), 32)]


def wait_until(condition: Callable[[], object], what: str = "it") -> None:
    """Wait for something that must come true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)


class BooksSource(BookFacts):
    """An instance that is nothing but its books."""

    def __init__(self, manager: OpalKVCacheManager) -> None:
        super().__init__(manager)
        self.is_ready = True
        self.model = "m"
        self.block_tokens = BLOCK_TOKENS
        self.load = SystemEvent()

    def describe(self, instance_id: str, incarnation: int) -> InstanceDescription:
        return InstanceDescription(
            instance_id=instance_id,
            incarnation=incarnation,
            model=self.model,
            block_tokens=self.block_tokens,
            tiers=tuple(TierDescription(tier) for _, tier in self.places),
        )

    def system(self) -> SystemEvent:
        return self.load


def open_channel(
    manager: OpalKVCacheManager, device: DeviceSource | None = None, **settings: Any
) -> Publisher:
    """A channel at free ports that hears the books."""
    defaults: dict[str, Any] = {
        "endpoint": Endpoint("127.0.0.1", 0),
        "instance_id": "one",
        "coalesce_seconds": 0.01,
        "heartbeat_seconds": 0.05,
    }
    source = settings.pop("source", None) or BooksSource(manager)

    def detach() -> None:
        manager.storage.log.listener = None

    publisher = Publisher(ChannelSettings(**(defaults | settings)), source, device, detach=detach)
    manager.storage.log.listener = publisher.hear
    publisher.start()
    wait_until(lambda: publisher.publish_endpoint or not publisher.is_alive, "the channel to open")
    return publisher


def books_blocks(manager: OpalKVCacheManager) -> Present:
    """What the books hold, block by block."""
    present: Present = {}
    for tier in manager.storage.tiers:
        for record in tier.index.records.values():
            if record.is_readable:
                held = present.setdefault((record.group, tier.tier), set())
                held.update(blocks_of(record.run))
    return present


def apply(present: Present, event: KVCEvent) -> None:
    """What one event says, as sets."""
    fact = event.fact
    own = blocks_of(fact.block_hashes)[fact.shared_blocks :]
    match event:
        case Insert(_, tier) | Copy(_, _, tier):
            present.setdefault((fact.group, tier), set()).update(own)
        case Delete(_, tier):
            present.setdefault((fact.group, tier), set()).difference_update(own)
        case Move(_, source, tier, shared_blocks):
            present.setdefault((fact.group, tier), set()).update(own)
            left = blocks_of(fact.block_hashes)[shared_blocks:]
            present.setdefault((fact.group, source), set()).difference_update(left)


def held(present: Present) -> Present:
    """Without what is empty."""
    return {place: blocks for place, blocks in present.items() if blocks}


class Listener:
    """Listens to a channel and asks it. The sockets that ask belong to whoever calls.

    Mutable state: what was heard, appended by a thread.
    """

    def __init__(
        self, publisher: Publisher | None = None, *, ask: str = "", listen: str = ""
    ) -> None:
        if publisher is not None:
            assert publisher.endpoint is not None
            assert publisher.publish_endpoint is not None
            ask, listen = publisher.endpoint.announced, publisher.publish_endpoint.announced
        self._address = ask
        self._context = zmq.Context()
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.setsockopt(zmq.RCVHWM, 0)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, b"opal1")
        self._subscriber.connect(listen)
        self._dealer = self.dealer()
        self._next_id = 0
        self._is_closing = threading.Event()
        self.batches: list[Batch] = []
        self.beats: list[Heartbeat] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        wait_until(lambda: self.beats, "a heartbeat")

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *args: object) -> None:
        self._is_closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _listen(self) -> None:
        while not self._is_closing.is_set():
            if self._subscriber.poll(20):
                message: Published = decode_published(self._subscriber.recv_multipart()[1])
                if isinstance(message, Batch):
                    self.batches.append(message)
                else:
                    self.beats.append(message)

    def dealer(self) -> "zmq.Socket[bytes]":
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(self._address)
        return dealer

    def send(self, payload: bytes) -> None:
        self._dealer.send_multipart([b"", payload])

    def receive(self) -> Reply:
        assert self._dealer.poll(PATIENCE_SECONDS * 1_000), "no answer"
        empty, payload = self._dealer.recv_multipart()
        assert empty == b""
        assert len(payload) <= 1 << 20
        return decode_reply(payload)

    def ask(self, question: Question) -> list[Reply]:
        """All parts of the answer."""
        self.send(encode_message(question))
        parts: list[Reply] = []
        while not parts or not getattr(parts[-1], "is_last", True):
            parts.append(self.receive())
        return parts

    def description(self) -> Reply:
        return self.ask(AskDescription(FORMAT_VERSION, 1))[0]

    def digests(self) -> Reply:
        return self.ask(AskDigests(FORMAT_VERSION, 2))[0]

    def replay(self, first_sequence: int) -> list[Batch]:
        batches: list[Batch] = []
        for part in self.ask(AskReplay(FORMAT_VERSION, 3, first_sequence)):
            for payload in part.batches:  # type: ignore[union-attr]
                batch = decode_published(payload)
                assert isinstance(batch, Batch)
                batches.append(batch)
        return batches

    def contents(self, tier: str, buckets: bytes = b"", group: int = 0) -> list[Contents]:
        parts = self.ask(AskContents(FORMAT_VERSION, 4, group, tier, buckets))
        assert all(isinstance(part, Contents) for part in parts), parts
        return parts  # type: ignore[return-value]

    def events(self) -> Iterator[KVCEvent]:
        for batch in list(self.batches):
            yield from batch.events

    def replayed(self) -> Present:
        """What all batches of the incarnation add up to; they must all be kept."""
        present: Present = {}
        for batch in self.replay(0):
            for event in batch.events:
                apply(present, event)
        return held(present)

    def present(self) -> Present:
        """What all events that were heard add up to."""
        present: Present = {}
        for event in self.events():
            apply(present, event)
        return held(present)


def blocks_in(parts: list[Contents]) -> set[bytes]:
    facts: list[ObjectFact] = [fact for part in parts for fact in part.facts]
    return {block for fact in facts for block in blocks_of(fact.block_hashes)}


def settled(listener: Listener, manager: OpalKVCacheManager) -> None:
    wait_until(lambda: listener.present() == held(books_blocks(manager)), "the books")


def shuffle(manager: OpalKVCacheManager, world: World, generator: random.Random) -> None:
    """One step of a random workload with evictions, demotions, moves and resets."""
    if generator.random() < 0.02:
        manager.reset()
    family = generator.randrange(20) * 100
    length = generator.randrange(1, 8)
    request = start(manager, range(family, family + length), f"r{generator.random()}")
    job = manager.plan_store(
        request, full_blocks=length, tables=one_table(range(length)), include_tail=True
    )
    world.hand_over(job)
    world.hand_over(manager.plan_upkeep())
    world.work()
    results, world.results = world.results, []
    for result in results:
        manager.commit(result)
    manager.end_request(request)


def three_tiers() -> OpalKVCacheManager:
    return tiered_manager(
        memory_blocks=40,
        file_tier_bytes=[60 * ROW_BYTES, 90 * ROW_BYTES],
        writes=["demote", "through"],
        chunk_blocks=2,
    )
