"""Hints of a vLLM request, from its `kv_transfer_params`."""

import logging

import msgspec
from vllm.v1.request import Request

from opal_connector.managers import NO_HINTS, RequestHints
from opal_connector.reports import RateLimitedWarnings

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)

_SESSIONS = ("continues", "ends")


def request_hints(request: Request) -> RequestHints:
    """The hints under `kv_transfer_params["opal"]`; what cannot be understood is no hint."""
    given = (request.kv_transfer_params or {}).get("opal")
    if not given:
        return NO_HINTS
    try:
        hints = msgspec.convert(given, RequestHints)
    except msgspec.ValidationError as error:
        warnings.warn("hints", "the hints of a request are ignored: %s", error)
        return NO_HINTS
    if hints.session not in (None, *_SESSIONS) or not (hints.ttl is None or hints.ttl > 0):
        warnings.warn(
            "hints",
            "the hints of a request are ignored: session %r, allowed: %s; ttl %r, allowed: above 0",
            hints.session,
            ", ".join(_SESSIONS),
            hints.ttl,
        )
        return NO_HINTS
    return hints
