"""`opal kvbm` where names, addresses, servers and outputs are not what one expects."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner
from fakes import make_manager, store
from publisher_world import open_channel

from opal_connector.cli.errors import CommandError
from opal_connector.cli.kvbm_following import Following
from opal_connector.cli.main import opal
from opal_connector.cluster.ingest import VllmSource
from opal_connector.cluster.publisher import Publisher
from opal_connector.config import Endpoint

has_ipv6 = socket.has_ipv6


def address(publisher: Publisher) -> str:
    assert publisher.endpoint is not None
    return publisher.endpoint.announced


@contextmanager
def serving(**settings: object) -> Iterator[Publisher]:
    books = make_manager(rows=64)
    publisher = open_channel(books, **settings)
    store(books, range(6))
    try:
        yield publisher
    finally:
        publisher.close()


def output(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(opal, ["kvbm", *arguments])
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result.output


@pytest.mark.skipif(not has_ipv6, reason="this machine has no IPv6")
def test_verify_asks_an_instance_at_an_ipv6_address() -> None:
    with serving(endpoint=Endpoint("[::1]", 0)) as publisher:
        text = output("verify", "--instance", address(publisher), "--seconds", "0", "--json")
        assert json.loads(text)["ok"]


@pytest.mark.parametrize("name", ["[/x]", "[bold]", "[fe80::1]:5601"])
def test_names_in_brackets_are_shown_as_they_are(name: str) -> None:
    with serving(instance_id=name) as publisher:
        for command in (["watch", "--once"], ["dump"], ["match", "--tokens", "1"]):
            text = output(*command, "--instance", address(publisher))
            assert name in text or command[0] == "match"
        text = output("verify", "--instance", address(publisher), "--seconds", "0")
        assert name in text


def test_server_that_speaks_something_else_is_said_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1)
                connection.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL" + b"\0" * 40 + b"\n")

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        text = output("dump", "--vllm-url", url, exit_code=1)
        thread.join(10)
    assert url in text
    assert "Traceback" not in text


@pytest.mark.parametrize("url", ["http://[::1", "http://host:port", "http://:80"])
def test_url_that_is_none_is_said_in_one_sentence(url: str) -> None:
    result = CliRunner().invoke(opal, ["kvbm", "dump", "--vllm-url", url])
    assert result.exit_code in {1, 2}
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert url in result.output


def test_source_that_is_followed_twice_is_named_as_it_was_given() -> None:
    """An engine's own server may name the same engine as an option does."""
    source = VllmSource(worker="MyEngine", endpoint="tcp://127.0.0.1:9")

    async def twice() -> None:
        following = Following()
        following.add(source)
        try:
            following.add(source)
        finally:
            await following.close()

    with pytest.raises(CommandError, match=r"^Source 'MyEngine' is followed already"):
        asyncio.run(twice())


def test_output_that_nobody_reads_any_more_ends_quietly() -> None:
    """As `opal kvbm watch --json | head -1` ends."""
    with (
        serving() as publisher,
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "opal_connector.cli.main",
                "kvbm",
                "watch",
                "--json",
                "--instance",
                address(publisher),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        json.loads(process.stdout.readline())
        process.stdout.close()
        process.wait(20)
        assert process.stderr.read() == b""


def test_narrow_output_still_has_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    with serving() as publisher:
        assert "one" in output("watch", "--once", "--instance", address(publisher))
