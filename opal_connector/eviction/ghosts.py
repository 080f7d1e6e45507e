"""Keys that have left, remembered for a while."""

from collections import OrderedDict

from opal_connector.eviction.base import Key


class Ghosts:
    """A queue of keys that are not held any more, the first to be forgotten first.

    Mutable state: `_keys`.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def add(self, key: Key) -> None:
        """Remember a key that has just left."""
        self._keys[key] = None

    def discard(self, key: Key) -> bool:
        """Forget a key, and say whether it was remembered."""
        if key in self._keys:
            del self._keys[key]
            return True
        return False

    def trim(self, limit: int) -> None:
        """Forget the first ones until no more than `limit` are left."""
        while len(self._keys) > limit:
            self._keys.popitem(last=False)
