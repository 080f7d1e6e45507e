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
import re
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from common import (
    at_least,
    at_most,
    emit,
    machine_facts,
    note,
    parser,
    percentile,
    session_seconds,
)
from fast_engine import KINDS, requests_for, running_engines
from router_processes import running_opal_router

CONCURRENCIES = (1, 16, 64)
BUSY = 0.85  # of a core: then a process is at its end
_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"(?i)content-length: (\d+)")


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
                before = session_seconds(frozenset((pid,)))
                through.append(await arm(router, requests, concurrency, seconds))
                cpu += session_seconds(frozenset((pid,))) - before
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
    arguments = options.parse_args()
    with (
        running_engines(arguments.prompt_tokens) as engines,
        tempfile.TemporaryDirectory(prefix="opal-benchmark-") as name,
    ):
        places = [{key: place[key] for key in ("url", "events")} for place in engines.places]
        config = {"port": 0, "policy": arguments.policy, "instances": places}
        with running_opal_router(config, Path(name) / "router.log") as router:
            figures = uvloop.run(measure(places, router.url, router.pid, arguments))
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
