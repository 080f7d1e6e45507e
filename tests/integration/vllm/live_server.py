"""A real server: scheduler, worker and front end in processes of their own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from engine_process import BLOCK_TOKENS, Metrics
from prometheus_client.parser import text_string_to_metric_families

from opal_connector.cli.models import ensure_smollm2
from opal_connector.cli.server_process import free_port

START_SECONDS = 300.0
STOP_SECONDS = 30.0
_POLL_SECONDS = 0.1
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_LOG_STATS_INTERVAL": "1",
}


class Server:
    """One server and how to speak to it."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, log_path: Path) -> None:
        self.process = process
        self.log_path = log_path
        # Proxies of the environment are for other hosts than this one.
        self.http = httpx.Client(base_url=url, timeout=START_SECONDS, trust_env=False)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer to a POST, which must succeed."""
        response = self.http.post(path, json=body)
        assert response.is_success, response.text
        return response.json() if response.content else None

    def complete(self, prompt: "list[int] | str", **body: Any) -> dict[str, Any]:
        """A greedy completion, its token ids included."""
        answer: dict[str, Any] = self.post(
            "/v1/completions",
            {
                "model": "model",
                "prompt": prompt,
                "max_tokens": 8,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                **body,
            },
        )
        return answer

    def metrics(self) -> Metrics:
        """What /metrics say now."""
        text = self.http.get("/metrics").text
        return Metrics(
            [
                (sample.name, dict(sample.labels), float(sample.value))
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            ]
        )

    def reset_device(self, *, external: bool = False) -> None:
        """Empty the device's prefix cache, once no store holds a block of it any more."""
        deadline = time.monotonic() + START_SECONDS
        path = f"/reset_prefix_cache?reset_external={str(external).lower()}"
        while not self.post(path)["success"]:
            assert time.monotonic() < deadline, "blocks are held for ever"
            time.sleep(_POLL_SECONDS)

    def log_text(self) -> str:
        """All that the server's processes have written."""
        return self.log_path.read_text(errors="replace")

    def wait_for_log(self, text: str, seconds: float = 60.0) -> None:
        """Until the log has that text."""
        deadline = time.monotonic() + seconds
        while text not in self.log_text():
            assert time.monotonic() < deadline, f"the log has no {text!r}"
            time.sleep(_POLL_SECONDS)

    def stop(self) -> int:
        """Ask the server to end, as a service manager does; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)


def start_server(
    directory: Path, *arguments: str, transfer_config: Mapping[str, Any] | None
) -> Server:
    """Start a server of the model with four layers, and do not wait for it."""
    port = free_port()
    log_path = directory / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(ensure_smollm2(layers=4)), "--served-model-name", "model"]
    command += ["--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--enforce-eager"]
    command += ["--max-model-len", "2048", "--max-num-seqs", "8", "--enable-prompt-tokens-details"]
    if transfer_config is not None:
        command += ["--kv-transfer-config", json.dumps(transfer_config)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, *arguments],
            env={**os.environ, **_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(process, f"http://127.0.0.1:{port}", log_path)


@contextlib.contextmanager
def running_server(
    directory: Path, *arguments: str, transfer_config: Mapping[str, Any] | None
) -> Iterator[Server]:
    """A healthy server for the length of a `with` block."""
    server = start_server(directory, *arguments, transfer_config=transfer_config)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        server.http.close()
        kill_group(server.process)


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of the server's own process group, which its pid names."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def group_lives(process: "subprocess.Popen[bytes]") -> bool:
    """Whether any process of the server still runs."""
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.log_text()[-6000:]
        with contextlib.suppress(httpx.HTTPError):
            if server.http.get("/health", timeout=5).is_success:
                return
        time.sleep(_POLL_SECONDS)
    raise AssertionError(f"not healthy in time\n{server.log_text()[-6000:]}")
