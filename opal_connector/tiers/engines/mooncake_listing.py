"""`ListingMooncakeClient`: a client that knows what its store holds, from the master's admin port.

The library can only ask for keys, and to ask leases a value and counts as its use: who looks again
at what he believes to be there would keep all of it from being evicted. The list leases nothing.
"""

import errno
import http.client
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

from typing_extensions import override

from opal_connector.tiers.engines.client import Listed
from opal_connector.tiers.engines.mooncake import MooncakeClient
from opal_connector.tiers.header_scan import batches

_PATH: Final = "/get_all_keys"  # of everybody; one a line, without those that are being written
_READ_BYTES: Final = 1 << 20
_PAGE_KEYS: Final = 1000


class ListingMooncakeClient(MooncakeClient):
    """A `MooncakeClient` that lists. Has no state beside it."""

    can_list: ClassVar[bool] = True

    def __init__(self, *, admin: str, timeout_seconds: float, **settings: Any) -> None:
        """`admin` is HOST:PORT of the master's HTTP server; `settings` as `MooncakeClient` has."""
        super().__init__(timeout_seconds=timeout_seconds, **settings)
        self._admin = admin
        self._listing_seconds = timeout_seconds

    @override
    def list_values(self, prefix: str) -> Iterator[Sequence[Listed]]:
        """Sizes are not known, and told as 0."""
        begin = self._name(prefix).encode()
        own = len(self._name(""))
        for page in batches([key for key in self._keys() if key.startswith(begin)], _PAGE_KEYS):
            yield [Listed(key.decode(errors="replace")[own:], 0) for key in page]

    def _keys(self) -> Iterator[bytes]:
        """All keys of the store."""
        deadline = time.monotonic() + self._listing_seconds
        connection = http.client.HTTPConnection(self._admin, timeout=self._listing_seconds)
        try:
            connection.request("GET", _PATH)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise OSError(errno.EIO, f"the master lists no keys (HTTP {answer.status})")
            rest = b""
            while data := answer.read1(_READ_BYTES):
                *keys, rest = (rest + data).split(b"\n")
                yield from keys
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "the master's list of keys takes too long")
            if rest or answer.length:  # what ends early must not count as all there is
                raise OSError(errno.EIO, "the master's list of keys ends in the middle")
        except http.client.HTTPException as error:
            raise OSError(errno.EIO, f"the master's list of keys is broken ({error!r})") from error
        finally:
            connection.close()
