"""A candidate at work in a tier that holds keys of the sample only."""

from opal_connector.eviction.base import Key
from opal_connector.eviction.handover import Candidate


class Shadow:
    """A small tier with the policy of one candidate, whose chains are complete like those of ours.

    As in the books, a key with a child here is pinned, so that only the ends of chains leave: ARC
    and S3-FIFO are much better under that rule than without.

    Mutable state: `policy`, `limit` (keys), `_parents` (of every key held), `_children` (their
    number, per parent whether it is held or not).
    """

    def __init__(self, candidate: type[Candidate]) -> None:
        self.policy = candidate()
        self.limit = 1
        self._parents: dict[Key, Key | None] = {}
        self._children: dict[Key, int] = {}

    def access(self, key: Key, parent: Key | None) -> bool:
        """Use a key, or bring it in; says whether it was here."""
        if key in self._parents:
            self.policy.touch(key)
            return True
        if parent is not None and len(self._parents) >= self.limit and parent not in self._parents:
            return False  # nobody would find it
        policy = self.policy
        if parent is not None:
            count = self._children.get(parent, 0)
            self._children[parent] = count + 1
            if not count and parent in self._parents:
                policy.pin(parent)
        while len(self._parents) >= self.limit:
            victims = policy.evict(1)
            if victims is None:  # a chain that is longer than the tier
                self._abandon(parent)
                return False
            self._abandon(self._parents.pop(victims[0]))
        policy.insert(key)
        self._parents[key] = parent
        if key in self._children:
            policy.pin(key)
        return False

    def remove(self, key: Key) -> None:
        """Take a key away if it is here."""
        if key in self._parents:
            self.policy.remove(key)
            self._abandon(self._parents.pop(key))

    def __contains__(self, key: object) -> bool:
        return key in self._parents

    def __len__(self) -> int:
        return len(self._parents)

    def check(self) -> None:
        """Compare pins and policy with the keys.

        Raises:
            AssertionError: They differ.
        """
        self.policy.check()
        assert len(self.policy) == len(self._parents)
        assert all(key in self.policy for key in self._parents), "the policy lost a key"
        counts: dict[Key, int] = {}
        for parent in self._parents.values():
            if parent is not None:
                counts[parent] = counts.get(parent, 0) + 1
        assert counts == self._children, "children are counted wrong"

    def _abandon(self, parent: Key | None) -> None:
        if parent is None:
            return
        count = self._children[parent] - 1
        if count:
            self._children[parent] = count
            return
        del self._children[parent]
        if parent in self._parents:
            self.policy.unpin(parent)
