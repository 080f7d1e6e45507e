"""`ValkeyClient`: values as strings in a Valkey or Redis server."""

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final

import msgspec
from typing_extensions import Buffer, override

from opal_connector.config import ConfigError
from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.tiers.engines.client import EngineClient, Listed, Span
from opal_connector.tiers.engines.libraries import require_libraries
from opal_connector.tiers.engines.resp_doubts import Doubts
from opal_connector.tiers.engines.resp_errors import is_no_string, refusal
from opal_connector.tiers.engines.resp_pool import RespPool
from opal_connector.tiers.engines.resp_stream import Diverged, RespStream, pack
from opal_connector.tiers.file_errors import ObjectGoneError
from opal_connector.tiers.header_scan import batches

_SCHEMES: Final = ("redis", "rediss", "unix")
# Set by the constructor's own arguments, or of no use here.
_FOREIGN_OPTIONS: Final = frozenset(
    ("timeout", "socket_timeout", "socket_connect_timeout", "max_connections")
)
_PASSWORD_VARIABLES: Final = ("VALKEYCLI_AUTH", "REDISCLI_AUTH")
_KEYS_PER_COMMAND: Final = 512
_KEYS_PER_SCAN: Final = b"2048"
_STARTS_AT_ONCE: Final = 256  # a megabyte of headers is an answer of a few milliseconds
_FIRST: Final = b"0"  # where a scan begins, and what it says at its end
_END: Final = b"\r\n"
_LAST_WORDS_SECONDS: Final = 0.2
_GLOB: Final = str.maketrans({letter: f"\\{letter}" for letter in "*?[]^\\"})


