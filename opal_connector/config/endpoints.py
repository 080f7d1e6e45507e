"""Where an instance can be asked and listened to."""

from typing import Final

import msgspec

_ANY_HOST: Final = frozenset({"*", "0.0.0.0", "[::]"})
PORTS_PER_RANK: Final = 2


class Endpoint(msgspec.Struct, frozen=True):
    """A TCP address; port 0 is any free one."""

    host: str
    port: int

    @property
    def address(self) -> str:
        """What a socket binds."""
        return f"tcp://{self.host}:{self.port or '*'}"

    @property
    def announced(self) -> str:
        """What others are told: no host where all of them are meant."""
        return f"tcp://{'*' if self.is_any_host else self.host}:{self.port}"

    @property
    def is_any_host(self) -> bool:
        """Whether all addresses of this machine are meant, which is none to connect to."""
        return self.host in _ANY_HOST

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        host = self.host.strip("[]")
        return host in ("localhost", "::1") or host.startswith("127.")

    def next_to(self, ports: int) -> "Endpoint":
        """So many ports further; any free port stays any."""
        return Endpoint(self.host, self.port + ports if self.port else 0)


def parse_endpoint(text: str) -> Endpoint:
    """The endpoint `tcp://host:port`; port 0 or `*` is any free one.

    Raises:
        ValueError: It is not one.
    """
    scheme, _, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if scheme != "tcp" or not host or (":" in host and not is_bracketed):
        raise ValueError(f"{text!r} is not an endpoint such as 'tcp://127.0.0.1:5601'")
    number = 0 if port == "*" else int(port)
    if not 0 <= number < 1 << 16:
        raise ValueError(f"{port} is not a port")
    return Endpoint(host, number)
