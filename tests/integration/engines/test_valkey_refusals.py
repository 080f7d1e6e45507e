"""Every refusal of a server is one kind of error of the system; and who gets in."""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from certificates import make_certificate
from valkey_server import ScriptedServer, ValkeyServer, answering, valkey_server

from opal_connector.cli.server_process import free_port
from opal_connector.tiers.engines.client import Span
from opal_connector.tiers.engines.resp_errors import refusal
from opal_connector.tiers.engines.valkey import ValkeyClient
from opal_connector.tiers.file_errors import NoSpaceError

MEBIBYTE = 1 << 20
PATIENCE_SECONDS = 20.0
PASSWORD = "geheim%/@word"
QUOTED = "geheim%25%2F%40word"


def client_of(url: str) -> ValkeyClient:
    return ValkeyClient(url, timeout_seconds=PATIENCE_SECONDS)


def refused(client: ValkeyClient, call: Callable[[ValkeyClient], object]) -> OSError:
    with pytest.raises(OSError, match=r".") as caught:
        call(client)
    client.close()
    assert "geheim" not in str(caught.value)
    return caught.value


def put(client: ValkeyClient) -> None:
    client.put("k", [b"v" * 100])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with valkey_server(tmp_path) as running:
        yield running


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[ValkeyServer]:
    with valkey_server(tmp_path, password=PASSWORD) as running:
        yield running


