"""`opal serve` with real engines: served, one killed and back with what is hot, and all ended."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from serve_world import descendants, lives

from opal_connector.cli.models import ensure_tiny_llama

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
PATIENCE_SECONDS = 240.0
NAMES = {"engine-1", "engine-2"}
SYSTEM = "You are a careful assistant who thinks before every word. " * 12
COMMAND = [sys.executable, "-c", "from opal_connector.cli.main import main; main()", "serve"]


def until(condition: Callable[[], object], what: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited in vain for {what}\n{log.read_text()[-6000:]}")
        time.sleep(0.2)


class Cluster:
    """`opal serve` and how to speak to it."""

    def __init__(self, process: "subprocess.Popen[str]", url: str, log: Path) -> None:
        self.process = process
        self.log = log
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, trust_env=False)

    def ask(self, text: str, policy: str = "RoundRobin", **more: Any) -> tuple[str, str]:
        """Who answered a completion, and what."""
        body = {"prompt": SYSTEM + text, "max_tokens": 8, "temperature": 0, **more}
        answer = self.http.post("/v1/completions", json=body, headers={"X-Opal-Policy": policy})
        assert answer.status_code == 200, answer.text
        return answer.headers["X-Opal-Worker"], answer.json()["choices"][0]["text"]

    def taking(self) -> set[str]:
        instances = self.http.get("/admin/instances").json()["instances"]
        return {one["name"] for one in instances if one["takes_requests"]}

    def shared_blocks(self) -> int:
        workers = self.http.get("/admin/state").json()["workers"]
        return max(one["blocks"].get("0/DistributedFS", 0) for one in workers.values())

    def figure(self, name: str, **labels: str) -> float:
        return _sum(self.http.get("/metrics").text, name, labels)

    def hits(self, name: str, tier: str) -> float:
        """Tokens that an engine has loaded from a tier, as itself says."""
        url = re.findall(rf"{name} is started at (\S+)", self.log.read_text())[-1]
        text = httpx.get(f"{url}/metrics", trust_env=False).text
        return _sum(text, "vllm:opal_hit_tokens_total", {"tier": tier})

    def pid(self, name: str) -> int:
        """The process that an instance was started as last."""
        found = re.findall(rf"{name} is started at \S+ \(process (\d+)\)", self.log.read_text())
        return int(found[-1])


def _sum(text: str, name: str, labels: dict[str, str]) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@contextlib.contextmanager
def served(directory: Path) -> Iterator[Cluster]:
    """The example from configs/, with a smaller model and its directories elsewhere."""
    given = yaml.safe_load((ROOT / "configs" / "two-instances.yaml").read_text())
    given["model"] = str(ensure_tiny_llama())
    given["tiers"]["LocalNVMe"]["path"] = str(directory / "{name}")
    given["tiers"]["DistributedFS"]["path"] = str(directory / "shared")
    given["router"]["port"] = 0
    given["prewarm"] = {"seconds": 60}  # the machine is small, and the first load is the engine's
    given["vllm"] |= {"max-model-len": 2048, "served-model-name": "tiny-llama"}
    path, log = directory / "cluster.yaml", directory / "log"
    path.write_text(yaml.safe_dump(given))
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*COMMAND, "--config", str(path)], stdout=subprocess.PIPE, stderr=stream, text=True
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[2].rstrip(";")
        cluster = Cluster(process, url, log)
        try:
            yield cluster
        finally:
            cluster.http.close()
    finally:
        process.kill()
        process.wait()


def test_a_cluster_of_real_engines_lives_through_a_death(tmp_path: Path) -> None:
    """One file brings it up, a killed engine costs nobody an answer and comes back warm."""
    with served(tmp_path) as cluster:
        log = cluster.log
        assert cluster.http.get("/health").status_code == 200
        until(lambda: cluster.taking() == NAMES, "both engines", log)
        answers = [cluster.ask(f"Question {number % 2}?") for number in range(4)]
        assert {worker for worker, _ in answers} == NAMES
        until(lambda: cluster.shared_blocks() >= 16, "what was computed in the shared tier", log)

        _kill_with_requests_under_way(cluster, tmp_path / "engine-1")
        until(lambda: cluster.taking() == NAMES, "the engine's return", log)
        assert cluster.figure("opal_serve_restarts_total", instance="engine-1") == 1
        assert cluster.figure("opal_serve_restarts_total", instance="engine-2") == 0
        assert cluster.figure("opal_serve_prewarm_total", what="prefixes") >= 1
        assert cluster.figure("opal_serve_prewarm_total", what="tokens") >= 512
        assert cluster.hits("engine-1", "DistributedFS") >= 512
        again = [cluster.ask(f"Question {number % 2}?") for number in range(4)]
        assert {worker for worker, _ in again} == NAMES
        assert [text for _, text in again] == [text for _, text in answers]

        left = descendants(cluster.process.pid)
        assert len(left) >= 5
        began = time.monotonic()
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.process.wait(30) == 0
        assert time.monotonic() - began < 15
        until(lambda: not any(map(lives, left)), "the end of all processes", log)


def _kill_with_requests_under_way(cluster: Cluster, directory: Path) -> None:
    """Some of the requests are at the engine that dies, and none of them fails.

    Eight clients ask one long question after another until it is dead, however fast the engines
    are. Its own directory goes with it, so that it has the shared one only when it comes back.
    """
    pid = cluster.pid("engine-1")
    dead = threading.Event()

    def ask_until_dead(number: int) -> str:
        while True:
            worker, _ = cluster.ask(f"A long one {number}", max_tokens=1500, ignore_eos=True)
            if dead.is_set():
                return worker

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask_until_dead, number) for number in range(8)]
        try:
            until(
                lambda: cluster.figure("opal_router_in_flight", instance="engine-1") >= 3,
                "requests at both engines",
                cluster.log,
            )
            os.kill(pid, signal.SIGKILL)
            until(lambda: not lives(pid), "its end", cluster.log)
            until(lambda: cluster.taking() == {"engine-2"}, "the router to see it", cluster.log)
            shutil.rmtree(directory)  # before it is started again
        finally:
            dead.set()
        workers = [one.result(PATIENCE_SECONDS) for one in asked]
    assert workers.count("engine-2") >= 7
    assert cluster.figure("opal_router_retries_total") >= 1
