"""First in, first out."""

from typing_extensions import override

from opal_connector.eviction.base import Key
from opal_connector.eviction.lru import LRUPolicy


class FIFOPolicy(LRUPolicy):
    """Evicts the key that came in first, used or not.

    Mutable state: that of a line, which here no access changes.
    """

    @override
    def touch(self, key: Key) -> None:
        if key not in self:
            raise KeyError(key)
