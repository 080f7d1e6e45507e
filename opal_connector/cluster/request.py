"""What is asked of the index, and what it answers."""

import msgspec

from opal_connector.keys import LoraIdentity, MultimodalSpan, RequestIdentity


class PrefixRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, as far as it decides what KV can serve it.

    `model` None asks all models. An adapter is named as the request names it: which weights that
    means is known by instance.
    """

    token_ids: list[int]
    model: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    multimodal: tuple[MultimodalSpan, ...] = ()

    def identity(self, lora: LoraIdentity | None) -> RequestIdentity:
        """What the hash chain depends on besides the tokens, with these adapter weights."""
        return RequestIdentity(
            lora=lora, cache_salt=self.cache_salt or None, multimodal=self.multimodal
        )


class WorkerMatch(msgspec.Struct, frozen=True):
    """What one worker could serve of a prompt, in tokens from its start.

    `device_tokens` are on its device. `tier_tokens` are those behind them that it would load, by
    the fastest tier that has them; the sum of both is `total_tokens`.
    """

    total_tokens: int
    device_tokens: int
    tier_tokens: dict[str, int] = {}


class Replaced(msgspec.Struct, frozen=True):
    """How far what was known differed from what is."""

    added_blocks: int
    removed_blocks: int
