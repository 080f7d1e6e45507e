"""What `opal bench` itself costs: processor time a request and a token, and what it adds to TTFT.

An engine without a model, in a process of its own, pauses, sends tokens one by one, and writes into
its answer how long it really took to the first one. What the client measured beyond that is the
client's, the kernel's and the connection's. At once and without pauses, the most requests a second
that one client can measure are found.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import uvloop
from common import at_least, at_most, emit, machine_facts, note, parser, percentile

from opal_connector.cli.bench import BenchResult, ExponentialReqRate
from opal_connector.cli.bench.client import Target
from opal_connector.cli.bench.driver import run

PAUSE_SECONDS: Final = 0.02
GAP_SECONDS: Final = 0.01
TOKENS: Final = 32
PROMPT_TOKENS: Final = 1024
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_PACED: Final = b'"seed":50'


class Engine(asyncio.Protocol):
    """Answers completions; one request at a time on a connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.got = bytearray()

    def data_received(self, data: bytes) -> None:
        self.got += data
        head = self.got.find(b"\r\n\r\n")
        if head < 0:
            return
        fields = bytes(self.got[:head]).lower().split(b"content-length:")
        size = int(fields[1].split(b"\r\n")[0]) if len(fields) > 1 else 0
        if len(self.got) < head + 4 + size:
            return
        body = bytes(self.got[head + 4 :])
        self.got.clear()
        if not size:
            self.transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        elif _PACED in body:
            asyncio.ensure_future(self.pace(json.loads(body)["max_tokens"]))  # noqa: RUF006
        else:
            self.transport.write(_HEAD + piece("0 ") + last(1))

    async def pace(self, tokens: int) -> None:
        began = time.perf_counter()
        await asyncio.sleep(PAUSE_SECONDS)
        waited = time.perf_counter() - began
        self.transport.write(_HEAD + piece(f"{waited:.6f} "))
        for _ in range(tokens - 1):
            await asyncio.sleep(GAP_SECONDS)
            self.transport.write(piece("word "))
        self.transport.write(last(tokens))


def chunk(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


def piece(text: str) -> bytes:
    event = {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": text}]}
    return chunk(b"data: " + json.dumps(event).encode() + b"\n\n")


def last(tokens: int) -> bytes:
    usage = {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    event = json.dumps({"choices": [], "usage": usage}).encode()
    return chunk(b"data: " + event + b"\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


@contextlib.contextmanager
def running_engine() -> Iterator[str]:
    """Its address, for the length of a `with` block."""
    command = [sys.executable, __file__, "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait(10)


async def arm(
    url: str, count: int, *, rate: float, at_once: int, tokens: int, is_paced: bool
) -> BenchResult:
    workload = ExponentialReqRate(
        request_rate=rate,
        total_requests=count,
        prompt_size_min=PROMPT_TOKENS,
        prompt_size_max=PROMPT_TOKENS,
        default_prefix_length=PROMPT_TOKENS // 2,
        output_tokens_min=tokens,
        output_tokens_max=tokens,
        max_outstanding_requests=at_once,
    )
    extra = {"seed": 50} if is_paced else {}
    result = await run(workload, Target(url=url, model="none", extra_body=extra))
    assert len(result.successes) == count, result.requests[0].error_detail
    return result


async def measure(url: str, is_quick: bool) -> dict[str, Any]:
    count = 500 if is_quick else 3_000
    figures: dict[str, Any] = {}
    everything = float("inf")
    await arm(url, 200, rate=everything, at_once=8, tokens=1, is_paced=False)  # warm
    for at_once in (1, 64):
        found = await arm(url, count, rate=everything, at_once=at_once, tokens=1, is_paced=False)
        figures[f"requests_per_second_{at_once}"] = count / found.duration_seconds
        figures[f"cpu_us_per_request_{at_once}"] = 1e6 * found.client_cpu_seconds / count
        figures[f"client_cores_{at_once}"] = found.client_cpu_seconds / found.duration_seconds
        note(f"at once, {at_once}: {figures}")
    for rate in (10, 50):
        paced = max(100, (5 if is_quick else 20) * rate)
        found = await arm(url, paced, rate=rate, at_once=256, tokens=TOKENS, is_paced=True)
        figures |= _paced(found, rate, figures["cpu_us_per_request_1"])
        note(f"paced, {rate}/s: {figures}")
    return {name: round(value, 4) for name, value in figures.items()}


def _paced(found: BenchResult, rate: int, request_us: float) -> dict[str, float]:
    """The client's own share, at a rate."""
    added = [
        (one.ttft_seconds or 0.0) - float(one.output_text.split()[0]) for one in found.requests
    ]
    late = [one.sent_seconds - one.due_seconds for one in found.requests]
    gaps = [gap for one in found.requests for gap in one.inter_token_seconds]
    spent_us = 1e6 * found.client_cpu_seconds / len(found.requests)
    return {
        f"added_ttft_p50_ms_at_{rate}": 1e3 * percentile(added, 50),
        f"added_ttft_p99_ms_at_{rate}": 1e3 * percentile(added, 99),
        f"sent_late_p99_ms_at_{rate}": 1e3 * percentile(late, 99),
        f"itl_p50_ms_at_{rate}": 1e3 * percentile(gaps, 50),
        f"cpu_us_per_token_at_{rate}": (spent_us - request_us) / TOKENS,
        f"client_cores_at_{rate}": found.client_cpu_seconds / found.duration_seconds,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve:
        uvloop.run(serve())
        return
    with running_engine() as url:
        figures = uvloop.run(measure(url, arguments.quick))
    emit(
        arguments,
        facts=machine_facts(),
        statistic="percentiles over all requests of an arm",
        figures=figures,
        bars={
            "added TTFT p50, ms": at_most(figures["added_ttft_p50_ms_at_50"], 2),
            "requests/s": at_least(figures["requests_per_second_64"], 500),
        },
    )


if __name__ == "__main__":
    main()
