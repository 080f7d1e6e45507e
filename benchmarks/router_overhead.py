"""What a router adds to a request: latency and requests per second, through it and without it.

Two fast engines without a model run in a process of their own and announce the blocks of all
prompts, so that every request is hashed, matched and placed. The same client, in a third process,
asks an engine directly and through the router, in turns. It says when it is the bottleneck itself,
and how much processor time the router takes for a request, which does not depend on that.

`whole` and `stream` engines answer at once: at more than one connection that measures requests per
second, and latency is the queue in front of whoever is at its end. `paced` ones take 50 ms, as if
they computed: there the added latency is what a user would see.
"""

import asyncio
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httptools
import uvloop
from common import at_least, at_most, emit, machine_facts, note, parser, percentile

from opal_connector.cluster.publisher import ChannelSettings, Publisher
from opal_connector.config import Endpoint
from opal_connector.events import DEVICE_TIER, Insert, ObjectFact
from opal_connector.events.channel import InstanceDescription, SystemEvent
from opal_connector.keys import CHAIN_ROOT, RequestIdentity, TokenChain

CONCURRENCIES = (1, 16, 64)
PROMPTS = 256
BLOCK_TOKENS = 16
ANSWER = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "choices": [{"index": 0, "text": "word " * 60, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 512, "prompt_tokens_details": {"cached_tokens": 496}},
    }
).encode()
CHUNK = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"word "}]}\n\n'
CHUNKS = 16
PACE_SECONDS = 0.05
KINDS = ("whole", "stream", "paced")
BUSY = 0.85  # of a core: then a process is at its end
_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"(?i)content-length: (\d+)")


def prompt(number: int, tokens: int) -> list[int]:
    return [(number * 7_919 + place) % 50_000 for place in range(tokens)]


# ---- the engines ----


class FastEngine(asyncio.Protocol):
    """Answers everything at once."""

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
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nServer: fast\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
        )


class Source:
    """An instance that holds the blocks of all prompts."""

    is_ready = True
    model = "fast"
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


