"""When batches of simulated instances reach the index."""

from hashlib import sha256

from opal_connector.cluster.kvbm import KVBM
from opal_connector.events import Insert, KVCEvent, ObjectFact
from opal_connector.keys import CHAIN_ROOT
from opal_connector.simulated_cluster.feed import EventFeed


class Arrivals(KVBM):
    """Whose events have come, in order."""

    def __init__(self) -> None:
        self.sources: list[str] = []

    def process_kvc_events(self, source: str, events: list[KVCEvent]) -> None:  # type: ignore[override]
        self.sources += [source] * len(events)


def inserted(number: int) -> list[KVCEvent]:
    name = sha256(str(number).encode()).digest()
    return [Insert(ObjectFact(0, CHAIN_ROOT, name), "CPUMemory")]


def test_a_batch_arrives_when_it_is_due_whatever_others_have_sent() -> None:
    """Also behind a source whose batch left early, and which has another one under way."""
    arrivals = Arrivals()
    feed = EventFeed(arrivals, model="model", block_tokens=16, coalesce_seconds=1.0)
    feed.hear("first", inserted(1), 0.0)
    feed.hear("second", inserted(2), 0.1)
    feed.hear("first", inserted(3), 1.05)  # its first batch is due, and leaves with this
    assert arrivals.sources == ["first"]
    feed.deliver(1.099)
    assert arrivals.sources == ["first"]
    feed.deliver(1.1)
    assert arrivals.sources == ["first", "second"]
    feed.deliver(2.05)
    assert arrivals.sources == ["first", "second", "first"]
