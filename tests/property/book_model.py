"""What the books hold according to their own events, and the jobs that are in motion."""

from collections.abc import Iterator, Sequence, Set
from itertools import takewhile

from hypothesis import strategies as st

from opal_connector.events import ObjectFact
from opal_connector.keys import CHAIN_ROOT, HASH_BYTES
from opal_connector.managers import OpalKVCacheManager, OpalRequest
from opal_connector.transfers import (
    FailureKind,
    JobResult,
    LoadJob,
    ObjectTransfer,
    StoreJob,
)

Key = tuple[str, bytes]

# Prompts of two kinds of block that share beginnings and part inside and at the ends of chunks.
BASES = ([0] * 9, [0, 0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 1, 1, 1, 1], [1, 0] * 4)
BLOCKS = st.builds(
    lambda base, cut, tail: [*base[:cut], *tail],
    st.sampled_from(BASES),
    st.integers(0, 9).map(lambda drawn: 9 - drawn),
    st.lists(st.integers(0, 1), max_size=2),
)


def hashes_of(run: bytes) -> list[bytes]:
    return [run[start : start + HASH_BYTES] for start in range(0, len(run), HASH_BYTES)]


def common_blocks(left: bytes, right: bytes) -> int:
    """Blocks at the start of both runs that are the same, one by one."""
    pairs = zip(hashes_of(left), hashes_of(right), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def rows_at_rest(manager: OpalKVCacheManager) -> dict[Key, tuple[int, ...]]:
    """The rows of every readable object."""
    rows: dict[Key, tuple[int, ...]] = {}
    for tier in manager.storage.tiers:
        for key in tier.index.readable_keys():
            record = tier.get(key)
            assert record is not None
            rows[tier.tier, key] = record.rows
    return rows


class Contents:
    """Objects by tier and key as the events tell it, and which stay of a key this is.

    Mutable state: `facts`, and `born`, the number of the insertion of each.
    """

    def __init__(self) -> None:
        self.facts: dict[Key, ObjectFact] = {}
        self.born: dict[Key, int] = {}
        self._count = 0

    def common(self, run: bytes, *, without: Key | None = None) -> int:
        """Blocks of `run` that some object holds."""
        return max(
            (
                common_blocks(fact.block_hashes, run)
                for key, fact in self.facts.items()
                if key != without
            ),
            default=0,
        )

    def insert(self, key: Key, fact: ObjectFact) -> None:
        assert key not in self.facts, "inserted twice"
        parents = {CHAIN_ROOT, *(other.chunk_hash for other in self.facts.values())}
        assert fact.parent_hash in parents, "announced before its parent"
        assert fact.shared_blocks == self.common(fact.block_hashes), "shares otherwise"
        self._count += 1
        self.facts[key], self.born[key] = fact, self._count

    def delete(self, key: Key, fact: ObjectFact) -> int:
        """Returns which stay ended."""
        known = self.facts.pop(key)
        assert (known.parent_hash, known.block_hashes) == (fact.parent_hash, fact.block_hashes)
        assert fact.shared_blocks == self.common(fact.block_hashes), "shares otherwise"
        return self.born.pop(key)

    def stay_of(self, item: ObjectTransfer, manager: OpalKVCacheManager) -> int:
        """Which object the rows of a load belong to, now."""
        name = manager.tier_names[item.tier]
        for (tier, key), rows in rows_at_rest(manager).items():
            if tier == name and set(item.tier_rows) <= set(rows):
                return self.born[tier, key]
        raise AssertionError("a load reads rows that belong to no object")

    def blocks(self) -> set[bytes]:
        """The hashes of all blocks that can be had."""
        return {block for fact in self.facts.values() for block in hashes_of(fact.block_hashes)}

    def expect(
        self,
        hashes: Sequence[bytes],
        computed: int,
        limit: int,
        *,
        chunk_blocks: int,
        busy: Set[int],
    ) -> tuple[int, int, int]:
        """What a lookup may find: the longest common beginning, by looking at every object (I4).

        Returns:
            The fewest and the most blocks if what is being loaded (`busy` stays) is left out, for
            two siblings may serve alike and only one be busy; and all blocks.
        """
        held = self.blocks()
        total = 0
        while computed + total < limit and hashes[computed + total] in held:
            total += 1
        lower: int | None = None
        upper: int | None = None
        block = computed
        while block < computed + total:
            start = block - block % chunk_blocks
            stop = min(start + chunk_blocks, limit)
            servers = self.servers(
                b"".join(hashes[start:stop]), is_whole=stop - start == chunk_blocks
            )
            is_busy = [self.born[key] in busy for key in servers]
            if lower is None and any(is_busy):
                lower = block - computed
            if upper is None and all(is_busy):
                upper = block - computed
            block = stop
        return total if lower is None else lower, total if upper is None else upper, total

    def servers(self, wanted: bytes, *, is_whole: bool) -> list[Key]:
        """The objects that may serve a chunk: the chunk itself, or those that share most of it."""
        own = [key for key, fact in self.facts.items() if fact.block_hashes == wanted]
        if is_whole and own:
            return own
        best = self.common(wanted)
        return [
            key
            for key, fact in self.facts.items()
            if common_blocks(fact.block_hashes, wanted) == best
        ]


class Writes:
    """Objects that are being written, and those that are written and wait for their parent.

    Mutable state: `on_the_way`, the runs of both by chunk hash, and `waiting` by parent.
    """

    def __init__(self) -> None:
        self.on_the_way: dict[bytes, bytes] = {}
        self.waiting: dict[bytes, list[bytes]] = {}

    def begin(self, run: bytes) -> None:
        assert run[-HASH_BYTES:] not in self.on_the_way, "written twice at once"
        self.on_the_way[run[-HASH_BYTES:]] = run

    def end(self, run: bytes, parent: bytes, *, stored: bool, there: Set[bytes]) -> list[bytes]:
        """The runs that begin to be there; `there` are the objects (chunk hashes) before that."""
        if stored and parent != CHAIN_ROOT:
            if parent in self.on_the_way:
                self.waiting.setdefault(parent, []).append(run)
                return []
            stored = parent in there
        chunk = run[-HASH_BYTES:]
        del self.on_the_way[chunk]
        published = [run] if stored else []
        for child in self.waiting.pop(chunk, []):
            published += self.end(child, chunk, stored=stored, there=there | {chunk})
        return published

    def coming(self) -> set[bytes]:
        """The hashes of all blocks that may begin to be there."""
        return {block for run in self.on_the_way.values() for block in hashes_of(run)}

    def clear(self) -> None:
        self.on_the_way.clear()
        self.waiting.clear()


class Job:
    """A planned job, the objects it uses, and what its ranks still owe.

    Mutable state: the ranks that have not executed, the results not committed, what failed.
    """

    def __init__(
        self,
        job: LoadJob | StoreJob,
        ranks: int,
        epoch: int,
        *,
        stays: Sequence[int] = (),
        parents: Sequence[bytes] = (),
    ) -> None:
        self.job = job
        self.epoch = epoch
        self.stays = stays  # of a load: the object behind each transfer
        self.parents = parents  # of a store: the hash before each object
        self.to_execute = list(range(ranks))
        self.to_commit: list[JobResult] = []
        self.failed: dict[int, set[FailureKind]] = {}
        self.answers_left = ranks

    @property
    def is_load(self) -> bool:
        return isinstance(self.job, LoadJob)


def promised_rows(
    requests: Sequence[OpalRequest], jobs: Sequence[Job]
) -> Iterator[tuple[int, bytes]]:
    """Rows of objects that are promised or being loaded, and the block that each must hold."""
    for request in requests:
        for segment in request.lease.segments if request.lease is not None else ():
            yield from zip(segment.record.rows, hashes_of(segment.record.run), strict=True)
    for job in jobs:
        if job.is_load:
            for item in job.job.objects:
                yield from zip(item.tier_rows, hashes_of(item.stamps), strict=True)
