"""The parent's end of an engine in a child process, and the models that the tests serve.

Children are forked from a helper process that has imported vLLM once, so that an engine with a
cut model starts in a few seconds.
"""

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import engine_child

from opal_connector.cli.models import ensure_smollm2

BLOCK_TOKENS = 32
START_SECONDS = 240.0
CALL_SECONDS = 300.0
STOP_SECONDS = 30.0  # workers of several ranks take some
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

Answer = dict[str, Any]
Request = dict[str, Any]


class EngineError(Exception):
    """A call failed in the child; the message is its traceback."""


class EngineProcess:
    """Calls into one child. `engine.generate(...)` is `EngineCalls.generate` over there."""

    def __init__(self, process: BaseProcess, calls: Connection, log_path: Path) -> None:
        self._process = process
        self._calls = calls
        self.log_path = log_path

    def call(self, name: str, **arguments: Any) -> Any:
        """One call and its answer."""
        self._calls.send((name, arguments))
        return self.receive(CALL_SECONDS)

    def receive(self, seconds: float) -> Any:
        """The next answer.

        Raises:
            EngineError: The call raised, the child died or took too long.
        """
        try:
            if not self._calls.poll(seconds):
                raise EngineError(f"no answer within {seconds} s\n{self._log_tail()}")
            is_answer, answer = self._calls.recv()
        except (EOFError, ConnectionError):
            raise EngineError(f"the engine's process ended\n{self._log_tail()}") from None
        if not is_answer:
            raise EngineError(str(answer))
        return answer

    def generate(self, requests: list[Request], **arguments: Any) -> list[Answer]:
        """Serve requests at once and come to rest."""
        answers: list[Answer] = self.call("generate", requests=requests, **arguments)
        return answers

    def ask(self, tokens: list[int], **request: Any) -> Answer:
        """Serve one request and come to rest. `sampling` and `salt` may be given."""
        return self.generate([{"tokens": tokens, **request}])[0]

    def reset_device(self) -> None:
        """Empty the device's prefix cache, so that what hits now comes from a tier."""
        self.call("reset_device")

    def books(self) -> dict[str, Any]:
        """The audited books."""
        books: dict[str, Any] = self.call("books")
        return books

    def metrics(self) -> "Metrics":
        """The Prometheus samples as they are now."""
        return Metrics(self.call("metrics"))

    def log_text(self) -> str:
        """What the engine has written to its standard output and error."""
        return self.log_path.read_text(errors="replace")

    def kill(self) -> None:
        """End the process with SIGKILL, as a crash would."""
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        """Let the engine shut down; kill the process if it does not."""
        with contextlib.suppress(OSError, EngineError):
            self._calls.send(None)
            self.receive(STOP_SECONDS)
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._calls.close()

    def _log_tail(self) -> str:
        return self.log_text()[-4000:]


class Metrics:
    """Samples of a Prometheus exposition."""

    def __init__(self, samples: list[engine_child.Sample]) -> None:
        self._samples = samples

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        return sum(
            value
            for sample, found, value in self._samples
            if sample == name and labels.items() <= found.items()
        )

    def names(self) -> set[str]:
        """The names of all samples."""
        return {sample for sample, _, _ in self._samples}

    def labels_of(self, name: str, label: str) -> set[str]:
        """The values of one label that a metric has samples for."""
        return {found[label] for sample, found, _ in self._samples if sample == name}


def opal(extra: Mapping[str, Any] | None = None, **transfer: Any) -> dict[str, Any]:
    """A `kv_transfer_config` with Opal, its own settings and what else vLLM has there."""
    return {
        "kv_connector": "OpalConnector",
        "kv_connector_module_path": "opal_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"CPUMemory": {"capacity_GB": "256MiB"}, **(extra or {})},
        **transfer,
    }


def engine_settings(model: Path | None = None, **settings: Any) -> dict[str, Any]:
    """Arguments of `LLM` that all tests share, and those of one test."""
    return {
        "model": str(model or ensure_smollm2(layers=4)),
        "dtype": "float32",
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "disable_log_stats": False,
        **settings,
    }


@contextlib.contextmanager
def running_engine(**settings: Any) -> Iterator[EngineProcess]:
    """An engine for the length of a `with` block; see `engine_settings` for the arguments."""
    arguments = engine_settings(**settings)
    context = _fork_context()
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="opal-engine-") as directory:
        log_path = Path(directory) / "engine.log"
        log_path.touch()
        has_ranks = arguments.get("tensor_parallel_size", 1) > 1
        process = context.Process(
            target=engine_child.run,
            args=(theirs, str(log_path), arguments),
            daemon=not has_ranks,  # a daemon may not have the workers of ranks as children
        )
        process.start()
        theirs.close()
        engine = EngineProcess(process, ours, log_path)
        try:
            engine.receive(START_SECONDS)
            yield engine
        finally:
            engine.stop()


def _fork_context() -> multiprocessing.context.ForkServerContext:
    """A context whose helper process has imported vLLM, with the children's environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(engine_child.heavy_modules()))
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context
