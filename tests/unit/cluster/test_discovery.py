"""Where an engine says that its events are, over a real HTTP server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from opal_connector.cluster.ingest import DiscoveryError, VllmSource, discover
from opal_connector.cluster.ingest.native_source import with_host_of


class _Handler(BaseHTTPRequestHandler):
    body = b""

    def do_GET(self) -> None:
        is_it = self.path == "/kv_event_sources"
        self.send_response(200 if is_it else 404)
        self.end_headers()
        self.wfile.write(self.body if is_it else b"")

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[type[_Handler], str]]:
    handler = type("Handler", (_Handler,), {})
    http = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    thread.join()
    http.server_close()


def config(**changes: Any) -> dict[str, Any]:
    base = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
        "buffer_steps": 10_000,
        "topic": "kv",
    }
    return base | changes


def test_every_rank_is_a_source_at_the_servers_host(server: tuple[type[_Handler], str]) -> None:
    handler, url = server
    second = config(endpoint="tcp://10.1.2.3:7", replay_endpoint=None, topic="")
    handler.body = json.dumps({"0": config(), "1": second}).encode()

    assert discover(url + "/", worker="v", model="m") == [
        VllmSource(
            worker="v",
            endpoint="tcp://127.0.0.1:5557",
            replay_endpoint="tcp://127.0.0.1:5558",
            topic="kv",
            model="m",
        ),
        VllmSource(worker="v", endpoint="tcp://10.1.2.3:7", model="m", rank=1),
    ]
    assert [source.name for source in discover(url, worker="v")] == ["v", "v/dp1"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{}", "publishes no KV events"),
        (json.dumps({"0": config(enable_kv_cache_events=False)}).encode(), "publishes no"),
        (json.dumps({"0": config(publisher="null")}).encode(), "publishes no"),
        (b"<html>", "answers something else"),
        (b'{"zero": {}}', "answers something else"),
        (b'{"0": {"endpoint": 7}}', "answers something else"),
        (json.dumps({str(rank): {} for rank in range(2_000)}).encode(), "at most"),
    ],
    ids=["empty", "off", "null", "html", "no rank", "no endpoint", "too many"],
)
def test_an_answer_that_names_no_source_is_one_sentence(
    server: tuple[type[_Handler], str], body: bytes, reason: str
) -> None:
    handler, url = server
    handler.body = body

    with pytest.raises(DiscoveryError, match=reason):
        discover(url)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(DiscoveryError, match="is no URL"):
        discover(url)


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(DiscoveryError, match="does not answer"):
        discover("http://127.0.0.1:9", timeout_seconds=1.0)


@pytest.mark.parametrize(
    ("endpoint", "reached"),
    [
        ("tcp://*:5", "tcp://h:5"),
        ("tcp://0.0.0.0:5", "tcp://h:5"),
        ("tcp://[::]:5", "tcp://h:5"),
        ("tcp://other:5", "tcp://other:5"),
    ],
)
def test_an_endpoint_without_a_host_is_at_the_host_that_was_asked(
    endpoint: str, reached: str
) -> None:
    assert with_host_of(endpoint, "tcp://h:9") == reached
