"""Who may ask what: keys, compared in constant time and never shown."""

import hmac
import os
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from opal_connector.cluster.router.config import RouterConfig, is_loopback
from opal_connector.cluster.router.wire import ADMIN_KEY_HEADER
from opal_connector.config import ConfigError

_BEARER: Final = "bearer "
_FROM_ELSEWHERE: Final = ("Forwarded", "X-Forwarded-For", "Origin")


class Keys:
    """The keys of the data plane and of the admin's paths; None where there is none."""

    def __init__(self, config: RouterConfig, environ: Mapping[str, str] = os.environ) -> None:
        security = config.security
        self._data = read_key("security.api_key_env", security.api_key_env, environ)
        self._admin = read_key("security.admin_key_env", security.admin_key_env, environ)
        self._is_loopback = config.is_loopback

    @property
    def guards_data(self) -> bool:
        """Whether clients need a key."""
        return self._data is not None

    @property
    def guards_admin(self) -> bool:
        """Whether the admin needs a key."""
        return self._admin is not None

    def allows_data(self, request: web.BaseRequest) -> bool:
        """Whether a client may use the models."""
        if self._data is None:
            return True
        given = request.headers.get("Authorization", "")
        return given[: len(_BEARER)].lower() == _BEARER and _is_same(
            given[len(_BEARER) :].strip(), self._data
        )

    def allows_admin(self, request: web.BaseRequest) -> bool:
        """Whether a client may look into the router and change it.

        Without a key only this machine may, and no web page that is open on it.
        """
        if self._admin is not None:
            return _is_same(request.headers.get(ADMIN_KEY_HEADER, ""), self._admin)
        try:
            asked = urlsplit(f"//{request.headers.get('Host', '')}").hostname or ""
        except ValueError:  # it is no host
            return False
        return (
            self._is_loopback
            and is_loopback(request.remote or "")
            and is_loopback(asked)
            and not any(name in request.headers for name in _FROM_ELSEWHERE)
        )


def read_key(field: str, variable: str | None, environ: Mapping[str, str]) -> str | None:
    """The key in an environment variable.

    Raises:
        ConfigError: The variable is named and not set.
    """
    if variable is None:
        return None
    key = environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"{field}: found {variable!r}, which is not set; allowed: an environment variable "
            "that holds a key"
        )
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"{field}: found {variable!r}, whose key has characters no header takes")
    return key


def _is_same(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode())
