"""Two real engines, a bad network and a killed engine: what was learned equals what is held."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from channel_proxy import ChannelProxy
from engine_process import BLOCK_TOKENS
from live_server import Server, kill_group, running_server

from opal_connector.cli.models import ensure_tiny_llama
from opal_connector.cli.server_process import free_port, opal_transfer_config
from opal_connector.events.channel import DigestsNow

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK_BYTES = 32 << 10  # of the tiny model
SHARED_BLOCKS = 60
PLAYERS = ("one", "two")
SETTLE_SECONDS = 40
VERIFY_SECONDS = 120


def configuration(name: str, root: Path, port: int) -> dict[str, Any]:
    """All tiers, all of them too small for the load."""
    extra = {
        "kvc_tiers": ["CPUMemory", "LocalNVMe", "DistributedFS"],
        "chunk_size": 2 * BLOCK_TOKENS,
        "instance_id": name,
        "events": {"endpoint": f"tcp://127.0.0.1:{port}"},
        "CPUMemory": {"capacity_GB": f"{24 * BLOCK_BYTES}B"},
        "LocalNVMe": {
            "path": str(root / f"disk-{name}"),
            "capacity_GB": f"{80 * BLOCK_BYTES}B",
            "admission": "always",
        },
        "DistributedFS": {
            "path": str(root / "shared"),
            "capacity_GB": f"{SHARED_BLOCKS * BLOCK_BYTES}B",
            "admission": "always",
            "refresh_seconds": 1.0,
        },
    }
    return opal_transfer_config(extra)


@contextlib.contextmanager
def engine(name: str, root: Path, port: int) -> Iterator[Server]:
    """A server whose device holds three prompts."""
    directory = root / f"server-{name}-{len(list(root.glob('server-*')))}"
    directory.mkdir()
    arguments = ["--model", str(ensure_tiny_llama()), "--max-model-len", "1024"]
    arguments += ["--num-gpu-blocks-override", "40"]
    transfer_config = configuration(name, root, port)
    with running_server(directory, *arguments, transfer_config=transfer_config) as server:
        yield server


def prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts of which many share their beginnings; tokens are printable bytes."""
    choose = random.Random(seed)
    heads = [[choose.randrange(32, 127) for _ in range(160)] for _ in range(4)]
    return [
        [*choose.choice(heads), *(choose.randrange(32, 127) for _ in range(choose.randrange(150)))]
        for _ in range(count)
    ]


def load(servers: list[Server], seed: int, count: int) -> None:
    """Requests from four clients, to all servers in turn."""
    jobs = [
        (servers[one % len(servers)], tokens) for one, tokens in enumerate(prompts(seed, count))
    ]
    with ThreadPoolExecutor(4) as clients:
        for answer in clients.map(lambda job: job[0].complete(job[1], max_tokens=4), jobs):
            assert answer["choices"]


@contextlib.contextmanager
def verifying(*endpoints: str) -> Iterator["subprocess.Popen[str]"]:
    """`opal kvbm verify`, which follows until it is interrupted."""
    command = [sys.executable, "-m", "opal_connector.cli.main", "kvbm", "verify", "--json"]
    command += ["--settle", str(SETTLE_SECONDS)]
    for endpoint in endpoints:
        command += ["--instance", endpoint]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def between(port: int, copies: Callable[[int], int]) -> ChannelProxy:
    """A network before the instance whose channel is at that port."""
    return ChannelProxy(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}", copies)


def wait_until_followed(*proxies: ChannelProxy) -> None:
    """Until whoever follows has begun to: it reconnects by itself, in its own time."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not all(proxy.answered[DigestsNow] for proxy in proxies):
        assert time.monotonic() < deadline, [proxy.answered for proxy in proxies]
        time.sleep(0.05)


def used_bytes(directory: Path) -> int:
    """What the objects under a directory take on the disk."""
    return sum(found.stat().st_blocks * 512 for found in directory.rglob("*") if found.is_file())


def some_lost_some_twice(sequence: int) -> int:
    """How often a batch arrives."""
    return (1, 1, 0, 1, 2, 1, 1)[sequence % 7]


def test_no_difference_after_evictions_lost_batches_and_a_killed_engine(tmp_path: Path) -> None:
    """Both engines, tier by tier and block by block; what was lost was seen and repaired."""
    first_port = free_port(2 * len(PLAYERS))
    ports = {name: first_port + 2 * number for number, name in enumerate(PLAYERS)}
    with contextlib.ExitStack() as stack:
        bad = stack.enter_context(between(ports["one"], some_lost_some_twice))
        good = stack.enter_context(between(ports["two"], lambda sequence: 1))
        watcher = stack.enter_context(verifying(bad.endpoint, good.endpoint))
        first = stack.enter_context(engine("one", tmp_path, ports["one"]))
        second = stack.enter_context(engine("two", tmp_path, ports["two"]))
        wait_until_followed(bad, good)
        load([first, second], seed=1, count=60)

        kill_group(second.process)
        load([first], seed=2, count=10)
        third = stack.enter_context(engine("two", tmp_path, ports["two"]))
        load([first, third], seed=3, count=40)

        for server in (first, third):
            for tier in ("CPUMemory", "LocalNVMe"):
                assert server.metrics().total("vllm:opal_evictions_total", tier=tier) > 0
        assert used_bytes(tmp_path / "shared") <= SHARED_BLOCKS * BLOCK_BYTES
        watcher.send_signal(signal.SIGINT)
        output, _ = watcher.communicate(timeout=VERIFY_SECONDS)

    report = json.loads(output)
    by_name = {one["instance_id"]: one for one in report["instances"]}
    metrics = {one["worker_ids"][0]: one["metrics"] for one in report["sources"]}
    assert report["not_compared"] == 0, report
    assert report["differences"] == 0, report
    assert watcher.returncode == 0
    assert set(by_name) == set(PLAYERS)
    for one in by_name.values():
        held = {place["tier"]: place["blocks"] for place in one["places"]}
        assert set(held) == {"Device", "CPUMemory", "LocalNVMe", "DistributedFS"}
        assert all(held.values()), held
    # What was lost came again as batches: events alone were enough, nothing had drifted. (What the
    # other one's persistent tiers lost while it was dead, only a comparison can tell.)
    assert metrics["one"]["digest_mismatches"] == 0
    assert bad.lost_batches > 0
    assert metrics["one"]["gaps"] > 0
    assert metrics["one"]["replayed_batches"] > 0
    assert metrics["one"]["duplicates"] > 0
    assert metrics["two"]["restarts"] == 1, metrics["two"]
