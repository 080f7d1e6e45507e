"""What the books remember about one request while it lives."""

from collections.abc import Sequence

import msgspec

from opal_connector.keys import TokenChain
from opal_connector.managers.hints import NO_HINTS, RequestHints
from opal_connector.managers.records import ObjectKey, ObjectState
from opal_connector.managers.segments import Segment


class Lease(msgspec.Struct, gc=False):
    """Objects promised to a request between its lookup and its load.

    `asked` is the question (version of the books, computed blocks, most blocks): while it is the
    same, asking again costs nothing. `block_count` are the hash blocks that it adds. `deadline`
    (monotonic seconds) is the safety net, not the mechanism.
    """

    asked: tuple[int, int, int]
    computed_blocks: int
    segments: tuple[Segment, ...]
    block_count: int = 0
    deadline: float = 0.0

    def still_answers(self, asked: tuple[int, int, int]) -> bool:
        """Whether all of it is still the beginning of the answer, whatever the books gained."""
        return self.asked[1:] == asked[1:] and all(
            segment.record.state is ObjectState.READY for segment in self.segments
        )


class OpalRequest:
    """One request's chain, its lease and how far it is stored.

    Mutable state: everything below; guarded by the lock of `OpalKVCacheManager`, except `chain`,
    which belongs to the thread that calls for this request.
    """

    __slots__ = (
        "asked_key",
        "chain",
        "drop_reason",
        "failed_loads",
        "hints",
        "hit_tokens",
        "joins",
        "junction_blocks",
        "lease",
        "lora_name",
        "next_chunks",
        "owner",
        "question",
        "request_id",
        "stored_tokens",
        "used",
        "waiting_since",
    )

    def __init__(
        self,
        request_id: str,
        chain: TokenChain,
        lora_name: str | None = None,
        *,
        owner: str = "",
        hints: RequestHints = NO_HINTS,
        groups: int = 1,
    ) -> None:
        self.request_id = request_id
        self.chain = chain
        self.lora_name = lora_name
        self.owner = owner
        self.hints = hints
        self.lease: Lease | None = None
        self.next_chunks = [0] * groups  # per attention group: the first chunk not stored
        self.joins: set[int] = set()  # hash blocks where it went on, and where its prompt ended
        self.failed_loads = 0  # of which nothing could be used
        self.junction_blocks = 0  # where others that began alike went on otherwise
        self.waiting_since: float | None = None
        self.hit_tokens: dict[str, int] = {}
        self.stored_tokens = 0
        self.drop_reason: str | None = None  # of the last store plan
        self.question: tuple[int, float] | None = None  # to a shared tier, and when it is too late
        self.asked_key: bytes | None = None
        self.used: set[ObjectKey] = set()  # by its loads and stores: not to be counted again

    def store_again(self) -> None:
        """Look at all chunks again when something is to be stored; what is there stays."""
        self.next_chunks = [0] * len(self.next_chunks)

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash what is new of the request's tokens."""
        self.chain.extend(tokens)