class ValkeyClient(EngineClient):
    """Values in one server, under `<prefix>:<key>`; with `ttl_seconds` they end by themselves.

    What the server evicts or forgets is simply not there any more. A full server that may evict
    nothing takes no more (`NoSpaceError`). Only `list_values` and `remove_under` take longer than
    the timeout, which holds for each of their pages: a page is a step through the whole database,
    and what `remove_under` found is removed with the next one, so that one that fails in the middle
    has left less to do.

    Mutable state: connections, and writes without an answer, each behind a lock of its own.
    """

    can_list: ClassVar[bool] = True

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "opal",
        ttl_seconds: float | None = None,
        timeout_seconds: float,
        connections: int = 16,
    ) -> None:
        """`url` is what `redis` takes; a password that it lacks is looked for in the environment.

        Raises:
            ConfigError: The library is not installed, or an argument is wrong.
        """
        require_libraries("Valkey")
        if ttl_seconds is not None and ttl_seconds < 0.001:
            raise ConfigError(
                f"Valkey.ttl_seconds: found {ttl_seconds}, allowed: 0.001 or more, or null"
            )
        self._timeout_seconds = timeout_seconds
        self._prefix = f"{prefix}:" if prefix else ""
        self._life = None if ttl_seconds is None else b"%d" % round(ttl_seconds * 1000)
        self._pool = RespPool(_connection_maker(url), connections=connections)
        self._doubts = Doubts()

    @override
    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        name = self._name(key)
        size_bytes = sum(memoryview(part).nbytes for part in parts)
        words = 3 if self._life is None else 5
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (words, len(name), name, size_bytes)
        tail = _END
        if self._life is not None:
            tail += b"$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(self._life), self._life)

        def exchange(stream: RespStream, deadline: float) -> list[Any]:
            try:
                stream.send([head, *parts, tail], deadline)
            except ConnectionError:
                _say_why(stream)
                raise
            try:
                return stream.replies(1, deadline)
            except TimeoutError:
                connection, is_taken_back = stream.hand_over(pack(b"UNLINK", name))
                self._doubts.add(key, connection, is_taken_back=is_taken_back)
                raise

        _accept(self._pool.run(exchange, self._deadline()))

    @override
    def get(self, key: str, size_bytes: int, spans: Sequence[Span]) -> None:
        request = _request(self._name(key), size_bytes, spans)

        def exchange(stream: RespStream, deadline: float) -> list[Any]:
            return _receive(stream, request, deadline)

        if _accept(self._pool.run(exchange, self._deadline())):
            raise ObjectGoneError(errno.ENOENT, "the server has no such value", key)

    @override
    def get_start(self, key: str, size_bytes: int) -> bytes:
        is_there, start = self._ask(self._start(key, size_bytes), 2, self._deadline())
        if not is_there:
            raise ObjectGoneError(errno.ENOENT, "the server has no such value", key)
        return bytes(start[:size_bytes])

    @override
    def get_starts(self, keys: Sequence[str], size_bytes: int) -> list[bytes | None]:
        deadline = self._deadline()
        starts: list[bytes | None] = []
        for batch in batches(keys, _STARTS_AT_ONCE):
            commands = b"".join([self._start(key, size_bytes) for key in batch])
            answers = self._exchange(commands, 2 * len(batch), deadline)
            for is_there, start in zip(answers[::2], answers[1::2], strict=True):
                if is_no_string(start):
                    starts.append(None)
                    continue
                _accept([is_there, start])
                starts.append(bytes(start[:size_bytes]) if is_there else None)
        return starts

    @override
    def present(self, keys: Sequence[str]) -> list[bool]:
        commands = b"".join([pack(b"EXISTS", self._name(key)) for key in keys])
        return [bool(answer) for answer in self._ask(commands, len(keys), self._deadline())]

    @override
    def remove(self, keys: Sequence[str]) -> None:
        deadline = self._deadline()
        self._doubts.settle(frozenset(keys).__contains__, deadline)
        self._ask(*_unlinks([self._name(key) for key in keys]), deadline)

    @override
    def remove_under(self, prefix: str) -> None:
        self._doubts.settle(lambda key: key.startswith(prefix), self._deadline())
        scan = self._scan(prefix)
        cursor, names = _FIRST, list[bytes]()
        while True:
            commands, count = _unlinks(names)
            answers = self._ask(commands + scan(cursor), count + 1, self._deadline())
            cursor, names = answers[-1]
            if cursor == _FIRST:
                self._ask(*_unlinks(names), self._deadline())
                return

    @override
    def list_values(self, prefix: str) -> Iterator[Sequence[Listed]]:
        scan = self._scan(prefix)
        cursor, names = self._ask(scan(_FIRST), 1, self._deadline())[0]
        while names or cursor != _FIRST:
            commands = [pack(b"STRLEN", name) for name in names]
            is_last = cursor == _FIRST
            if not is_last:
                commands.append(scan(cursor))
            answers = self._exchange(b"".join(commands), len(commands), self._deadline())
            following = (_FIRST, []) if is_last else _accept(answers[-1:])[0]
            yield self._page(names, answers[: len(names)])
            cursor, names = following

    @override
    def touch(self, keys: Sequence[str]) -> None:
        if self._life is not None:
            life = self._life
            commands = b"".join([pack(b"PEXPIRE", self._name(key), life) for key in keys])
            self._ask(commands, len(keys), self._deadline())

    @override
    def close(self) -> None:
        self._pool.close()
        self._doubts.close()

    # ---- inside ----

    def _name(self, key: str) -> bytes:
        return f"{self._prefix}{key}".encode()

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_seconds

    def _start(self, key: str, size_bytes: int) -> bytes:
        """Commands that ask whether a value is there, and for its first bytes."""
        name = self._name(key)
        # A range of no bytes cannot be asked for: its end would lie before the value's beginning.
        last = b"%d" % max(0, size_bytes - 1)
        return pack(b"EXISTS", name) + pack(b"GETRANGE", name, b"0", last)

    def _ask(self, commands: bytes, count: int, deadline: float) -> list[Any]:
        """The answers to so many commands, in one round trip; none of them an error."""
        return _accept(self._exchange(commands, count, deadline))

    def _exchange(self, commands: bytes, count: int, deadline: float) -> list[Any]:
        if not count:
            return []

        def exchange(stream: RespStream, deadline: float) -> list[Any]:
            stream.send([commands], deadline)
            return stream.replies(count, deadline)

        return self._pool.run(exchange, deadline)

    def _scan(self, prefix: str) -> Callable[[bytes], bytes]:
        """The command that goes on to scan for keys under `prefix` from a cursor."""
        pattern = f"{self._prefix}{prefix}".translate(_GLOB).encode() + b"*"
        return lambda cursor: pack(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _KEYS_PER_SCAN)

    def _page(self, names: Sequence[bytes], sizes: Sequence[Any]) -> list[Listed]:
        """What was found, without what is not a string: that is nothing of ours."""
        skipped = len(self._prefix.encode())
        found = []
        for name, size in zip(names, sizes, strict=True):
            if is_no_string(size):
                continue
            _accept([size])
            found.append(Listed(name[skipped:].decode("ascii", "replace"), size))
        return found


class _Request(msgspec.Struct, frozen=True, eq=False):
    """A command, or several, whose answers are known but for the bytes that are wanted.

    A frame is what stands before some of these; None is for an answer without such bytes.
    """

    commands: bytes
    count: int
    frames: Sequence[tuple[bytes, Sequence[memoryview] | None]]


