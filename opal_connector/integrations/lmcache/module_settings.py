"""What a user may write under `config` of the server module."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from opal_connector.cluster.curve import CurveServer
from opal_connector.cluster.publisher import ChannelSettings
from opal_connector.config import (
    ConfigError,
    CurveConfig,
    EventsConfig,
    converted,
    load_config,
    parse_endpoint,
    parse_size_bytes,
)

_TOP: Final = "config"
_INNER: Final[dict[str, type[msgspec.Struct]]] = {"events": EventsConfig, "curve": CurveConfig}


class ServerModuleSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The event channel, as Opal's own connector has it, and which model it is about.

    A channel is about one model. `model` is its name in LMCache's keys, by default that of the
    first chunk that is stored; `served_model_name` is what requests call it, by default the same.
    """

    model: str | None = None
    served_model_name: str | None = None
    instance_id: str | None = None
    events: EventsConfig = EventsConfig()
    kvcevent_coalesce_time: float = 0.05


def load_module_settings(given: Mapping[str, Any]) -> ServerModuleSettings:
    """The checked settings.

    Raises:
        ConfigError: A value is unknown, of the wrong kind or out of range.
    """
    settings = converted(given, ServerModuleSettings, top=_TOP, inner=_INNER)
    for field in ("model", "served_model_name"):
        if getattr(settings, field) == "":
            raise ConfigError(f"{field}: found '', allowed: any other text, or leave it out")
    own = ("model", "served_model_name")
    load_config({name: value for name, value in given.items() if name not in own})
    return settings


def channel_settings(settings: ServerModuleSettings) -> ChannelSettings:
    """How the channel publishes."""
    events = settings.events
    published = events.publish_endpoint
    return ChannelSettings(
        endpoint=parse_endpoint(events.endpoint),
        publish_endpoint=None if published is None else parse_endpoint(published),
        instance_id=settings.instance_id,
        coalesce_seconds=settings.kvcevent_coalesce_time,
        heartbeat_seconds=events.heartbeat_seconds,
        replay_bytes=parse_size_bytes(events.replay_size),
        curve=None
        if events.curve is None
        else CurveServer(
            secret_key_file=events.curve.secret_key_file,
            client_key_files=events.curve.client_key_files,
        ),
    )
