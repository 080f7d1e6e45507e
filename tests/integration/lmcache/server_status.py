"""What LMCache's server says of itself."""

import json
import urllib.error
import urllib.request
from typing import Any


def status(http_port: int) -> dict[str, Any]:
    """What the server says of itself; nothing while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/status", timeout=5) as answer:
            return json.load(answer)  # type: ignore[no-any-return]
    except (urllib.error.URLError, OSError):
        return {}


def adapter_status(http_port: int) -> dict[str, Any]:
    """The adapter's part of it, wherever the server puts it."""

    def find(value: Any) -> Any:
        if isinstance(value, dict):
            if "l2_adapters" in value:
                return value["l2_adapters"]
            value = list(value.values())
        found = [find(one) for one in value] if isinstance(value, list) else []
        return next((one for one in found if one), None)

    adapters = find(status(http_port))
    assert adapters
    return adapters[0]  # type: ignore[no-any-return]
