"""Traces and settings for simulated clusters, small enough for milliseconds a run."""

from opal_connector.config import CPUMemoryConfig, DistributedFSConfig, LocalNVMeConfig, OpalConfig
from opal_connector.simulation import ReplaySettings, Trace, generated_chats

TOKENS = 16
BYTES_PER_TOKEN = 64 << 10
ROW_BYTES = TOKENS * BYTES_PER_TOKEN
PLENTY = 100_000


def chats(seed: int = 3, requests: int = 300, mean_gap_seconds: float = 0.02) -> Trace:
    """Chats that share their first block, some requests at nearly the same time."""
    return generated_chats(
        seed,
        requests,
        turn_chance=0.6,
        chats_kept=20,
        block_tokens=TOKENS,
        mean_gap_seconds=mean_gap_seconds,
    )


def instance_settings(
    *,
    memory: int = PLENTY,
    disk: int = 0,
    shared: int = 0,
    write: str = "through",
    **others: object,
) -> ReplaySettings:
    """Tiers of so many blocks; those of 0 are left out."""
    names = {"CPUMemory": memory, "LocalNVMe": disk, "DistributedFS": shared}

    def size(blocks: int) -> str:
        return f"{max(1, blocks) * ROW_BYTES}B"

    config = OpalConfig(
        kvc_tiers=tuple(name for name, blocks in names.items() if blocks),
        CPUMemory=CPUMemoryConfig(capacity_GB=size(memory)),
        LocalNVMe=LocalNVMeConfig(
            path="unused",
            capacity_GB=size(disk),
            write=write,  # type: ignore[arg-type]
            admission="always",
        ),
        DistributedFS=DistributedFSConfig(
            path="unused",
            capacity_GB=size(shared),
            write=write,  # type: ignore[arg-type]
            admission="always",
        ),
    )
    return ReplaySettings(config=config, bytes_per_token=BYTES_PER_TOKEN, **others)  # type: ignore[arg-type]
