"""What a replay is told besides the trace."""

from collections.abc import Container

import msgspec

from opal_connector.config import OpalConfig, parse_size_bytes
from opal_connector.simulation.device import DEVICES, DeviceParameters


class ReplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers and their devices, and how requests run.

    Attributes:
        config: The tiers, as under vLLM. Paths are not used, and threads and time limits neither.
        devices: By tier.
        bytes_per_token: Of KV, on one rank.
        chunk_tokens: Tokens stored, loaded and evicted together; None for one hash id.
        device_blocks: Blocks of the device's own prefix cache; 0 for none.
        prefill_tokens_per_second: Speed of each request's prefill; 0 for no time at all.
        decode_tokens_per_second: Speed of each request's decode; 0 for no time at all.
        max_num_seqs: Requests that an instance serves at once, the others wait in line; 0 for any.
        prefill_concurrency: Prompts that an instance computes at once, each at that speed, the
            others wait in line; 0 for any number.
        is_sequential: Begin a request when nothing is left to do for those before it, whatever
            the timestamps say.
    """

    config: OpalConfig
    devices: dict[str, DeviceParameters] = msgspec.field(default_factory=lambda: dict(DEVICES))
    bytes_per_token: int = 128 << 10
    chunk_tokens: int | None = None
    device_blocks: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    max_num_seqs: int = 0
    prefill_concurrency: int = 0
    is_sequential: bool = False

    def capacity_bytes(self, tier: str) -> int:
        """The limit of a tier: what the configuration says, or its device."""
        capacity = self.config.tier(tier).capacity_GB
        return parse_size_bytes(self.devices[tier].capacity_GB if capacity is None else capacity)

    def with_policy(self, policy: str, keep: Container[str] = ()) -> "ReplaySettings":
        """The same with that eviction policy in every tier that is not in `keep`."""
        tiers = {
            name: msgspec.structs.replace(self.config.tier(name), eviction_policy=policy)
            for name in self.config.kvc_tiers
            if name not in keep
        }
        return msgspec.structs.replace(self, config=msgspec.structs.replace(self.config, **tiers))
