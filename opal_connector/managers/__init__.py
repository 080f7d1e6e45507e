"""The books: what is where, what may leave, what is promised to whom. Never any I/O."""

from opal_connector.managers.block_tables import BlockTables, StateBlock, one_table
from opal_connector.managers.build import (
    build_manager,
    build_storage,
    make_coordinator,
    tier_space,
)
from opal_connector.managers.coordinator import (
    HitPlan,
    NoPrefixCache,
    OpalKVCacheCoordinator,
    Unitary,
)
from opal_connector.managers.hints import NO_HINTS, RequestHints
from opal_connector.managers.hybrid import Hybrid
from opal_connector.managers.kinds import SINGLE_TYPE_MANAGERS, make_managers
from opal_connector.managers.lookups import LookupResult, LookupState
from opal_connector.managers.manager import OpalKVCacheManager
from opal_connector.managers.placement import TierRules
from opal_connector.managers.records import (
    ObjectGroup,
    ObjectRecord,
    ObjectSpec,
    ObjectState,
    object_key,
)
from opal_connector.managers.refusals import Refusal
from opal_connector.managers.request import OpalRequest
from opal_connector.managers.segments import Segment
from opal_connector.managers.shared_space import SharedSpace
from opal_connector.managers.single_type import FullAttentionManager, SingleTypeManager
from opal_connector.managers.storage_backend import OpalStorageBackend
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.managers.tier_pool import FileSpace, Space, TierPool

__all__ = [
    "NO_HINTS",
    "SINGLE_TYPE_MANAGERS",
    "BlockTables",
    "FileSpace",
    "FullAttentionManager",
    "HitPlan",
    "Hybrid",
    "LookupResult",
    "LookupState",
    "NoPrefixCache",
    "ObjectGroup",
    "ObjectRecord",
    "ObjectSpec",
    "ObjectState",
    "OpalKVCacheCoordinator",
    "OpalKVCacheManager",
    "OpalRequest",
    "OpalStorageBackend",
    "OpalStorageManager",
    "Refusal",
    "RequestHints",
    "Segment",
    "SharedSpace",
    "SingleTypeManager",
    "Space",
    "StateBlock",
    "TierPool",
    "TierRules",
    "Unitary",
    "build_manager",
    "build_storage",
    "make_coordinator",
    "make_managers",
    "object_key",
    "one_table",
    "tier_space",
]
