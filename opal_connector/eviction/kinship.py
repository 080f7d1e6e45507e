"""Which keys are in the sample, and on whom of them each one depends."""

from collections.abc import Container

from opal_connector.eviction.base import Key
from opal_connector.eviction.sketch import key_hash

MOST_KEYS = 2048  # held keys in the sample; between half as many and this many in a larger tier
_MOST_TAILS = 4096  # chains that may be in the making at once
_MOST_SHIFT = 8  # one byte decides


class Kinship:
    """For every key in the sample the nearest one before it in its chain that is there too.

    Keys are sampled by their own value; of a key of bytes, a digest, the first byte is as good as a
    hash. The sample follows the size: all keys of a small tier, and whenever there are more than
    `MOST_KEYS`, every second one leaves it.

    Parents come from the order of the calls, which is that of the books: a parent is pinned right
    before its child comes in, and a key that has come in is pinned once for itself. Where the
    parent is not in the sample, its own nearest relative is known if it came in lately or was the
    first of the keys that were touched one after another (the tail of a chain).

    Mutable state: `mask` (bits that are zero in the sample), `parents` (the oldest access first,
    keys that have left lately among them), `used` (those of them that were touched), `_bound` (when
    to look for what has left), and `_tails` (per end of a chain the last key in the sample).
    """

    def __init__(self) -> None:
        self.mask = 0
        self.parents: dict[Key, Key | None] = {}
        self.used: set[Key] = set()
        self._tails: dict[Key, Key | None] = {}
        self._bound = MOST_KEYS

    def is_sampled(self, key: Key) -> bool:
        """Whether a key is in the sample."""
        return not sample_bits(key) & self.mask

    def passed(self, key: Key, parent: Key | None) -> None:
        """Take note of a new key that is not in the sample."""
        if parent is None:
            return
        tails = self._tails
        if (parent[0] if type(parent) is bytes else key_hash(parent)) & self.mask:
            nearest = tails.pop(parent, None)
        else:
            nearest = parent
        if nearest is not None:
            if len(tails) >= _MOST_TAILS:
                tails.clear()
            tails[key] = nearest

    def inserted(self, key: Key, parent: Key | None, held: Container[Key]) -> bool:
        """Take note of a new key in the sample; false when a new, smaller sample begins."""
        self.parents.pop(key, None)
        self.parents[key] = None if parent is None else self._nearest(parent)
        if len(self.parents) <= self._bound:
            return True
        mask = self.mask
        self._shrink(held)
        return self.mask == mask

    def _nearest(self, parent: Key) -> Key | None:
        if (parent[0] if type(parent) is bytes else key_hash(parent)) & self.mask:
            return self._tails.pop(parent, None)
        return parent

    def touched(self, key: Key, tail: Key | None) -> Key | None:
        """Take note of an access to a key in the sample; returns its parent.

        `tail` is the end of the chain that is touched, if no other key of it was in the sample.
        """
        if tail is not None and tail != key:
            if len(self._tails) >= _MOST_TAILS:
                self._tails.clear()
            self._tails[tail] = key
        parent = self.parents.pop(key, None)
        self.parents[key] = parent
        self.used.add(key)
        return parent

    def removed(self, key: Key) -> None:
        """Forget a key that somebody took away."""
        self.parents.pop(key, None)
        self.used.discard(key)

    def _shrink(self, held: Container[Key]) -> None:
        """Forget what has left, and halve the sample if it is still too large."""
        parents = {key: parent for key, parent in self.parents.items() if key in held}
        if len(parents) > MOST_KEYS and self.mask < (1 << _MOST_SHIFT) - 1:
            self.mask = 2 * self.mask + 1
            self._tails.clear()
            parents = {
                key: self._ancestor(parent)
                for key, parent in parents.items()
                if self.is_sampled(key)
            }
        self.parents = parents
        self.used &= parents.keys()
        self._bound = max(MOST_KEYS, 2 * len(parents))

    def _ancestor(self, key: Key | None) -> Key | None:
        while key is not None and not self.is_sampled(key):
            key = self.parents.get(key)
        return key


def sample_bits(key: Key) -> int:
    """Bits of a key's own value that say whether it is in the sample."""
    return key[0] if type(key) is bytes else key_hash(key)
