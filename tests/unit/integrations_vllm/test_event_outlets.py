"""What is counted for the event channel never costs a hook the work that it is there for."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from opal_connector.config import load_config
from opal_connector.integrations.vllm.native_events import EventOutlets
from opal_connector.keys import LoraIdentity

pytestmark = pytest.mark.vllm


class Faulty:
    """Whatever is asked of it fails."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize(
    "call",
    [
        lambda outlets: outlets.begin_request("r"),
        lambda outlets: outlets.begin_step(None),
        lambda outlets: outlets.take_host_events(),
        lambda outlets: outlets.end_job(None, None),
        lambda outlets: outlets.end_request("r"),
        lambda outlets: outlets.see_adapter(LoraIdentity("a", "/a", "f")),
    ],
    ids=["request", "step", "output", "job", "end", "adapter"],
)
def test_a_fault_of_the_meter_stays_where_it_is(
    call: Any, caplog: pytest.LogCaptureFixture
) -> None:
    outlets = EventOutlets(SimpleNamespace(kv_events_config=None), load_config({}), lambda: 0.0)
    outlets.channel = Faulty()  # type: ignore[assignment]
    call(outlets)
