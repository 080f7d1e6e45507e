"""Each engine's own client as its documentation uses it: a value from a buffer, and into one."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from opal_connector.cli.demo_stores import DemoStore


class BareClient(ABC):
    """Values by key, without names, checks or deadlines."""

    prefix = ""  # what Opal's settings put before its keys

    def buffer(self, size_bytes: int) -> Any:
        """Memory that puts take from, and gets fill where the library can."""
        return bytearray(size_bytes)

    @abstractmethod
    def put(self, key: str, value: Any) -> None:
        """Store a buffer's bytes."""

    @abstractmethod
    def get(self, key: str, into: Any) -> None:
        """Fetch a value; into the buffer where the library can, else as it gives it."""

    def fill(self, key: str, into: Any) -> None:
        """Fetch a value into the buffer, with a copy where the library fills only its own."""
        self.get(key, into)

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Remove values."""

    def close(self) -> None:  # noqa: B027 - not every library has anything to give up
        """Give up connections."""


class BareValkey(BareClient):
    """`redis` with its own parser in C (`hiredis`), which makes a new `bytes` of every value."""

    prefix = "opal:"

    def __init__(self, store: DemoStore) -> None:
        import redis

        self._client = redis.Redis.from_url(store.settings["url"])

    def put(self, key: str, value: Any) -> None:
        self._client.set(key, memoryview(value))

    def get(self, key: str, into: Any) -> None:
        assert len(self._client.get(key)) == len(into)

    def fill(self, key: str, into: Any) -> None:
        memoryview(into)[:] = self._client.get(key)

    def remove(self, keys: Sequence[str]) -> None:
        self._client.delete(*keys)

    def close(self) -> None:
        self._client.close()


class BareObjectStore(BareClient):
    """`obstore`, which gives memory of its own for every value."""

    prefix = "kv/"

    def __init__(self, store: DemoStore) -> None:
        import obstore
        from obstore.store import from_url

        self._obstore = obstore
        split = urlsplit(store.settings["url"])
        options = {
            name: value
            for name, value in store.settings["options"].items()
            if name != "aws_allow_http"
        }
        self._store = from_url(
            f"{split.scheme}://{split.netloc}", config=options, client_options={"allow_http": True}
        )

    def put(self, key: str, value: Any) -> None:
        self._obstore.put(self._store, key, value)

    def get(self, key: str, into: Any) -> None:
        assert len(self._obstore.get(self._store, key).bytes()) == len(into)

    def fill(self, key: str, into: Any) -> None:
        memoryview(into)[:] = memoryview(self._obstore.get(self._store, key).bytes())

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self._obstore.delete(self._store, key)


class BareMooncake(BareClient):
    """Mooncake's own store object, with registered buffers, which it fills itself."""

    prefix = "opal/"

    def __init__(self, store: DemoStore) -> None:
        import numpy as np
        from mooncake.store import MooncakeDistributedStore

        settings = store.settings
        self._numpy = np
        self._memory: list[Any] = []  # what is registered must not become other memory
        self._store = MooncakeDistributedStore()
        status = self._store.setup(
            settings["local_host"],
            settings["metadata"],
            0,
            64 << 20,
            "tcp",
            "",
            settings["master"],
        )
        assert status == 0, f"setup answered {status}"

    def buffer(self, size_bytes: int) -> Any:
        memory = self._numpy.zeros(size_bytes, self._numpy.uint8)
        self._memory.append(memory)
        assert self._store.register_buffer(memory.ctypes.data, size_bytes) == 0
        return memoryview(memory)

    def put(self, key: str, value: Any) -> None:
        address = self._numpy.frombuffer(value, self._numpy.uint8).ctypes.data
        assert self._store.put_from(key, address, len(value)) == 0

    def get(self, key: str, into: Any) -> None:
        address = self._numpy.frombuffer(into, self._numpy.uint8).ctypes.data
        assert self._store.get_into(key, address, len(into)) == len(into)

    def remove(self, keys: Sequence[str]) -> None:
        # A value that was just read is leased for some seconds.
        deadline = time.monotonic() + 60
        for key in keys:
            while self._store.is_exist(key) == 1 and self._store.remove(key, True) != 0:
                assert time.monotonic() < deadline, f"{key} cannot be removed"
                time.sleep(0.1)

    def close(self) -> None:
        self._store.close()


BARE_CLIENTS: dict[str, Callable[[DemoStore], BareClient]] = {
    "s3": BareObjectStore,
    "mooncake": BareMooncake,
    "valkey": BareValkey,
}