async def run_engines(tokens: int) -> None:
    """Two of them; each has every other prompt. Prints where they are."""
    loop = asyncio.get_running_loop()
    places = []
    for number in range(2):
        server = await loop.create_server(FastEngine, "127.0.0.1", 0)
        facts = []
        for which in range(number, PROMPTS, 2):
            chain = TokenChain(RequestIdentity(), BLOCK_TOKENS)
            chain.extend(prompt(which, tokens))
            facts.append(ObjectFact(0, CHAIN_ROOT, b"".join(chain.hashes)))
        settings = ChannelSettings(endpoint=Endpoint("127.0.0.1", 0), instance_id=f"fast{number}")
        publisher = Publisher(settings, Source(facts))
        for fact in facts:
            publisher.hear(Insert(fact, DEVICE_TIER))
        publisher.start()
        while publisher.publish_endpoint is None or publisher.endpoint is None:
            await asyncio.sleep(0.01)
        port = server.sockets[0].getsockname()[1]
        places.append({"url": f"http://127.0.0.1:{port}", "events": publisher.endpoint.announced})
    sys.stdout.write(json.dumps(places) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


# ---- the client ----


class Client(asyncio.Protocol):
    """One connection that asks again as soon as it is answered, until told to stop."""

    def __init__(self, requests: list[bytes], offset: int, result: "Result") -> None:
        self.requests = requests
        self.number = offset
        self.result = result
        self.got = bytearray()
        self.is_first = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.ask()

    def ask(self) -> None:
        self.number = (self.number + 1) % len(self.requests)
        self.got.clear()
        self.is_first = True
        self.began = time.perf_counter()
        self.transport.write(self.requests[self.number])

    def data_received(self, data: bytes) -> None:
        self.got += data
        if self.is_first:
            self.is_first = False
            self.first = time.perf_counter() - self.began
        if not self.is_whole():
            return
        if not self.got.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(bytes(self.got[:200]))
        self.result.see(time.perf_counter() - self.began, self.first)
        if self.result.is_over:
            self.transport.close()
        else:
            self.ask()

    def is_whole(self) -> bool:
        head = self.got.find(_HEAD_END)
        if head < 0:
            return False
        length = _LENGTH.search(self.got, 0, head)
        if length is None:
            return self.got.endswith(b"0\r\n\r\n")
        return len(self.got) >= head + len(_HEAD_END) + int(length[1])

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self.result.closed()


class Result:
    """What came of one arm."""

    def __init__(self, connections: int) -> None:
        self.seconds: list[float] = []
        self.first: list[float] = []
        self.is_over = False
        self.left = connections
        self.done = asyncio.get_running_loop().create_future()

    def see(self, seconds: float, first: float) -> None:
        self.seconds.append(seconds)
        self.first.append(first)

    def closed(self) -> None:
        self.left -= 1
        if not self.left and not self.done.done():
            self.done.set_result(None)


async def arm(url: str, requests: list[bytes], concurrency: int, seconds: float) -> dict[str, Any]:
    """Ask at one concurrency for a while."""
    host, port = url.removeprefix("http://").split(":")
    result = Result(concurrency)
    loop = asyncio.get_running_loop()
    used = _own_cpu()
    began = time.perf_counter()
    for number in range(concurrency):
        offset = number * 17
        await loop.create_connection(lambda o=offset: Client(requests, o, result), host, int(port))
    await asyncio.sleep(seconds)
    result.is_over = True
    await asyncio.wait_for(result.done, 30)
    wall = time.perf_counter() - began
    return {
        "seconds": result.seconds,
        "first": result.first,
        "wall": wall,
        "client_cpu": _own_cpu() - used,
    }


def _own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def requests_for(tokens: int, kind: str) -> list[bytes]:
    made = []
    more = {"stream": {"stream": True}, "paced": {"seed": 50}}.get(kind, {})
    for number in range(PROMPTS):
        fields = {"model": "fast", "prompt": prompt(number, tokens), "max_tokens": 60}
        body = json.dumps(fields | more, separators=(",", ":"))
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            f"User-Agent: bench\r\nAccept: */*\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        made.append((head + body).encode())
    return made


# ---- all of it ----


async def measure(
    places: list[dict[str, str]], router: str, pid: int, arguments: Any
) -> dict[str, Any]:
    seconds = 1.0 if arguments.quick else 3.0
    rounds = 1 if arguments.quick else 3
    figures: dict[str, Any] = {}
    for kind in KINDS:
        requests = requests_for(arguments.prompt_tokens, kind)
        for url in (places[0]["url"], router):
            await arm(url, requests, 8, 1.0)  # warm
        for concurrency in CONCURRENCIES:
            direct, through, cpu = [], [], 0.0
            for _ in range(rounds):
                direct.append(await arm(places[0]["url"], requests, concurrency, seconds))
                before = _cpu_of(pid)
                through.append(await arm(router, requests, concurrency, seconds))
                cpu += _cpu_of(pid) - before
            figures[f"{kind}_{concurrency}"] = _summary(direct, through, cpu)
            note(f"{kind} {concurrency}: {figures[f'{kind}_{concurrency}']}")
    return figures


def _summary(direct: list[Any], through: list[Any], cpu: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, arms in (("direct", direct), ("router", through)):
        latencies = [value for one in arms for value in one["seconds"]]
        first = [value for one in arms for value in one["first"]]
        wall = sum(one["wall"] for one in arms)
        found[f"{name}_p50_ms"] = 1e3 * percentile(latencies, 50)
        found[f"{name}_p99_ms"] = 1e3 * percentile(latencies, 99)
        found[f"{name}_first_byte_p50_ms"] = 1e3 * percentile(first, 50)
        found[f"{name}_requests_per_second"] = len(latencies) / wall
        found[f"{name}_client_cores"] = sum(one["client_cpu"] for one in arms) / wall
        if name == "router":
            found["router_cores"] = cpu / wall
            found["router_cpu_us_per_request"] = 1e6 * cpu / len(latencies)
    for percent in ("p50", "p99"):
        found[f"added_{percent}_ms"] = found[f"router_{percent}_ms"] - found[f"direct_{percent}_ms"]
    found["client_is_bottleneck"] = found["router_client_cores"] > BUSY
    found["router_is_bottleneck"] = found["router_cores"] > BUSY
    return {
        name: value if isinstance(value, bool) else round(value, 4) for name, value in found.items()
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompt-tokens", type=int, default=512)
    options.add_argument("--policy", default="Balanced")
    options.add_argument("--engines", action="store_true", help="be the engines (for itself)")
    arguments = options.parse_args()
    if arguments.engines:
        uvloop.run(run_engines(arguments.prompt_tokens))
        return
    command = [
        sys.executable,
        __file__,
        "--engines",
        "--prompt-tokens",
        str(arguments.prompt_tokens),
    ]
    engines = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    router: subprocess.Popen[str] | None = None
    try:
        assert engines.stdout is not None
        places = json.loads(engines.stdout.readline())
        with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
            json.dump({"port": 0, "policy": arguments.policy, "instances": places}, config)
            config.flush()
            command = [sys.executable, "-m", "opal_connector.cli.main", "router"]
            router = subprocess.Popen(
                [*command, "--config", config.name], stdout=subprocess.PIPE, text=True
            )
            assert router.stdout is not None
            url = router.stdout.readline().split()[2]
            figures = uvloop.run(measure(places, url, router.pid, arguments))
    finally:
        for process in (engines, router):
            if process is not None:
                process.terminate()
                process.wait(10)
    emit(
        arguments,
        facts=machine_facts(),
        statistic="percentiles over all requests of 3 rounds, direct and through in turns",
        figures=figures,
        bars={
            "added_p50_ms_at_1": at_most(figures["whole_1"]["added_p50_ms"], 2.0),
            "added_p50_ms_paced_at_16": at_most(figures["paced_16"]["added_p50_ms"], 2.0),
            "added_p50_ms_paced_at_64": at_most(figures["paced_64"]["added_p50_ms"], 2.0),
            "requests_per_second_at_64": at_least(
                figures["whole_64"]["router_requests_per_second"], 1_000
            ),
        },
    )


if __name__ == "__main__":
    main()
