"""An engine in this process's memory, for tests whose point is its timing or its faults."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from typing_extensions import Buffer, override

from opal_connector.tiers import ChecksumMismatchError
from opal_connector.tiers.engines import EngineClient, EngineMedium, Listed, Span
from opal_connector.tiers.file_errors import NoSpaceError, ObjectGoneError
from opal_connector.tiers.shared_medium import Refresh

PAGE = 7  # few, so that listings have several pages


class DictEngine:
    """The engine: what all its clients see.

    Mutable state: the values, and the rule that every call asks first; guarded by a lock.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls: list[tuple[str, int]] = []
        self.limit_bytes = 1 << 40
        self.rule: Callable[[str], None] = lambda call: None
        self.lock = threading.Lock()


class DictClient(EngineClient):
    """A client of a `DictEngine`. With `can_list` False it stands for engines without listings."""

    can_list: ClassVar[bool] = True

    def __init__(self, engine: DictEngine) -> None:
        self._engine = engine

    @override
    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self._begin("put", 1)
        value = b"".join(parts)
        with self._engine.lock:
            others = sum(len(data) for name, data in self._engine.values.items() if name != key)
            if others + len(value) > self._engine.limit_bytes:
                raise NoSpaceError("the engine is full")
            self._engine.values[key] = value
        self._engine.rule("put-done")

    @override
    def get(self, key: str, size_bytes: int, spans: Sequence[Span]) -> None:
        self._begin("get", 1)
        value = self._value(key)
        if len(value) != size_bytes:
            raise ChecksumMismatchError(f"a value has {len(value)} bytes, not {size_bytes}")
        for span in spans:
            offset = span.offset
            for buffer in span.buffers:
                buffer[:] = value[offset : offset + buffer.nbytes]
                offset += buffer.nbytes

    @override
    def get_start(self, key: str, size_bytes: int) -> bytes:
        self._begin("get_start", 1)
        return self._value(key)[:size_bytes]

    @override
    def present(self, keys: Sequence[str]) -> list[bool]:
        self._begin("present", len(keys))
        return [key in self._engine.values for key in keys]

    @override
    def remove(self, keys: Sequence[str]) -> None:
        self._begin("remove", len(keys))
        with self._engine.lock:
            for key in keys:
                self._engine.values.pop(key, None)

    @override
    def remove_under(self, prefix: str) -> None:
        self._begin("remove_under", 1)
        with self._engine.lock:
            for key in [key for key in self._engine.values if key.startswith(prefix)]:
                del self._engine.values[key]

    @override
    def list_values(self, prefix: str) -> Iterator[Sequence[Listed]]:
        self._begin("list_values", 1)
        with self._engine.lock:
            found = [
                Listed(key, len(value))
                for key, value in self._engine.values.items()
                if key.startswith(prefix)
            ]
        for start in range(0, len(found), PAGE):
            yield found[start : start + PAGE]

    def _begin(self, call: str, count: int) -> None:
        self._engine.calls.append((call, count))
        self._engine.rule(call)

    def _value(self, key: str) -> bytes:
        try:
            return self._engine.values[key]
        except KeyError:
            raise ObjectGoneError(key) from None


def refreshed(medium: EngineMedium) -> Refresh:
    """All steps of a refresh as one."""
    steps = list(medium.changes())
    names = [name for step in steps for name in step.names]
    return Refresh(tuple(names), tuple(key for step in steps for key in step.gone))


class UnlistedClient(DictClient):
    """A client of an engine that cannot say what it holds."""

    can_list = False


class LendingClient(DictClient):
    """A client that gives values out in memory of its own, and where that is no way, None."""

    lends = True

    @override
    def lend(
        self, key: str, size_bytes: int, wanted: Sequence[tuple[int, int]]
    ) -> memoryview | None:
        if not self.lends:
            return None
        self._begin("lend", 1)
        value = self._value(key)
        if len(value) != size_bytes:
            raise ChecksumMismatchError(f"a value has {len(value)} bytes, not {size_bytes}")
        return memoryview(value)[: wanted[-1][1]]
