"""Hints and tenants as vLLM's requests carry them."""

from typing import Any

import pytest

pytest.importorskip("vllm")

from opal_connector.integrations.vllm.hints import request_hints
from opal_connector.managers import NO_HINTS, RequestHints


class Asked:
    """As much of a vLLM request as hints are read from."""

    def __init__(self, params: Any) -> None:
        self.kv_transfer_params = params


@pytest.mark.parametrize(
    ("params", "hints"),
    [
        (None, NO_HINTS),
        ({}, NO_HINTS),
        ({"do_remote_prefill": True}, NO_HINTS),
        ({"opal": {}}, NO_HINTS),
        ({"opal": {"keep": True}}, RequestHints(keep=True)),
        ({"opal": {"keep": 60, "ttl": 5}}, RequestHints(keep=60.0, ttl=5.0)),
        ({"opal": {"drop": True, "session": "ends"}}, RequestHints(drop=True, session="ends")),
    ],
)
def test_hints_are_read(params: Any, hints: RequestHints) -> None:
    """Beside other connectors' parameters, and not there for most."""
    assert request_hints(Asked(params)) == hints  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "opal",
    [
        {"kepe": True},
        {"ttl": -1},
        {"ttl": 0},
        {"session": "maybe"},
        {"keep": "long"},
        "keep",
        ["keep"],
        7,
    ],
)
def test_what_cannot_be_understood_is_no_hint(opal: Any) -> None:
    """A client's mistake costs the hint, never the request."""
    assert request_hints(Asked({"opal": opal})) is NO_HINTS  # type: ignore[arg-type]
