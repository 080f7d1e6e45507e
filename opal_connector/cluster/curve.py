"""CURVE on the event channel: both ends show a key, and what passes between them is encrypted.

Keys are files as `zmq.auth.create_certificates` writes them: NAME.key for others, NAME.key_secret
for their owner.
"""

import contextlib
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from opal_connector.config import ConfigError

_DOMAIN: Final = b"opal"
_KEY_BYTES: Final = 32


class CurveServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An instance's own key, and the keys of those who may ask and listen."""

    secret_key_file: str
    client_key_files: tuple[str, ...]


class CurveClient(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The key of the instance that is followed, and one's own."""

    server_key_file: str
    secret_key_file: str


class _Keys:
    """Who is allowed; asked by the authenticator's thread. It never changes."""

    def __init__(self, allowed: Sequence[bytes]) -> None:
        self._allowed = frozenset(allowed)

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - as ZAP asks
        """Whether a key is one of those allowed."""
        return key in self._allowed


def key_of(path: str) -> bytes:
    """The public key in a file.

    Raises:
        ConfigError: There is none.
    """
    return _load(path)[0]


def key_pair(path: str) -> tuple[bytes, bytes]:
    """The public and the secret key in a file.

    Raises:
        ConfigError: There is no secret key in it.
    """
    public, secret = _load(path)
    if secret is None:
        raise ConfigError(f"found {path!r}, which holds no secret key: that is NAME.key_secret")
    return public, secret


@contextlib.contextmanager
def guarding(
    context: "zmq.Context[zmq.Socket[bytes]]", curve: CurveServer | None
) -> Iterator[None]:
    """Let nobody to this context's sockets, once they are `serving`, but those who are allowed.

    Raises:
        OSError: A key cannot be read.
    """
    if curve is None:
        yield
        return
    try:
        allowed = [key_of(path) for path in curve.client_key_files]
    except ConfigError as error:
        raise OSError(f"events.curve can be used: {error}") from error
    guard = ThreadAuthenticator(context)
    guard.start()
    try:
        guard.configure_curve_callback(_DOMAIN.decode(), _Keys(allowed))
        yield
    finally:
        guard.stop()


def serve_with(socket: "zmq.Socket[bytes]", curve: CurveServer | None) -> None:
    """Make a socket that is not bound yet ask everybody for a key.

    Raises:
        OSError: Its own key cannot be read.
    """
    if curve is None:
        return
    try:
        public, secret = key_pair(curve.secret_key_file)
    except ConfigError as error:
        raise OSError(f"events.curve can be used: {error}") from error
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without the guard nobody is let in


def ask_with(socket: "zmq.Socket[bytes]", curve: CurveClient | None) -> None:
    """Make a socket that is not connected yet show a key and accept one other only, or close it.

    Raises:
        ConfigError: A key cannot be read.
    """
    if curve is None:
        return
    try:
        server, (public, secret) = key_of(curve.server_key_file), key_pair(curve.secret_key_file)
    except ConfigError:
        socket.close(linger=0)
        raise
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)


def _load(path: str) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(Path(path).expanduser())
        is_key = all(len(z85.decode(key)) == _KEY_BYTES for key in (public, secret or public))
    except (OSError, ValueError, struct.error):
        is_key = False
    if not is_key:
        raise ConfigError(f"found {path!r}, which holds no CURVE key")
    return public, secret
