"""How much one feed takes in from sockets: an instance's channel and an engine's own stream.

Another process publishes prepared batches as fast as the socket takes them; the time runs until the
feed has applied the last one, so reading, decoding, (for the engine's stream) hashing and the index
count. What a socket dropped meanwhile is replayed, and that counts, too.
"""

import asyncio
import multiprocessing
import time
from hashlib import sha256
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import zmq
from common import Figures, OtherLoad, emit, machine_facts, note, parser, percentile

from opal_connector.cluster.ingest import KVBMFeed, NativeSource, Source, VllmSource
from opal_connector.cluster.kvbm import KVBM
from opal_connector.events import DEVICE_TIER, Insert, KVCEvent, ObjectFact
from opal_connector.events.channel import (
    FORMAT_VERSION,
    AskDescription,
    AskReplay,
    Batch,
    Description,
    DigestsNow,
    InstanceDescription,
    Question,
    Replay,
    Reply,
    decode_question,
    encode_message,
)
from opal_connector.keys import CHAIN_ROOT

BLOCK_TOKENS = 16
Shape = tuple[int, int, int]  # batches, events in a batch, blocks in an event
# A step of an engine that decodes, and one that prefills.
SHAPES: dict[str, Shape] = {"small batches": (20_000, 8, 2), "large batches": (500, 64, 64)}
_pack = msgspec.msgpack.Encoder().encode


def native_payload(sequence: int, events: int, blocks: int) -> bytes:
    """Blocks stored, as an instance says it."""
    made: list[KVCEvent] = []
    for place in range(events):
        name = b"%d/%d" % (sequence, place)
        run = b"".join(sha256(name + bytes([block])).digest() for block in range(blocks))
        made.append(Insert(ObjectFact(0, CHAIN_ROOT, run), DEVICE_TIER))
    return encode_message(
        Batch(FORMAT_VERSION, "one", "m", 1, sequence, 0.0, BLOCK_TOKENS, tuple(made))
    )


def engine_payload(sequence: int, events: int, blocks: int) -> bytes:
    """Blocks stored, as vLLM says it."""
    made = []
    for place in range(events):
        first = (sequence * events + place) * blocks
        made.append(
            {
                "type": "BlockStored",
                "block_hashes": list(range(first + 1, first + blocks + 1)),
                "parent_block_hash": None,
                "token_ids": [first + token for token in range(blocks * BLOCK_TOKENS)],
                "block_size": BLOCK_TOKENS,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
        )
    return _pack([0.0, made, 0])


class Publisher:
    """What the other process runs: sockets of an instance, or of an engine.

    Mutable state: how many batches were published.
    """

    def __init__(self, *, is_native: bool, shape: Shape) -> None:
        batches, events, blocks = shape
        make = native_payload if is_native else engine_payload
        self.is_native = is_native
        self.payloads = [make(sequence, events, blocks) for sequence in range(batches)]
        self.sent = 0
        self.context = zmq.Context()
        self.ask = self.context.socket(zmq.ROUTER)
        self.stream = self.context.socket(zmq.PUB)
        for socket in (self.ask, self.stream):
            socket.setsockopt(zmq.SNDHWM, 0)
        self.ports = [
            socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self.ask, self.stream)
        ]

    def publish(self) -> None:
        for sequence, payload in enumerate(self.payloads):
            topic = [b"opal1"] if self.is_native else [b"", sequence.to_bytes(8, "big")]
            self.stream.send_multipart([*topic, payload])
        self.sent = len(self.payloads)

    def answer(self) -> None:
        client, empty, payload = self.ask.recv_multipart()
        if self.is_native:
            reply = self._reply(decode_question(payload))
            self.ask.send_multipart([client, empty, encode_message(reply)])
            return
        for sequence in range(int.from_bytes(payload, "big"), self.sent):
            number = sequence.to_bytes(8, "big")
            self.ask.send_multipart([client, empty, b"", number, self.payloads[sequence]])
        end = (-1).to_bytes(8, "big", signed=True)
        self.ask.send_multipart([client, empty, b"", end, b""])

    def _reply(self, question: Question) -> Reply:
        request_id, last = question.request_id, self.sent - 1
        if isinstance(question, AskDescription):
            instance = InstanceDescription(
                instance_id="one", incarnation=1, model="m", block_tokens=BLOCK_TOKENS
            )
            endpoint = f"tcp://127.0.0.1:{self.ports[1]}"
            return Description(FORMAT_VERSION, request_id, instance, endpoint, 60.0, 0, last)
        if isinstance(question, AskReplay):
            kept = self.payloads[question.first_sequence : self.sent][:64]
            return Replay(FORMAT_VERSION, request_id, 1, tuple(kept), is_last=True)
        return DigestsNow(FORMAT_VERSION, request_id, 1, last, ())


def serve(is_native: bool, shape: Shape, pipe: Connection) -> None:
    """The other process: publishes when it is told so, answers until it is told to end."""
    publisher = Publisher(is_native=is_native, shape=shape)
    pipe.send(publisher.ports)
    while True:
        if pipe.poll(0.001):
            if pipe.recv() == "end":
                break
            publisher.publish()
        while publisher.ask.poll(1):
            publisher.answer()
    publisher.context.destroy(linger=0)


async def follow(source: Source, batches: int, pipe: Connection) -> tuple[float, int]:
    """Seconds until all was applied, and how many batches came by a replay."""
    async with KVBMFeed(KVBM()) as feed:
        feed.add(source)
        (status,) = feed.statuses()
        while not feed.statuses()[0].is_settled:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # for the subscription to reach the publisher
        began = time.perf_counter()
        pipe.send("go")
        while feed.statuses()[0].applied != batches - 1:
            await asyncio.sleep(0.002)
        seconds = time.perf_counter() - began
        replayed = status.metrics.replayed_batches
    return seconds, replayed


def measure(*, is_native: bool, shape: Shape, repetitions: int) -> Figures:
    """Medians over fresh feeds and publishers."""
    batches, events, blocks = shape
    spawning = multiprocessing.get_context("spawn")
    seconds: list[float] = []
    replayed = 0
    for _ in range(repetitions):
        ours, theirs = spawning.Pipe()
        process = spawning.Process(target=serve, args=(is_native, shape, theirs))
        process.start()
        ask, stream = (f"tcp://127.0.0.1:{port}" for port in ours.recv())
        source: Source = NativeSource(ask)
        if not is_native:
            source = VllmSource(worker="v", endpoint=stream, replay_endpoint=ask)
        taken, came_again = asyncio.run(follow(source, batches, ours))
        seconds.append(taken)
        replayed += came_again
        ours.send("end")
        process.join()
    median = percentile(seconds, 50)
    return {
        "batches_per_second": batches / median,
        "events_per_second": batches * events / median,
        "blocks_per_second": batches * events * blocks / median,
        "replayed_part": replayed / (batches * repetitions),
    }


def main() -> None:
    arguments = parser(__doc__).parse_args()
    facts = machine_facts()
    load = OtherLoad()
    figures: dict[str, Any] = {}
    for kind, is_native in (("native", True), ("engine", False)):
        figures[kind] = {}
        for name, (batches, events, blocks) in SHAPES.items():
            note(f"{kind}: {name}")
            shape = (batches // 10 if arguments.quick else batches, events, blocks)
            figures[kind][name] = measure(
                is_native=is_native, shape=shape, repetitions=1 if arguments.quick else 5
            )
    figures["other_load_cores"] = load.cores()
    emit(arguments, facts=facts, statistic="medians", figures=figures, bars={})


if __name__ == "__main__":
    main()
