"""Traces through the real books in virtual time: what would hit, move and leave. Never any I/O."""

from opal_connector.simulation.belady import Belady
from opal_connector.simulation.bound import BELADY, replay_belady
from opal_connector.simulation.device import DEVICES, DeviceParameters
from opal_connector.simulation.generator import generated_chats
from opal_connector.simulation.replay import Replay
from opal_connector.simulation.report import CACHE_MISS, DEVICE, ReplayReport, TierReport
from opal_connector.simulation.settings import ReplaySettings
from opal_connector.simulation.trace import (
    Trace,
    TraceError,
    TraceLine,
    TraceRequest,
    content_lines,
    read_trace,
    read_trace_lines,
)

__all__ = [
    "BELADY",
    "CACHE_MISS",
    "DEVICE",
    "DEVICES",
    "Belady",
    "DeviceParameters",
    "Replay",
    "ReplayReport",
    "ReplaySettings",
    "TierReport",
    "Trace",
    "TraceError",
    "TraceLine",
    "TraceRequest",
    "content_lines",
    "generated_chats",
    "read_trace",
    "read_trace_lines",
    "replay_belady",
]
