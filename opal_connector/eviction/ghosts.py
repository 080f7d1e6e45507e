"""Keys that have left, remembered for a while."""

from collections import OrderedDict

from opal_connector.eviction.base import Key


class Ghosts(OrderedDict[Key, None]):
    """A queue of keys that are not held any more, the first to be forgotten first.

    Mutable state: that of the dictionary.
    """

    def add(self, key: Key) -> None:
        """Remember a key that has just left."""
        self[key] = None

    def discard(self, key: Key) -> bool:
        """Forget a key, and say whether it was remembered."""
        if key in self:
            del self[key]
            return True
        return False

    def trim(self, limit: int) -> None:
        """Forget the first ones until no more than `limit` are left."""
        while len(self) > limit:
            self.popitem(last=False)
