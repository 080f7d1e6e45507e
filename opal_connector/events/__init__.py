"""Facts about what is where: the events, the log that the books write, the channel's messages."""

from opal_connector.events.facts import (
    DEVICE_TIER,
    Copy,
    Delete,
    Insert,
    KVCEvent,
    KVCEventType,
    Move,
    ObjectFact,
)
from opal_connector.events.log import EventLog

__all__ = [
    "DEVICE_TIER",
    "Copy",
    "Delete",
    "EventLog",
    "Insert",
    "KVCEvent",
    "KVCEventType",
    "Move",
    "ObjectFact",
]
