"""Makes Opal's log lines visible where vLLM's are: vLLM configures only its own logger."""

import logging


def show_log_lines() -> None:
    """Send `opal_connector` records to vLLM's handlers, at its level. Idempotent."""
    ours = logging.getLogger("opal_connector")
    host = logging.getLogger("vllm")
    if ours.handlers or not host.handlers:
        return
    for handler in host.handlers:
        ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(host.level or logging.INFO)
    ours.propagate = False
