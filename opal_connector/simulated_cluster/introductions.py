"""What the router is told of a simulated instance besides its events."""

from typing import Final

from opal_connector.events import DEVICE_TIER
from opal_connector.events.channel import (
    InstanceDescription,
    SystemEvent,
    TierDescription,
    TierLoad,
)
from opal_connector.simulated_cluster.feed import INCARNATION
from opal_connector.simulation import ReplaySettings
from opal_connector.simulation.books import chunk_blocks
from opal_connector.simulation.instance import SimulatedInstance

MODEL: Final = "simulated"
SHARED_TIER: Final = "DistributedFS"


def describe(
    name: str, settings: ReplaySettings, block_tokens: int, *, shared_id: str = ""
) -> InstanceDescription:
    """An instance and its tiers; `shared_id` names the directory that it shares with others."""
    tiers = [
        TierDescription(
            tier,
            is_persistent=tier != "CPUMemory",
            shared_id=shared_id if tier == SHARED_TIER else "",
        )
        for tier in settings.config.kvc_tiers
    ]
    return InstanceDescription(
        instance_id=name,
        incarnation=INCARNATION,
        model=MODEL,
        block_tokens=block_tokens,
        chunk_blocks=chunk_blocks(settings, block_tokens),
        tiers=(TierDescription(DEVICE_TIER), *tiers),
    )


def measure(
    settings: ReplaySettings, block_tokens: int, instance: SimulatedInstance | None = None
) -> SystemEvent:
    """The load and the speeds that an instance would report: alone, with whole chunks."""
    chunk_tokens = chunk_blocks(settings, block_tokens) * block_tokens
    chunk_bytes = chunk_tokens * settings.bytes_per_token
    tiers = () if instance is None else instance.manager.storage.tiers
    used_bytes = {tier.tier: tier.used_bytes for tier in tiers}
    loads = []
    for name in settings.config.kvc_tiers:
        device = settings.devices[name]
        chunk_seconds = device.latency_nsec * 1e-9 + chunk_bytes / (device.bandwidth_GBps * 1e9)
        loads.append(
            TierLoad(
                name,
                used_bytes.get(name, 0),
                settings.capacity_bytes(name),
                chunk_seconds / chunk_bytes,
            )
        )
    return SystemEvent(
        prefill_tokens_per_second=settings.prefill_tokens_per_second or None,
        chunk_bytes=chunk_bytes,
        tiers=tuple(loads),
    )
