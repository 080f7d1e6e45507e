"""The two routers, each started in its own environment and asked what it credits a prompt with."""

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine import BLOCK_TOKENS, DEVICE_BLOCKS, MODEL_NAME, Engine, complete
from vllm_router_process import DEADLINE_SECONDS, POLL_SECONDS, VllmRouterProcess, running

HOST_CREDIT: Final = 0.8  # vllm-router's defaults, of a token that would be computed
DISK_CREDIT: Final = 0.3
SHARED_CREDIT: Final = 0.6
_CREDITED: Final = re.compile(r"credited_prefix_tokens=(\d+)")
_HERE: Final = Path(__file__).parent


class Dynamo:
    """A SelectionService in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def credit(self, tokens: Sequence[int]) -> dict[str, Any]:
        """What it credits the engine with, by tier."""
        return self._say(list(tokens))

    def await_device(self, tokens: Sequence[int]) -> None:
        """Until the device is credited with a prompt that has just been computed."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not self.credit(tokens)["device_blocks"]:
            if time.monotonic() > deadline:
                raise TimeoutError("Dynamo's SelectionService has not taken in the events")
            time.sleep(POLL_SECONDS)

    def _say(self, message: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@contextlib.contextmanager
def running_dynamo(binaries: Path, engine: Engine, log_path: Path) -> Iterator[Dynamo]:
    """A service that follows the engine's events from now on, and asks for the earlier ones."""
    worker = {
        "worker_id": 1,
        "model_name": MODEL_NAME,
        "endpoint": engine.url,
        "block_size": BLOCK_TOKENS,
        "events": engine.events,
        "replay_endpoint": engine.replay,
        "data_parallel_size": 1,
        "total_kv_blocks": DEVICE_BLOCKS,
        "max_num_batched_tokens": 2048,
    }
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [str(binaries / "python"), str(_HERE / "dynamo_selector.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "DYN_LOG": "warn"},
        )
    with process:
        try:
            service = Dynamo(process)
            service._say(worker)
            yield service
        finally:
            process.kill()


@dataclass(frozen=True)
class VllmRouter:
    """A `vllm-router` with the policy kv_aware, whose log has its decisions."""

    process: VllmRouterProcess

    def credit(self, tokens: Sequence[int]) -> tuple[int, dict[str, Any]]:
        """Sends the prompt through it: the tokens it credits, and the engine's answer."""
        before = len(_CREDITED.findall(self.process.log_text()))
        answer = complete(self.process.url, tokens)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(found := _CREDITED.findall(self.process.log_text())) <= before:
            if time.monotonic() > deadline:
                raise TimeoutError("vllm-router wrote no decision")
            time.sleep(POLL_SECONDS)
        return int(found[-1]), answer

    def await_sequence(self, sequence: int) -> None:
        """Until it has taken in the batch of that number."""
        pattern = re.compile(rf"sequence advanced .*seq={sequence}\b")
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not pattern.search(self.process.log_text()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"vllm-router has not taken in batch {sequence}")
            time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def running_vllm_router(binaries: Path, engine: Engine, log_path: Path) -> Iterator[VllmRouter]:
    """A router before the engine, which is healthy when this begins."""
    options = ["--worker-urls", engine.url, "--policy", "kv_aware", "--log-level", "debug"]
    options += ["--kv-event-source", f"{engine.url}={engine.events}"]
    options += ["--kv-event-replay-source", f"{engine.url}={engine.replay}"]
    options += ["--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", MODEL_NAME]
    options += ["--kv-penalty-host", str(HOST_CREDIT), "--kv-penalty-disk", str(DISK_CREDIT)]
    options += ["--kv-penalty-external", str(SHARED_CREDIT)]
    environment = {"VLLM_ROUTER_TOKENIZER": str(engine.model)}
    with running(binaries, options, log_path, environment) as process:
        yield VllmRouter(process)
