"""The event channel of an instance when something is wrong: with it, or with who uses it."""

import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import make_manager, store
from publisher_world import (
    BooksSource,
    Listener,
    blocks_in,
    books_blocks,
    open_channel,
    settled,
    shuffle,
    three_tiers,
    wait_until,
)
from tier_world import World

from opal_connector.cluster.publisher import ChannelSettings, Publisher
from opal_connector.config import Endpoint
from opal_connector.events import Insert, KVCEvent, ObjectFact
from opal_connector.events.channel import (
    FORMAT_VERSION,
    AskContents,
    AskReplay,
    Batch,
    Description,
    DigestsNow,
    Refused,
    SystemEvent,
    decode_published,
    decode_reply,
    encode_message,
)
from opal_connector.events.digests import BucketDigests
from opal_connector.managers import OpalKVCacheManager

TIER = "CPUMemory"


@pytest.mark.parametrize(
    "payload",
    [b"", b"nonsense", b"\xc1" * 100, bytes(60_000), encode_message(Refused(1, 1, "x"))],
    ids=["empty", "text", "invalid", "zeros", "a reply"],
)
def test_a_malformed_question_is_refused_and_harms_nobody(
    channels: list[Publisher], payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    channels.append(open_channel(make_manager(rows=8)))
    with Listener(channels[0]) as listener:
        listener.send(payload)
        assert isinstance(listener.receive(), Refused)
        assert isinstance(listener.description(), Description)


def test_wrong_frames_and_monstrous_messages_harm_nobody(channels: list[Publisher]) -> None:
    channels.append(open_channel(make_manager(rows=8)))
    with Listener(channels[0]) as listener:
        wrong = listener.dealer()
        wrong.send_multipart([b"x"])
        wrong.send_multipart([b"", b"", b"", b""])
        listener.dealer().send_multipart([b"", bytes(1 << 20)])
        assert isinstance(listener.description(), Description)


def test_a_question_about_an_unknown_tier_or_group_is_refused(channels: list[Publisher]) -> None:
    channels.append(open_channel(make_manager(rows=8)))
    with Listener(channels[0]) as listener:
        for group, tier in ((0, "Tape"), (1, TIER), (0, "Device")):
            (answer,) = listener.ask(AskContents(FORMAT_VERSION, 9, group, tier))
            assert isinstance(answer, Refused)
            assert answer.request_id == 9
            assert tier in answer.reason


def test_another_format_version_is_refused(channels: list[Publisher]) -> None:
    channels.append(open_channel(make_manager(rows=8)))
    with Listener(channels[0]) as listener:
        (answer,) = listener.ask(AskReplay(FORMAT_VERSION + 1, 1, 0))
        assert isinstance(answer, Refused)
        assert "version" in answer.reason


def test_a_flood_of_questions_is_refused_beyond_a_bound_and_shuts_nobody_out(
    channels: list[Publisher],
) -> None:
    manager = make_manager(rows=4_000, chunk_blocks=1)
    channels.append(open_channel(manager))
    store(manager, range(4_000))
    with Listener(channels[0]) as listener:
        flood = listener.dealer()
        for number in range(500):
            question = AskContents(FORMAT_VERSION, number, 0, TIER)
            flood.send_multipart([b"", encode_message(question)])
        most = 0
        ended: set[str] = set()
        while ended < {"Contents", "Refused"}:
            assert flood.poll(20_000), f"only {ended}"
            most = max(most, len(channels[0]._answers))
            answer = decode_reply(flood.recv_multipart()[1])
            ended.add(type(answer).__name__)
        assert most <= 64
        wait_until(lambda: isinstance(listener.description(), Description), "a description")


def test_whoever_leaves_in_the_middle_of_an_answer_harms_nobody(
    channels: list[Publisher],
) -> None:
    manager = make_manager(rows=20_000, chunk_blocks=1)
    channels.append(open_channel(manager))
    store(manager, range(20_000))
    with Listener(channels[0]) as listener:
        for _ in range(5):
            leaver = listener.dealer()
            leaver.send_multipart([b"", encode_message(AskContents(FORMAT_VERSION, 1, 0, TIER))])
            assert leaver.poll(20_000)
            leaver.close(linger=0)
        assert blocks_in(listener.contents(TIER)) == books_blocks(manager)[0, TIER]


_SUBSCRIBER = """
import sys, zmq
subscriber = zmq.Context().socket(zmq.SUB)
subscriber.setsockopt(zmq.RCVHWM, 1)
subscriber.setsockopt(zmq.RCVBUF, 4096)
subscriber.setsockopt(zmq.SUBSCRIBE, b"")
subscriber.connect(sys.argv[1])
subscriber.recv_multipart()
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "never reads"])
def test_a_subscriber_that_does_not_read_costs_the_books_nothing_and_little_memory(
    channels: list[Publisher], is_stopped: bool
) -> None:
    """200 MiB of events; what may wait for one subscriber is bounded far below."""
    manager = make_manager(rows=64)
    channels.append(open_channel(manager, replay_bytes=1 << 20, coalesce_seconds=0.002))
    publisher = channels[0]
    assert publisher.publish_endpoint is not None
    log = manager.storage.log
    log.enabled = False
    event = Insert(ObjectFact(0, bytes(32), bytes(range(32)) * 1_024), TIER)
    command = [sys.executable, "-c", _SUBSCRIBER, publisher.publish_endpoint.announced]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as deaf:
        assert deaf.stdout is not None
        assert deaf.stdout.readline() == b"connected\n"
        if is_stopped:
            deaf.send_signal(signal.SIGSTOP)
        before = _resident_bytes()
        slowest_seconds = 0.0
        for _ in range(64):
            began = time.thread_time()
            for _ in range(100):
                log.append(event)
            slowest_seconds = max(slowest_seconds, (time.thread_time() - began) / 100)
            wait_until(lambda: not publisher._inbox, "the publisher")
        assert _resident_bytes() - before < 130 << 20
        assert slowest_seconds < 20e-6
        deaf.send_signal(signal.SIGCONT)
        deaf.kill()
    with Listener(publisher) as listener:
        assert listener.beats[-1].sequence >= 640


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_an_inbox_that_overflows_begins_a_new_incarnation_with_the_books_digests(
    channels: list[Publisher], caplog: pytest.LogCaptureFixture
) -> None:
    manager = three_tiers()
    source = _Stalled(manager)
    channels.append(open_channel(manager, source=source, inbox_events=1_000))
    world, generator = World(), random.Random(8)
    with Listener(channels[0]) as listener:
        first = listener.beats[0].incarnation
        source.stall()
        for _ in range(600):
            shuffle(manager, world, generator)
        source.go_on.set()
        wait_until(lambda: listener.beats[-1].incarnation > first, "another incarnation")
        for _ in range(50):
            shuffle(manager, world, generator)
        state: Any = None

        def is_right() -> bool:
            nonlocal state
            beat = listener.beats[-1]
            present = books_blocks(manager)
            state = {digest.tier: digest.buckets for digest in beat.digests}
            return all(
                state.get(tier) == _buckets(present.get((0, tier), set()))
                for tier in ("memory", "near", "far")
            )

        wait_until(is_right, "the digests of the books")
        second = listener.beats[-1].incarnation
        assert all(
            batch.sequence == number
            for number, batch in enumerate(
                batch for batch in listener.batches if batch.incarnation == second
            )
        )
    assert "begins anew" in caplog.text


def _buckets(blocks: set[bytes]) -> bytes:
    digests = BucketDigests()
    digests.flip_all(list(blocks))
    return digests.buckets()


class _Stalled(BooksSource):
    """Makes the publisher wait in its next heartbeat."""

    def __init__(self, manager: OpalKVCacheManager) -> None:
        super().__init__(manager)
        self.go_on = threading.Event()
        self.go_on.set()
        self.is_waiting = threading.Event()

    def stall(self) -> None:
        self.go_on.clear()
        assert self.is_waiting.wait(10)

    def system(self) -> SystemEvent:
        if not self.go_on.is_set():
            self.is_waiting.set()
            assert self.go_on.wait(20)
        return self.load


def test_events_while_a_new_incarnation_lists_the_books_are_counted_once(
    channels: list[Publisher],
) -> None:
    """The listing and the events that follow may say the same."""
    manager = make_manager(rows=200)
    source = _SlowListing(manager)
    channels.append(open_channel(manager, source=source, inbox_events=400))
    with Listener(channels[0]) as listener:
        source.stall()
        for number in range(400):
            store(manager, [number * 10, number * 10 + 1])
        source.during = lambda: [store(manager, [9_000 + number]) for number in range(30)]
        first = listener.beats[0].incarnation
        source.go_on.set()
        wait_until(lambda: listener.beats[-1].incarnation > first, "another incarnation")
        digest = listener.digests()
        assert isinstance(digest, DigestsNow)
        blocks = books_blocks(manager)[0, TIER]
        wait_until(lambda: listener.beats[-1].digests[0].buckets == _buckets(blocks))
        assert listener.beats[-1].digests[0].block_count == len(blocks)


class _SlowListing(_Stalled):
    """Whose books change right after they were listed."""

    during: Any = None

    def list_facts(self, group: int, tier: str) -> Iterator[ObjectFact]:
        facts = list(super().list_facts(group, tier))
        if self.during is not None:
            during, self.during = self.during, None
            during()
        return iter(facts)


@pytest.mark.parametrize("inbox_events", [1 << 20, 8], ids=["all is kept", "the inbox overflows"])
def test_a_port_in_use_is_waited_for_and_then_all_that_is_held_is_known(
    channels: list[Publisher], caplog: pytest.LogCaptureFixture, inbox_events: int
) -> None:
    """A predecessor that is not quite gone must not leave the channel off for ever."""
    manager = make_manager(rows=64)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = Endpoint("127.0.0.1", taken.getsockname()[1])
        settings = ChannelSettings(
            endpoint=endpoint, publish_endpoint=Endpoint("127.0.0.1", 0), inbox_events=inbox_events
        )
        channels.append(Publisher(settings, BooksSource(manager)))
        manager.storage.log.listener = channels[0].hear
        channels[0].start()
        for number in range(20):
            store(manager, range(100 * number, 100 * number + 4))
        wait_until(lambda: f"off until tcp://127.0.0.1:{endpoint.port}" in caplog.text)
        assert channels[0].publish_endpoint is None
    wait_until(lambda: channels[0].publish_endpoint, "the channel to open")
    with Listener(channels[0]) as listener:
        blocks = books_blocks(manager)[0, TIER]
        assert len(blocks) == 64
        wait_until(lambda: listener.beats[-1].digests, "fingerprints")
        assert blocks_in(listener.contents(TIER)) == blocks
        assert listener.beats[-1].digests[0].buckets == _buckets(blocks)


def test_a_channel_whose_port_stays_in_use_ends_when_it_is_closed(
    channels: list[Publisher], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's end must not wait for an address."""
    manager = make_manager(rows=64)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = Endpoint("127.0.0.1", taken.getsockname()[1])
        publisher = Publisher(ChannelSettings(endpoint=endpoint), BooksSource(manager))
        publisher.start()
        wait_until(lambda: "off until" in caplog.text)
        publisher.close()
        assert not publisher.is_alive


def test_closing_publishes_what_is_left_and_ends_soon(channels: list[Publisher]) -> None:
    manager = make_manager(rows=64)
    publisher = open_channel(manager, coalesce_seconds=30.0)
    with Listener(publisher) as listener:
        store(manager, range(4))
        began = time.monotonic()
        publisher.close()
        assert time.monotonic() - began < 2
        assert not publisher.is_alive
        assert manager.storage.log.listener is None
        wait_until(lambda: listener.batches, "the last events")
        settled(listener, manager)


def test_a_fault_of_the_source_ends_neither_the_thread_nor_the_answers(
    channels: list[Publisher], caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(rows=64)
    source = BooksSource(manager)
    channels.append(open_channel(manager, source=source))
    with Listener(channels[0]) as listener:
        store(manager, range(4))
        settled(listener, manager)
        whole, source.list_facts = source.list_facts, _fault  # type: ignore[method-assign]
        (answer,) = listener.ask(AskContents(FORMAT_VERSION, 3, 0, TIER))
        assert isinstance(answer, Refused)
        source.list_facts = whole  # type: ignore[method-assign]
        assert blocks_in(listener.contents(TIER)) == books_blocks(manager)[0, TIER]
    assert "could not be answered" in caplog.text


def _fault(group: int, tier: str) -> Iterator[ObjectFact]:
    raise OSError("the disk is on fire")


def test_the_channel_waits_for_a_description_that_is_not_final_yet(
    channels: list[Publisher],
) -> None:
    manager = make_manager(rows=64)
    source = BooksSource(manager)
    source.is_ready = False
    publisher = Publisher(
        ChannelSettings(endpoint=Endpoint("127.0.0.1", 0), heartbeat_seconds=0.05),
        source,
        detach=lambda: None,
    )
    channels.append(publisher)
    manager.storage.log.listener = publisher.hear
    publisher.start()
    store(manager, range(4))
    assert publisher.endpoint is None
    source.is_ready = True
    wait_until(lambda: publisher.publish_endpoint, "the channel to open")
    with Listener(publisher) as listener:
        assert blocks_in(listener.contents(TIER)) == books_blocks(manager)[0, TIER]
        assert [type(batch) for batch in listener.replay(0)] == [Batch]
        assert decode_published(encode_message(listener.beats[-1])) == listener.beats[-1]


class _ChangeInProgress(_Stalled):
    """Its listing shows a change that is not said yet; who passes the lock has waited for that."""

    books: OpalKVCacheManager
    unsaid: list[KVCEvent]
    has_changed = False
    is_listed = False

    def list_facts(self, group: int, tier: str) -> Iterator[ObjectFact]:
        if not self.has_changed:
            self.has_changed = True
            log = self.books.storage.log
            said, log.listener = log.listener, self.unsaid.append
            store(self.books, [9_000, 9_001])
            log.listener = said
        facts = list(super().list_facts(group, tier))
        self.is_listed = True
        return iter(facts)

    def pass_lock(self) -> None:
        if self.is_listed:
            self.say()

    def say(self) -> None:
        while self.unsaid and self.books.storage.log.listener is not None:
            self.books.storage.log.listener(self.unsaid.pop(0))

    def system(self) -> SystemEvent:
        self.say()
        return super().system()


def test_a_change_that_a_listing_shows_before_it_is_said_is_counted_once(
    channels: list[Publisher],
) -> None:
    """Else the fingerprint of the new incarnation would be wrong for ever."""
    manager = make_manager(rows=900)
    source = _ChangeInProgress(manager)
    source.books, source.unsaid = manager, []
    channels.append(open_channel(manager, source=source, inbox_events=400))
    with Listener(channels[0]) as listener:
        source.stall()
        for number in range(400):
            store(manager, [number * 10, number * 10 + 1])
        first = listener.beats[0].incarnation
        source.go_on.set()
        wait_until(lambda: listener.beats[-1].incarnation > first, "another incarnation")
        settled = len(listener.beats) + 3
        wait_until(lambda: len(listener.beats) >= settled, "some heartbeats")

        assert listener.beats[-1].digests[0].buckets == _buckets(books_blocks(manager)[0, TIER])
