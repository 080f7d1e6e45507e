"""Identity: tokens to hashes, engine facts to namespaces.

Nothing here knows a tier, an engine or a clock.
"""

from opal_connector.keys.attention import (
    AttentionGroup,
    AttentionKind,
    AttentionLayout,
    plain_layout,
)
from opal_connector.keys.chain import (
    CHAIN_ROOT,
    HASH_BYTES,
    ExtraKeys,
    LoraIdentity,
    MultimodalSpan,
    RequestIdentity,
    TokenChain,
    canonical_extras,
    encoder_input_hashes,
    engine_extra_keys,
    packed_tokens,
)
from opal_connector.keys.database import ChunkSpan, OpalTokenDatabase
from opal_connector.keys.metadata import OpalCacheEngineKey, OpalEngineMetadata
from opal_connector.keys.weights import directory_fingerprint, weights_fingerprint

__all__ = [
    "CHAIN_ROOT",
    "HASH_BYTES",
    "AttentionGroup",
    "AttentionKind",
    "AttentionLayout",
    "ChunkSpan",
    "ExtraKeys",
    "LoraIdentity",
    "MultimodalSpan",
    "OpalCacheEngineKey",
    "OpalEngineMetadata",
    "OpalTokenDatabase",
    "RequestIdentity",
    "TokenChain",
    "canonical_extras",
    "directory_fingerprint",
    "encoder_input_hashes",
    "engine_extra_keys",
    "packed_tokens",
    "plain_layout",
    "weights_fingerprint",
]
