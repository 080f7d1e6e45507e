"""The stores of the demo: a missing program is one sentence, and none outlives its block."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from opal_connector.cli import demo_stores
from opal_connector.cli.demo_stores import DEMO_STORES, DemoStore, DemoStoreKind, running_store
from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.progress import Reporter
from opal_connector.cli.server_process import free_port
from opal_connector.config import load_config

PATIENCE_SECONDS = 30.0
# Writes its number where the test finds it, then listens, and hears no SIGTERM if it is told so.
SCRIPT = """
import os, pathlib, signal, socket, sys, time
port, path, kind = sys.argv[1:]
if kind == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(path).write_text(str(os.getpid()))
if kind == "ends":
    sys.exit("no licence")
listener = socket.create_server(("127.0.0.1", int(port))) if kind != "deaf" else None
time.sleep(600)
"""


class Scripted:
    """A kind of store that is a script; knows the process that it became."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "pid"
        self.prepare: Callable[[], None] = lambda: None
        self.behaviour = "well"

    def plan(self, directory: Path) -> "demo_stores._Plan":
        del directory
        port = free_port()
        return demo_stores._Plan(
            command=[sys.executable, "-c", SCRIPT, str(port), str(self._path), self.behaviour],
            ports=[port],
            store=DemoStore("Valkey", {}),
            prepare=self.prepare,
        )

    @property
    def is_alive(self) -> bool:
        try:
            os.kill(int(self._path.read_text()), 0)
        except ProcessLookupError:
            return False
        return True


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    made = Scripted(tmp_path)
    monkeypatch.setitem(DEMO_STORES, "script", DemoStoreKind("a script", made.plan))
    monkeypatch.setattr(demo_stores, "_STOP_SECONDS", 0.5)
    return made


@pytest.mark.parametrize("behaviour", ["well", "stubborn"])
@pytest.mark.parametrize("end", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_the_store_ends_with_its_block(
    tmp_path: Path, scripted: Scripted, end: type[BaseException] | None, behaviour: str
) -> None:
    """However that ends, and also a store that does not want to."""
    scripted.behaviour = behaviour
    with (
        contextlib.suppress(*([end] if end else [])),
        running_store("script", tmp_path, Reporter()),
    ):
        assert scripted.is_alive
        if end is not None:
            raise end
    assert not scripted.is_alive


@pytest.mark.parametrize("when", ["starting", "prepared", "running"])
def test_a_terminated_command_leaves_no_store(
    tmp_path: Path, scripted: Scripted, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM at any moment unwinds the stack as Ctrl-C does."""

    def terminate() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(PATIENCE_SECONDS)

    if when == "starting":
        scripted.behaviour = "deaf"

        def listens(_port: int) -> bool:
            path = tmp_path / "pid"
            if path.exists() and path.read_text():
                terminate()
            return False

        monkeypatch.setattr(demo_stores, "_listens", listens)
    elif when == "prepared":
        scripted.prepare = terminate
    with pytest.raises(KeyboardInterrupt), running_store("script", tmp_path, Reporter()):
        terminate()
    assert not scripted.is_alive


@pytest.mark.parametrize("behaviour", ["ends", "deaf"])
def test_a_store_that_does_not_start_is_told_with_its_log(
    tmp_path: Path, scripted: Scripted, behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is no process any more."""
    scripted.behaviour = behaviour
    monkeypatch.setattr(demo_stores, "_READY_SECONDS", 20.0 if behaviour == "ends" else 2.0)
    with (
        pytest.raises(CommandFailure, match="did not start; the end of its log:") as caught,
        running_store("script", tmp_path, Reporter()),
    ):
        pytest.fail("it did not start")
    if behaviour == "ends":
        assert "no licence" in str(caught.value)
    assert not scripted.is_alive


def test_a_store_that_cannot_be_prepared_is_ended(tmp_path: Path, scripted: Scripted) -> None:
    """The failure is told, not hidden."""

    def refuse() -> None:
        raise CommandFailure("no bucket")

    scripted.prepare = refuse
    with (
        pytest.raises(CommandFailure, match="no bucket"),
        running_store("script", tmp_path, Reporter()),
    ):
        pytest.fail("it is not prepared")
    assert not scripted.is_alive


def test_a_bucket_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    """Whether nobody listens there or the server refuses."""
    plan = DEMO_STORES["s3"].plan(tmp_path)
    with pytest.raises(CommandFailure, match="makes no bucket: ") as caught:
        plan.prepare()
    assert "\n" not in str(caught.value)
    listener = socket.create_server(("127.0.0.1", plan.ports[0]))

    def refuse() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    thread = threading.Thread(target=refuse)
    thread.start()
    with listener, pytest.raises(CommandFailure, match="500"):
        plan.prepare()
    thread.join(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("valkey", "apt install redis-server"),
        ("s3", "pip install 'moto[server]'"),
        ("mooncake", "pip install 'opal-connector[mooncake]'"),
    ],
)
def test_a_missing_program_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str
) -> None:
    """It says how to install it; nothing is started."""
    monkeypatch.setattr(demo_stores.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(demo_stores.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(CommandFailure) as caught, running_store(kind, tmp_path, Reporter()):
        pytest.fail("there is no such program")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", DEMO_STORES)
def test_a_plan_has_settings_that_the_tier_takes(tmp_path: Path, kind: str) -> None:
    """Loaded as the engine loads them; every plan has ports of its own."""
    try:
        plans = [DEMO_STORES[kind].plan(tmp_path) for _ in range(2)]
    except CommandFailure as failure:
        pytest.skip(str(failure))
    for plan in plans:
        store = plan.store
        config = load_config({"kvc_tiers": ["CPUMemory", store.tier], store.tier: store.settings})
        assert config.kvc_tiers == ("CPUMemory", store.tier)
    assert not set(plans[0].ports) & set(plans[1].ports)


@pytest.mark.parametrize("kind", ["valkey", "s3"])
def test_a_real_store_runs_and_ends(tmp_path: Path, kind: str) -> None:
    """It answers where its settings say, and nobody does afterwards."""
    with running_store(kind, tmp_path, Reporter()) as store:
        if kind == "valkey":
            port = int(store.settings["url"].rpartition(":")[2].partition("/")[0])
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as valkey:
                valkey.sendall(b"PING\r\n")
                assert valkey.recv(100) == b"+PONG\r\n"
        else:
            endpoint = store.settings["options"]["aws_endpoint"]
            port = int(endpoint.rpartition(":")[2])
            found = httpx.get(f"{endpoint}/opal-demo", timeout=PATIENCE_SECONDS, trust_env=False)
            assert found.is_success
    deadline = time.monotonic() + PATIENCE_SECONDS
    while demo_stores._listens(port):
        assert time.monotonic() < deadline, "somebody still listens"
