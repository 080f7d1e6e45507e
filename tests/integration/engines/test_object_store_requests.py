"""What an operation costs in requests: the table of docs/object-store.md, counted on the wire."""

import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256

import pytest
from engine_suite import make_name, opened
from file_tier_suite import Pool
from integration.engines.object_store_server import BUCKET, HOST, ObjectStoreServer

from opal_connector.tiers.engines import EngineClient, EngineMedium
from opal_connector.tiers.engines.client import Span
from opal_connector.tiers.engines.engine_tier import EngineTier
from opal_connector.tiers.engines.names import rank_prefix, value_key
from opal_connector.tiers.engines.object_store import ObjectStoreClient
from opal_connector.tiers.engines.object_store_ranges import Pace
from opal_connector.tiers.file_names import object_key

MEBIBYTE = 1 << 20
_REQUEST = re.compile(rb"(GET|PUT|HEAD|POST|DELETE) (\S+) HTTP/1\.1\r\n")


class CountingProxy:
    """Passes connections on to a server and counts the requests that go through.

    Mutable state: the counts, guarded by `_lock`, and the sockets, closed by `close`.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._listener = socket.create_server((HOST, 0), backlog=256)
        self._sockets: list[socket.socket] = []
        self.endpoint = f"http://{HOST}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def taken(self) -> dict[str, int]:
        """How many of each kind there were since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection((HOST, self._port))
            self._sockets += [client, server]
            threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        rest = b""
        try:
            while data := source.recv(1 << 16):
                if is_counted:
                    rest = self._count(rest + data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return  # one side has closed

    def _count(self, data: bytes) -> bytes:
        """Count whole first lines; what may be the beginning of another one is left."""
        end = 0
        with self._lock:
            for found in _REQUEST.finditer(data):
                end = found.end()
                self._counts[kind_of(found[1].decode(), found[2].decode())] += 1
        return data[max(end, len(data) - 1024) :]


def kind_of(method: str, target: str) -> str:
    """What S3 calls a request of this form."""
    if "list-type" in target:
        return "LIST"
    if method == "POST" and "?delete" in target:
        return "DELETE"
    if "partNumber" in target:
        return "PART"
    return method


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStoreServer]:
    server = ObjectStoreServer()
    server.start()
    try:
        server.make_bucket()
        yield server
    finally:
        server.stop()


@pytest.fixture
def proxy(server: ObjectStoreServer) -> Iterator[CountingProxy]:
    proxy = CountingProxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def client(server: ObjectStoreServer, proxy: CountingProxy) -> Iterator[ObjectStoreClient]:
    options = {**server.options, "aws_endpoint": proxy.endpoint}
    client = ObjectStoreClient(f"s3://{BUCKET}/p", options=options, timeout_seconds=60.0)
    client.put("seen", [b"x"])  # the bucket is
    proxy.taken()
    yield client
    client.close()


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> bytes:
    return sha256(request.node.name.encode()).digest()


@pytest.fixture
def tier(client: ObjectStoreClient, proxy: CountingProxy, namespace: bytes) -> EngineTier:
    class World:
        def client(self, timeout_seconds: float) -> EngineClient:
            del timeout_seconds
            return client

    made = opened(World(), namespace, 4096)  # type: ignore[arg-type]
    assert proxy.taken() == {"HEAD": 1}
    return made


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (MEBIBYTE, {"PUT": 1}),
        (32 * MEBIBYTE - 1, {"PUT": 1}),
        (32 * MEBIBYTE, {"POST": 2, "PART": 4}),
        (33 * MEBIBYTE, {"POST": 2, "PART": 5}),
    ],
)
def test_a_store(
    client: ObjectStoreClient, proxy: CountingProxy, size: int, expected: dict[str, int]
) -> None:
    """1 PUT below 32 MiB; above, one per 8 MiB and 2 more."""
    client.put("n/r0/a", [bytes(size)])
    assert proxy.taken() == expected


def test_a_load(client: ObjectStoreClient, proxy: CountingProxy) -> None:
    """1 GET up to 8 MiB; above, ranged GETs, as long as one connection is not faster than that."""
    for size, expected in ((8 * MEBIBYTE, 1), (20 * MEBIBYTE, 3)):
        client.put(f"n/r0/{size}", [bytes(size)])
        proxy.taken()
        client._pace = Pace(8 * MEBIBYTE)  # whatever this machine's connections were measured at
        client.get(f"n/r0/{size}", size, [Span(0, [memoryview(bytearray(size))])])
        assert proxy.taken() == {"GET": expected}


def test_an_object_of_a_tier(tier: EngineTier, proxy: CountingProxy) -> None:
    """One PUT, one GET for all of it or for neighbouring rows, one DELETE."""
    pool, name = Pool(4096), make_name(1)
    calls: list[tuple[Callable[[], object], dict[str, int]]] = [
        (lambda: pool.write(tier, name), {"PUT": 1}),
        (lambda: pool.read(tier, name), {"GET": 1}),
        (lambda: pool.read(tier, name, [2, 3]), {"GET": 1}),
        (lambda: tier.remove_object(name), {"DELETE": 1}),
        (tier.probe, {"PUT": 1, "GET": 1, "DELETE": 1}),
    ]
    for call, expected in calls:
        call()
        assert proxy.taken() == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, {"HEAD": 1}), (255, {"HEAD": 255}), (256, {"LIST": 1}), (1024, {"LIST": 1})],
)
def test_a_lookup_of_what_is_not_known(
    client: ObjectStoreClient, proxy: CountingProxy, count: int, expected: dict[str, int]
) -> None:
    """A HEAD for each, from 256 on a LIST if its pages are few."""
    client.present([f"lookup/{number}" for number in range(count)])
    assert proxy.taken() == expected


def test_a_refresh(
    client: ObjectStoreClient, tier: EngineTier, proxy: CountingProxy, namespace: bytes
) -> None:
    """A LIST per 1,000 objects and rank, one GET for each that others wrote; then no more."""
    pool = Pool(4096)
    known: set[bytes] = set()
    medium = EngineMedium(
        client,
        identity="engine",
        namespace=namespace,
        ranks=1,
        knows=known.__contains__,
        known_keys=lambda: sorted(known),
    )
    names = [make_name(number) for number in range(5)]
    for name in names:
        pool.write(tier, name)
    known.update(object_key(name) for name in names[:2])
    proxy.taken()
    told = [name for change in medium.changes() for name in change.names]
    assert len(told) == 3
    assert proxy.taken() == {"LIST": 1, "GET": 3}
    known.update(object_key(name) for name in names)
    list(medium.changes())
    assert proxy.taken() == {"LIST": 1}


def test_removals(client: ObjectStoreClient, proxy: CountingProxy, namespace: bytes) -> None:
    """One DELETE for up to 1,000; a wipe lists as well."""
    prefix = rank_prefix(namespace, 0)
    keys = [value_key(prefix, object_key(make_name(number))) for number in range(1001)]
    client.remove(keys[:1000])
    assert proxy.taken() == {"DELETE": 1}
    client.remove(keys)
    assert proxy.taken() == {"DELETE": 2}
    client.put(keys[0], [b"x"])
    proxy.taken()
    client.remove_under(prefix)
    assert proxy.taken() == {"LIST": 1, "DELETE": 1}