def test_a_password_lets_in(locked: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the URL, or from where the command-line clients look for it."""
    bare = f"redis://127.0.0.1:{locked.port}"
    with_password = client_of(f"redis://:{QUOTED}@127.0.0.1:{locked.port}")
    put(with_password)
    with_password.close()
    monkeypatch.setenv("REDISCLI_AUTH", PASSWORD)
    from_environment = client_of(bare)
    assert from_environment.present(["k"]) == [True]
    from_environment.close()
    monkeypatch.setenv("VALKEYCLI_AUTH", "geheim-wrong")
    assert refused(client_of(bare), put).errno == errno.EACCES


def test_without_the_password_nobody_gets_in(locked: ValkeyServer) -> None:
    """No password and a wrong one are told apart; neither is repeated."""
    none = refused(client_of(f"redis://127.0.0.1:{locked.port}"), put)
    assert (none.errno, none.strerror) == (errno.EACCES, "the server asks for a password")
    wrong = refused(client_of(f"redis://:geheim-wrong@127.0.0.1:{locked.port}"), put)
    assert wrong.errno == errno.EACCES
    assert "does not know this user" in str(wrong)


def test_a_user_with_few_rights_is_enough(server: ValkeyServer) -> None:
    """The rights that the documentation names do for every call; fewer are refused."""
    rights = ["+set", "+get", "+getrange", "+strlen", "+exists", "+pexpire", "+unlink", "+scan"]
    login = ["ACL", "SETUSER", "opal", "on", ">geheim", "resetkeys", "~opal:*", "resetchannels"]
    server.command(*login, "-@all", *rights)
    url = f"redis://opal:geheim@127.0.0.1:{server.port}/0"
    client = ValkeyClient(url, ttl_seconds=50, timeout_seconds=PATIENCE_SECONDS)
    client.put("a/k", [b"v" * 100])
    client.get("a/k", 100, [Span(50, [memoryview(bytearray(5))])])
    client.get("a/k", 100, [Span(0, [memoryview(bytearray(100))])])
    client.get_start("a/k", 5)
    client.touch(["a/k"])
    assert [value.key for page in client.list_values("a/") for value in page] == ["a/k"]
    client.remove(["a/k"])
    client.remove_under("a/")
    client.close()
    elsewhere = ValkeyClient(url, prefix="other", timeout_seconds=PATIENCE_SECONDS)
    assert refused(elsewhere, put).errno == errno.EACCES


def test_an_encrypted_connection(tmp_path: Path) -> None:
    """Values of all sizes by TLS; a certificate that nobody vouches for is refused."""
    certificate, key = make_certificate(tmp_path)
    port = free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    with valkey_server(tmp_path, options=options) as server:
        trusting = client_of(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}")
        data = bytes(range(256)) * (4 * MEBIBYTE // 256)
        trusting.put("tls", [data[:5], b"", data[5:]])
        assert server.value("opal:tls") == data
        into = bytearray(len(data))
        trusting.get("tls", len(data), [Span(0, [memoryview(into)[:9], memoryview(into)[9:]])])
        assert into == data
        trusting.get("tls", len(data), [Span(3, [memoryview(into)[:4]])])
        assert into[:4] == data[3:7]
        assert trusting.present(["tls", "none"]) == [True, False]
        server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert trusting.present(["tls"]) == [True]
        trusting.close()
        doubting = refused(client_of(f"rediss://127.0.0.1:{port}/0"), put)
        assert isinstance(doubting, ConnectionError)
        assert "CERTIFICATE_VERIFY_FAILED" in str(doubting)


def test_a_write_by_tls_to_a_paused_server_is_given_up_and_taken_back(tmp_path: Path) -> None:
    """As without encryption: the removal waits until the write is over."""
    certificate, key = make_certificate(tmp_path)
    port = free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    with valkey_server(tmp_path, options=options) as server:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
        client = ValkeyClient(url, timeout_seconds=3.0)
        client.present(["k"])
        server.pause()
        with pytest.raises(TimeoutError):
            put(client)
        server.resume()
        client.remove(["k"])
        assert not server.has("opal:k")
        client.close()


def test_a_value_above_the_limit_of_the_server(tmp_path: Path) -> None:
    """The sentence names the setting; the next value that fits goes in."""
    with valkey_server(tmp_path, options=["--proto-max-bulk-len", "1mb"]) as server:
        client = client_of(server.url)
        put(client)
        with pytest.raises(OSError, match="proto-max-bulk-len") as caught:
            client.put("large", [bytes(64 * MEBIBYTE)])
        assert caught.value.errno == errno.EFBIG
        put(client)
        client.close()


def test_a_replica_takes_no_writes(server: ValkeyServer, tmp_path: Path) -> None:
    """It says so, and is no full server."""
    server.command("REPLICAOF", "127.0.0.1", str(free_port()))
    error = refused(client_of(server.url), put)
    assert error.errno == errno.EROFS
    assert not isinstance(error, NoSpaceError)


def test_a_server_that_cannot_save_takes_no_writes(tmp_path: Path) -> None:
    """MISCONF, after a save that failed."""
    away = tmp_path / "away"
    away.mkdir()
    with valkey_server(tmp_path, options=["--enable-protected-configs", "yes"]) as server:
        server.command("CONFIG", "SET", "dir", str(away))
        away.rmdir()
        server.command("CONFIG", "SET", "save", "3600 100000")
        server.command("BGSAVE")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while server.command("INFO", "persistence")["rdb_last_bgsave_status"] != "err":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "cannot save" in str(refused(client_of(server.url), put))


def test_a_part_of_a_cluster_is_refused(tmp_path: Path) -> None:
    """One server of a cluster says that it has not all keys."""
    # Its second port would be 10,000 above the first, where the system gives ports to clients.
    options = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
    with valkey_server(tmp_path, options=options) as server:
        url = f"redis://127.0.0.1:{server.port}"
        assert "cluster" in str(refused(client_of(url), put))


def test_a_server_that_is_busy_with_a_script(tmp_path: Path) -> None:
    """BUSY, until the script is killed."""
    with valkey_server(tmp_path, options=["--busy-reply-threshold", "10"]) as server:
        client = client_of(server.url)
        put(client)

        def run() -> None:
            with pytest.raises(Exception, match="killed"):
                server.command("EVAL", "while true do end", "0")

        script = threading.Thread(target=run)
        script.start()
        seen: OSError | None = None
        while seen is None and script.is_alive():  # until it has begun
            try:
                put(client)
            except OSError as error:
                seen = error
        server.command("SCRIPT", "KILL")
        script.join()
        assert seen is not None
        assert seen.errno == errno.EBUSY
        put(client)
        client.close()


def test_too_many_clients_and_a_missing_database(tmp_path: Path) -> None:
    """Both are refused as the connection is made."""
    with valkey_server(tmp_path) as server:
        wrong = refused(client_of(f"redis://127.0.0.1:{server.port}/99"), put)
        assert "no database" in str(wrong)
        first = client_of(server.url)
        put(first)
        server.command("CONFIG", "SET", "maxclients", "1")
        second = client_of(server.url)
        with pytest.raises(OSError, match="as many clients as it takes"):
            put(second)
        first.close()
        second.close()


@pytest.mark.parametrize(
    ("answer", "number", "words"),
    [
        (b"-LOADING Redis is loading the dataset in memory\r\n", errno.EAGAIN, "loading"),
        (b"-MASTERDOWN Link with MASTER is down\r\n", errno.EHOSTDOWN, "replica"),
        (b"-MOVED 3999 127.0.0.1:6381\r\n", errno.EOPNOTSUPP, "cluster"),
        (b"-NOREPLICAS Not enough good replicas\r\n", errno.EIO, "replicas"),
        (b"-ERR unknown command 'SET', with: geheim\r\n", errno.EOPNOTSUPP, "lacks a command"),
        (b"-STRANGE geheim\r\n", errno.EPROTO, "STRANGE"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", errno.EPROTO, "RESP"),
        (b"+OK\r\n+OK\r\n", errno.EPROTO, "not asked"),
    ],
)
def test_what_servers_rarely_say(answer: bytes, number: int, words: str) -> None:
    """Answers that no server can be made to give here, and some that are no answers."""
    with ScriptedServer(answering(answer)) as server:
        error = refused(client_of(server.url), put)
    assert error.errno == number
    assert words in str(error)


def test_a_full_server_is_told_apart_from_all_other_refusals() -> None:
    """Only OOM is `NoSpaceError`."""
    assert isinstance(refusal("OOM command not allowed"), NoSpaceError)
    for code in ("MISCONF", "READONLY", "LOADING", "ERR"):
        assert not isinstance(refusal(f"{code} x"), NoSpaceError)
