"""Engines without a model for the benchmarks of routers: two, in a process of their own.

They answer at once, or after a pause as if they computed, and announce the blocks of all prompts,
so that a router hashes, matches and places every request: in Opal's channel from the start, and in
vLLM's own stream when they are told to, after a router that has no memory has joined it.
"""

import argparse
import asyncio
import contextlib
import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import httptools
import msgspec
import uvloop
import zmq

from opal_connector.cluster.publisher import ChannelSettings, Publisher
from opal_connector.config import Endpoint
from opal_connector.events import DEVICE_TIER, Insert, ObjectFact
from opal_connector.events.channel import InstanceDescription, SystemEvent
from opal_connector.keys import CHAIN_ROOT, RequestIdentity, TokenChain

MODEL: Final = "fast"
PROMPTS: Final = 256
BLOCK_TOKENS: Final = 16
PACE_SECONDS: Final = 0.05
KINDS: Final = ("whole", "stream", "paced")
ANSWER: Final = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "choices": [{"index": 0, "text": "word " * 60, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 512, "prompt_tokens_details": {"cached_tokens": 496}},
    }
).encode()
CHUNK: Final = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"word "}]}\n\n'
CHUNKS: Final = 16
_ANNOUNCE: Final = "announce"


def prompt(number: int, tokens: int) -> list[int]:
    """Token ids; no two prompts share a block."""
    return [(number * 7_919 + place) % 50_000 for place in range(tokens)]


def requests_for(tokens: int, kind: str) -> list[bytes]:
    """Requests of one kind, as they go over the wire."""
    made = []
    more = {"stream": {"stream": True}, "paced": {"seed": 50}}.get(kind, {})
    for number in range(PROMPTS):
        fields = {"model": MODEL, "prompt": prompt(number, tokens), "max_tokens": 60}
        body = json.dumps(fields | more, separators=(",", ":"))
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            f"User-Agent: bench\r\nAccept: */*\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        made.append((head + body).encode())
    return made


class FastEngine(asyncio.Protocol):
    """Answers everything."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.parser = httptools.HttpRequestParser(self)
        self.body = b""

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        body, self.body = self.body, b""
        if b'"seed":50' in body:
            asyncio.get_running_loop().call_later(PACE_SECONDS, self.answer)
            return
        if b'"stream":true' not in body:
            self.answer()
            return
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nServer: fast\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(CHUNKS):
            self.transport.write(b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK))
        self.transport.write(b"0\r\n\r\n")

    def answer(self) -> None:
        if self.transport.is_closing():
            return  # the client went while the engine paused
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nServer: fast\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
        )


class Source:
    """An instance that holds the blocks of its prompts."""

    is_ready = True
    model = MODEL
    block_tokens = BLOCK_TOKENS
    places = ((0, DEVICE_TIER),)

    def __init__(self, facts: list[ObjectFact]) -> None:
        self._facts = facts

    def describe(self, instance_id: str, incarnation: int) -> InstanceDescription:
        return InstanceDescription(
            instance_id=instance_id,
            incarnation=incarnation,
            model=self.model,
            block_tokens=BLOCK_TOKENS,
        )

    def system(self) -> SystemEvent:
        return SystemEvent(prefill_tokens_per_second=10_000.0)

    def is_complete(self, tier: str) -> bool:  # noqa: ARG002
        return True

    def list_facts(self, group: int, tier: str) -> Iterator[ObjectFact]:  # noqa: ARG002
        return iter(self._facts)


class VllmStream:
    """vLLM's own KV events of the same blocks. Mutable state: the batches' number."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self._prompts = prompts
        self._sequence = 0
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"

    def announce(self) -> None:
        """Every prompt's blocks, a batch for each."""
        for which, tokens in enumerate(self._prompts):
            hashes = [which << 32 | place for place in range(1, len(tokens) // BLOCK_TOKENS + 1)]
            event = {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": None,
                "token_ids": tokens[: len(hashes) * BLOCK_TOKENS],
                "block_size": BLOCK_TOKENS,
                "lora_id": None,
                "medium": "GPU",
            }
            payload = msgspec.msgpack.encode([time.time(), [event], 0])
            self._socket.send_multipart([b"", struct.pack(">Q", self._sequence), payload])
            self._sequence += 1


async def _engine(number: int, tokens: int) -> tuple[dict[str, str], VllmStream, Publisher]:
    """One that has every other prompt: where it is, and both of its streams."""
    server = await asyncio.get_running_loop().create_server(FastEngine, "127.0.0.1", 0)
    prompts = [prompt(which, tokens) for which in range(number, PROMPTS, 2)]
    facts = []
    for one in prompts:
        chain = TokenChain(RequestIdentity(), BLOCK_TOKENS)
        chain.extend(one)
        facts.append(ObjectFact(0, CHAIN_ROOT, b"".join(chain.hashes)))
    settings = ChannelSettings(endpoint=Endpoint("127.0.0.1", 0), instance_id=f"fast{number}")
    publisher = Publisher(settings, Source(facts))
    for fact in facts:
        publisher.hear(Insert(fact, DEVICE_TIER))
    publisher.start()
    while publisher.publish_endpoint is None or publisher.endpoint is None:
        await asyncio.sleep(0.01)
    stream = VllmStream(prompts)
    place = {
        "url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",
        "events": publisher.endpoint.announced,
        "vllm_events": stream.endpoint,
    }
    return place, stream, publisher


async def run_engines(tokens: int) -> None:
    """Two of them; each has every other prompt. Prints where they are."""
    engines = [await _engine(number, tokens) for number in range(2)]

    def told() -> None:
        if sys.stdin.readline().strip() == _ANNOUNCE:
            for _, stream, _ in engines:
                stream.announce()

    asyncio.get_running_loop().add_reader(sys.stdin, told)
    sys.stdout.write(json.dumps([place for place, _, _ in engines]) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


class Engines:
    """The two engines of another process: `places` says where they and their streams are."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self._process = process
        self.pid = process.pid
        self.places: list[dict[str, str]] = json.loads(process.stdout.readline())

    def announce(self) -> None:
        """Has all blocks published in vLLM's streams, to whom listens now."""
        assert self._process.stdin is not None
        self._process.stdin.write(_ANNOUNCE + "\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def running_engines(tokens: int) -> Iterator[Engines]:
    """Both, for the length of a `with` block, in a session of their own."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--prompt-tokens", str(tokens)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Engines(process)
    finally:
        process.kill()
        process.wait(10)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--prompt-tokens", type=int, required=True)
    uvloop.run(run_engines(options.parse_args().prompt_tokens))
