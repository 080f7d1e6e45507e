"""What of a message is passed on: everything but what is between two neighbours only."""

from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import msgspec
from aiohttp import web

from opal_connector.cluster.router.upstream import Headers

ADMIN_KEY_HEADER: Final = "X-Opal-Admin-Key"
POLICY_HEADER: Final = "X-Opal-Policy"
SESSION_HEADER: Final = "X-Session-ID"
WORKER_HEADER: Final = "X-Opal-Worker"
EXPECTED_HEADER: Final = "X-Opal-Expected-Tokens"
RANK_HEADER: Final = "X-data-parallel-rank"

_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_REQUEST_DROPPED: Final = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    ADMIN_KEY_HEADER.lower().encode(),
}
_WITHOUT_KEY: Final = _REQUEST_DROPPED | {b"authorization"}
_ERROR_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


def origin_form(target: str) -> str:
    """A request's path and query alone: what is behind an instance must not be the client's choice.

    A target may name a host, as for a proxy, and that one would count more than ours in `Host`.
    """
    if target.startswith("/"):
        return target
    parts = urlsplit(target)
    return urlunsplit(("", "", parts.path or "/", parts.query, ""))


def request_head(
    target: str,
    host: str,
    headers: Iterable[tuple[bytes, bytes]],
    length: int,
    *,
    hides_authorization: bool,
) -> list[bytes]:
    """The lines of a POST that carries on a client's, without the empty one at the end."""
    lines = [b"POST %b HTTP/1.1\r\nHost: %b\r\n" % (target.encode(), host.encode())]
    dropped = _WITHOUT_KEY if hides_authorization else _REQUEST_DROPPED
    for name, value in passed_on(headers, dropped):
        lines.append(b"%b: %b\r\n" % (name, value))
    lines.append(b"Content-Length: %d\r\n" % length)
    return lines


def answer_headers(headers: Headers) -> Headers:
    """What of an instance's headers a client is to see; the length is among them."""
    return list(passed_on(headers, _HOP_BY_HOP))


def passed_on(
    headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]
) -> Iterable[tuple[bytes, bytes]]:
    """The headers that are not dropped, and that `Connection` does not name either."""
    lowered = [(name.lower(), name, value) for name, value in headers]
    for lower, _, value in lowered:
        if lower == b"connection":
            dropped |= {token.strip().lower() for token in value.split(b",")}
    return [(name, value) for lower, name, value in lowered if lower not in dropped]


def error_answer(
    status: int, text: str, *, kind: str | None = None, headers: dict[str, str] | None = None
) -> web.Response:
    """An error of the router's own, in the form of OpenAI's."""
    error = {
        "message": text,
        "type": kind or _ERROR_KINDS.get(status, "server_error"),
        "param": None,
        "code": status,
    }
    return json_answer({"error": error}, status=status, headers=headers)


def json_answer(
    content: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """An answer of the router's own."""
    return web.Response(
        body=msgspec.json.encode(content),
        status=status,
        content_type="application/json",
        headers=headers,
    )
