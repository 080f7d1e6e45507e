"""Identity: tokens to hashes, engine facts to namespaces.

Nothing here knows a tier, an engine or a clock.
"""

from opal_connector.keys.chain import (
    CHAIN_ROOT,
    HASH_BYTES,
    LoraIdentity,
    MultimodalSpan,
    RequestIdentity,
    TokenChain,
    canonical_extras,
    packed_tokens,
)
from opal_connector.keys.database import ChunkSpan, OpalTokenDatabase
from opal_connector.keys.metadata import OpalCacheEngineKey, OpalEngineMetadata
from opal_connector.keys.weights import directory_fingerprint, weights_fingerprint

__all__ = [
    "CHAIN_ROOT",
    "HASH_BYTES",
    "ChunkSpan",
    "LoraIdentity",
    "MultimodalSpan",
    "OpalCacheEngineKey",
    "OpalEngineMetadata",
    "OpalTokenDatabase",
    "RequestIdentity",
    "TokenChain",
    "canonical_extras",
    "directory_fingerprint",
    "packed_tokens",
    "weights_fingerprint",
]
