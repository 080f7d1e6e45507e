"""The objects of a job while it is planned."""

from opal_connector.managers.jobs import PlannedCopy, PlannedObject
from opal_connector.transfers import ObjectTransfer


class JobDraft:
    """The objects of a job being planned: what the worker gets, and what the books keep.

    Attributes:
        transfers: For the worker.
        planned: For the books, at the same positions.
        kept: Copies that a load leaves in the first tier.
    """

    __slots__ = ("kept", "planned", "transfers")

    def __init__(self) -> None:
        self.transfers: list[ObjectTransfer] = []
        self.planned: list[PlannedObject] = []
        self.kept: dict[int, PlannedCopy] = {}
