"""What the books of an engine hold, for a thread that must not make the engine wait."""

from collections.abc import Iterator, Sequence

from opal_connector.events import ObjectFact
from opal_connector.managers import ObjectRecord, OpalKVCacheManager
from opal_connector.transfers import TierHealth


class BookFacts:
    """Reads the books from another thread. Holds no state of its own.

    A list of a dictionary's values is taken in one step of the interpreter, and what is read of a
    record later is its state then: facts may be younger than the listing, which the channel allows.
    """

    def __init__(self, manager: OpalKVCacheManager, groups: Sequence[int] = (0,)) -> None:
        self._manager = manager
        self._tiers = {tier.tier: tier for tier in manager.storage.tiers}
        self.places = tuple((group, tier) for tier in self._tiers for group in groups)

    def is_complete(self, tier: str) -> bool:
        """Whether a tier's objects from before have all been entered."""
        return self._tiers[tier].health is not TierHealth.OPENING

    def list_facts(self, group: int, tier: str) -> Iterator[ObjectFact]:
        """The readable objects of a group in a tier."""
        self.pass_lock()  # what was announced before is in the books then
        return _facts(list(self._tiers[tier].index.records.values()), group)

    def pass_lock(self) -> None:
        """Wait for whoever changes the books now; he says what he did before he has finished."""
        self._manager.is_held(b"")


def _facts(records: Sequence[ObjectRecord], group: int) -> Iterator[ObjectFact]:
    for record in records:
        if record.group == group and record.is_readable:
            yield ObjectFact(group, record.parent_hash, record.run)
