"""Small stores on this machine for `opal demo --share --tier`, as a cluster would run one."""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.progress import Reporter
from opal_connector.cli.server_process import HOST, free_port, log_tail, terminable

_READY_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.1
_SEGMENT: Final = "512MiB"  # of every worker, for a store that is made of its users


@dataclass(frozen=True)
class DemoStore:
    """A store that runs: the tier over it, its settings, and what they need of the environment."""

    tier: str
    settings: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def running_store(kind: str, directory: Path, reporter: Reporter) -> Iterator[DemoStore]:
    """Runs a store of this kind, empty, for the length of a `with` block.

    However the block ends, the store ends too: Ctrl-C and SIGTERM included.

    Raises:
        CommandFailure: Its program is not installed, or does not start, or refuses what it needs.
    """
    plan = DEMO_STORES[kind].plan(directory)
    log_path = directory / f"{kind}.log"
    with terminable(), log_path.open("wb") as log:
        # Its own session: a Ctrl-C at the terminal reaches us only, and servers end before it.
        process = subprocess.Popen(
            plan.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with reporter.step(f"starting {DEMO_STORES[kind].what}", total=None):
                _wait_until_it_listens(process, plan, log_path)
                plan.prepare()
            yield plan.store
        finally:
            _stop(process)


@dataclass(frozen=True)
class _Plan:
    """How to start a store, by when it is ready, and what it then still needs."""

    command: Sequence[str]
    ports: Sequence[int]
    store: DemoStore
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class DemoStoreKind:
    """What people call a store, and how to plan one."""

    what: str
    plan: Callable[[Path], _Plan]


def _wait_until_it_listens(process: subprocess.Popen[bytes], plan: _Plan, log_path: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if all(map(_listens, plan.ports)):
            return
        time.sleep(_POLL_SECONDS)
    raise CommandFailure(
        f"{Path(plan.command[0]).name} did not start; the end of its log:\n{log_tail(log_path)}"
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    try:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


def _valkey(directory: Path) -> _Plan:
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        raise CommandFailure(
            "Neither valkey-server nor redis-server is installed: "
            "apt install redis-server, or scripts/setup-engines."
        )
    port = free_port()
    return _Plan(
        command=[
            program,
            *("--port", str(port), "--bind", HOST, "--dir", str(directory)),
            *("--save", "", "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"),
        ],
        ports=[port],
        store=DemoStore("Valkey", {"url": f"redis://{HOST}:{port}/0"}),
    )


def _object_store(directory: Path) -> _Plan:
    del directory
    if importlib.util.find_spec("moto") is None:
        raise CommandFailure(
            "The Python package 'moto', the store of this demo, is missing: "
            "pip install 'moto[server]'."
        )
    port = free_port()
    url = f"http://{HOST}:{port}"

    def prepare() -> None:
        import httpx

        try:
            httpx.put(f"{url}/opal-demo", timeout=30, trust_env=False).raise_for_status()
        except httpx.HTTPError as error:
            raise CommandFailure(f"The S3 server of this demo makes no bucket: {error}") from error

    options = {"aws_endpoint": url, "aws_region": "us-east-1", "aws_allow_http": "true"}
    return _Plan(
        command=[sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)],
        ports=[port],
        store=DemoStore(
            "ObjectStore",
            {"url": "s3://opal-demo/kv", "options": options},
            {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo"},
        ),
        prepare=prepare,
    )


def _mooncake(directory: Path) -> _Plan:
    del directory
    program = shutil.which("mooncake_master", path=_search_path())
    if program is None:
        raise CommandFailure(
            "mooncake_master is not installed: pip install 'opal-connector[mooncake]'."
        )
    port, metadata_port, metrics_port = free_port(), free_port(), free_port()
    return _Plan(
        command=[
            program,
            f"-rpc_port={port}",
            "-enable_http_metadata_server=true",
            f"-http_metadata_server_host={HOST}",
            f"-http_metadata_server_port={metadata_port}",
            f"-metrics_port={metrics_port}",
        ],
        ports=[port, metadata_port],
        store=DemoStore(
            "Mooncake",
            {
                "master": f"{HOST}:{port}",
                "metadata": f"http://{HOST}:{metadata_port}/metadata",
                "local_host": HOST,
                "segment_GB": _SEGMENT,
            },
        ),
    )


def _search_path() -> str:
    """The user's PATH, and where the programs of this Python's packages are."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


DEMO_STORES: Final = {
    "s3": DemoStoreKind("an S3 server", _object_store),
    "mooncake": DemoStoreKind("a Mooncake Store", _mooncake),
    "valkey": DemoStoreKind("a Valkey server", _valkey),
}