def _request(name: bytes, size_bytes: int, spans: Sequence[Span]) -> _Request:
    """How to ask for these parts of a value, or for all of it, in one round trip."""
    wanted = [(span.offset, size, span.buffers) for span in spans if (size := span.size_bytes)]
    if sum(size for _, size, _ in wanted) == size_bytes:
        buffers = [buffer for _, _, of_span in wanted for buffer in of_span]
        return _Request(pack(b"GET", name), 1, [(b"$%d\r\n" % size_bytes, buffers)])
    commands = [pack(b"EXISTS", name), pack(b"STRLEN", name)]
    frames: list[tuple[bytes, Sequence[memoryview] | None]] = []
    frames.append((b":1\r\n:%d\r\n" % size_bytes, None))
    for offset, size, of_span in wanted:
        commands.append(pack(b"GETRANGE", name, b"%d" % offset, b"%d" % (offset + size - 1)))
        frames.append((b"$%d\r\n" % size, of_span))
    return _Request(b"".join(commands), len(commands), frames)


def _receive(stream: RespStream, request: _Request, deadline: float) -> list[Any]:
    """Ask, and receive the value where it belongs; the answers if there is none, or errors.

    Raises:
        ChecksumMismatchError: The value has another size.
        OSError: The server failed, or something changed between two answers.
    """
    stream.send([request.commands], deadline)
    end = bytearray(len(_END))
    for position, (frame, buffers) in enumerate(request.frames):
        try:
            stream.expect(frame, deadline)
        except Diverged as other:
            if position == 0 and other.start.startswith((b"-", b"$-", b":0")):
                return stream.replies(request.count, deadline, start=other.start)
            if position == 0:
                raise ChecksumMismatchError("a value has another size than its object") from None
            raise ObjectGoneError(errno.ENOENT, "the value went while it was read") from None
        if buffers is not None:
            stream.fill([*buffers, memoryview(end)], deadline)
            if end != _END:
                raise OSError(errno.EPROTO, "the server does not speak RESP")
    return []


def _accept(answers: list[Any]) -> list[Any]:
    """The answers, unless one of them is an error: then that is raised."""
    import hiredis

    for answer in answers:
        if isinstance(answer, hiredis.ReplyError):
            raise refusal(answer)
    return answers


def _say_why(stream: RespStream) -> None:
    """Raise what the server said before it closed the connection, if it said anything."""
    answers = []
    with suppress(OSError):
        answers = stream.replies(1, time.monotonic() + _LAST_WORDS_SECONDS)
    _accept(answers)


def _unlinks(names: Sequence[bytes]) -> tuple[bytes, int]:
    """Commands that remove these keys, and how many they are."""
    starts = range(0, len(names), _KEYS_PER_COMMAND)
    commands = [pack(b"UNLINK", *names[start : start + _KEYS_PER_COMMAND]) for start in starts]
    return b"".join(commands), len(commands)


def _connection_maker(url: str) -> Callable[[float], Any]:
    """What makes connections of `redis`, not connected yet, with a timeout in seconds.

    Raises:
        ConfigError: The URL cannot be used. It is not repeated: there may be a password in it.
    """
    from redis import RedisError
    from redis.connection import Connection, parse_url

    if not url.startswith(tuple(f"{scheme}://" for scheme in _SCHEMES)):
        raise ConfigError("Valkey.url: found another scheme, allowed: redis://, rediss://, unix://")
    try:
        options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError:
        raise ConfigError(
            "Valkey.url: found a port or an option that cannot be read, "
            "allowed: redis://user:password@host:6379/0, with reserved letters as %XX"
        ) from None
    if foreign := sorted(options.keys() & _FOREIGN_OPTIONS):
        raise ConfigError(
            f"Valkey.url: found {foreign[0]}, allowed: timeout_seconds and concurrency of the tier"
        )
    kind = options.pop("connection_class", Connection)
    # RESP2, and no report of the library's version, which would cost two round trips.
    options |= {"protocol": 2, "driver_info": None}
    if not options.get("password"):
        options["password"] = _password_of(os.environ)

    def make(timeout_seconds: float) -> Any:
        limits = {"socket_timeout": timeout_seconds, "socket_connect_timeout": timeout_seconds}
        return kind(**options, **limits)

    try:
        make(1.0)
    except (TypeError, RedisError):
        raise ConfigError(
            "Valkey.url: found an option behind the ? that redis does not have, "
            "allowed: those of redis.Connection and redis.SSLConnection"
        ) from None
    return make


def _password_of(environment: Mapping[str, str]) -> str | None:
    """The password that the command-line clients of these servers would use."""
    found = [environment[name] for name in _PASSWORD_VARIABLES if environment.get(name)]
    return found[0] if found else None
