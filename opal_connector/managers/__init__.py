"""The books: what is where, what may leave, what is promised to whom. Never any I/O."""

from opal_connector.managers.build import build_manager
from opal_connector.managers.coordinator import (
    HitPlan,
    NoPrefixCache,
    OpalKVCacheCoordinator,
    Unitary,
)
from opal_connector.managers.lookups import LookupResult, LookupState
from opal_connector.managers.manager import OpalKVCacheManager
from opal_connector.managers.records import ObjectRecord, ObjectSpec, ObjectState, object_key
from opal_connector.managers.request import OpalRequest
from opal_connector.managers.single_type import (
    SINGLE_TYPE_MANAGERS,
    FullAttentionManager,
    Segment,
    SingleTypeManager,
)
from opal_connector.managers.storage_backend import OpalStorageBackend, Refusal
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.managers.tier_pool import TierPool

__all__ = [
    "SINGLE_TYPE_MANAGERS",
    "FullAttentionManager",
    "HitPlan",
    "LookupResult",
    "LookupState",
    "NoPrefixCache",
    "ObjectRecord",
    "ObjectSpec",
    "ObjectState",
    "OpalKVCacheCoordinator",
    "OpalKVCacheManager",
    "OpalRequest",
    "OpalStorageBackend",
    "OpalStorageManager",
    "Refusal",
    "Segment",
    "SingleTypeManager",
    "TierPool",
    "Unitary",
    "build_manager",
    "object_key",
]
