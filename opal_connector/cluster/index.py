"""Which workers hold which blocks, and how far each of them could serve a sequence.

Every segment carries the workers that reach its end from the start of the sequence without a gap,
kept up to date with every change. Along a sequence these sets only shrink, so what a worker can
serve is where it drops out, and a match costs one look per segment, whatever holes there are.
"""

from collections.abc import Callable, Iterator, Sequence

from opal_connector.cluster.segments import (
    MAX_SEGMENT_BLOCKS,
    Masks,
    Segment,
    SegmentTree,
    alike_blocks,
)
from opal_connector.cluster.worker_names import WorkerNames
from opal_connector.keys import CHAIN_ROOT, HASH_BYTES

DEVICE_COLUMN = 0
_EVERYBODY = -1
_WALK = 4  # segments without a change before leaps are tried
_FIRST_LEAP = 16  # blocks


class PrefixIndex:
    """The blocks of one attention group that workers hold, by tier.

    Column 0 is the device. Of a shared column, a holder is who says that the block is there, and
    everybody who mounts it can serve it. Mutable state: the tree, the masks of its segments and
    who mounts what; used by one thread.
    """

    def __init__(self) -> None:
        self.tree = SegmentTree()
        self._mounts: dict[int, int] = {}
        self._alone: dict[tuple[int, int], Masks] = {}

    @property
    def block_count(self) -> int:
        """Distinct blocks."""
        return len(self.tree.blocks)

    def set_mounts(self, column: int, workers: int) -> None:
        """Say who can serve what is held in a shared column. Costs a walk over everything."""
        if self._mounts.get(column) == workers:
            return
        self._mounts[column] = workers
        for segment in self.tree:  # parents first
            self._set_reach(segment)

    # ---- facts ----

    def insert(self, column: int, bit: int, parent_hash: bytes, hashes: list[bytes]) -> list[bytes]:
        """A worker holds these blocks, each the parent of the next, the first below `parent_hash`.

        Returns:
            Those that it did not hold before.

        Raises:
            ValueError: A block is named twice.
        """
        distinct = set(hashes)
        if len(distinct) != len(hashes) or parent_hash in distinct:
            raise ValueError("a block is named twice")
        blocks = self.tree.blocks
        if blocks.keys().isdisjoint(distinct):
            self._grow(column, bit, parent_hash, hashes)
            return hashes
        changed: list[bytes] = []
        start, count = 0, len(hashes)
        while start < count:
            segment = blocks.get(hashes[start])
            if segment is None:
                stop = start + 1
                while stop < count and hashes[stop] not in blocks:
                    stop += 1
                fresh = hashes[start:stop]
                self._grow(column, bit, parent_hash, fresh)
                changed += fresh
            else:
                offset, stop = _common(segment, hashes, start)
                if not _mask(segment.held, column) & bit:
                    part = self.tree.carve(segment, offset, offset + stop - start)
                    part.held = _with(part.held, column, _mask(part.held, column) | bit)
                    self._refresh(part)
                    self.tree.merge_around(part)
                    changed += hashes[start:stop]
            parent_hash = hashes[stop - 1]
            start = stop
        return changed

    def delete(self, column: int, bit: int, hashes: list[bytes]) -> list[bytes]:
        """A worker does not hold these blocks any more, in any order.

        Returns:
            Those that it held before.
        """
        blocks = self.tree.blocks
        changed: list[bytes] = []
        start, count = 0, len(hashes)
        while start < count:
            segment = blocks.get(hashes[start])
            if segment is None:
                start += 1
                continue
            offset, stop = _common(segment, hashes, start)
            if _mask(segment.held, column) & bit:
                self._release(segment, offset, offset + stop - start, column, bit)
                changed += hashes[start:stop]
            start = stop
        return changed

    def delete_tail(self, column: int, bit: int, run: bytes) -> bool:
        """`delete` of a run that is just the end of a segment, as evictions mostly are.

        Returns:
            Whether it was; else nothing has happened.
        """
        first = run[:HASH_BYTES]
        segment = self.tree.blocks.get(first)
        if segment is None or not _mask(segment.held, column) & bit:
            return False
        own = segment.hashes
        start = len(own) - len(run) // HASH_BYTES
        # Joined, the hashes compare in one go, and those of the run need not be made.
        if start < 0 or own[start] != first or b"".join(own[start:]) != run:
            return False
        self._release(segment, start, len(own), column, bit)
        return True

    def clear(self, column: int, bit: int) -> int:
        """A worker holds nothing in a column any more. Costs a walk over everything.

        Returns:
            The number of blocks that it held.
        """
        held = [segment for segment in self.tree if _mask(segment.held, column) & bit]
        cleared = 0
        for segment in reversed(held):  # children first: less to refresh
            cleared += len(segment.hashes)
            segment.held = _with(segment.held, column, _mask(segment.held, column) & ~bit)
            if segment.held:
                continue
            for waiting in self.tree.remove(segment):
                self._refresh(waiting)
        for segment in held:
            if segment.held:
                self._refresh(segment)
        self._merge_all()
        return cleared

    def held_by(self, column: int, bit: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """The runs of blocks that a worker holds in a column, each with the hash above it."""
        for segment in self.tree:
            if _mask(segment.held, column) & bit:
                yield segment.parent_hash, segment.hashes

    # ---- questions ----

    def walk(self, hashes: Sequence[bytes], workers: int) -> Iterator[tuple[int, Segment]]:
        """The segments of a sequence that any of `workers` reaches, each with where it ends."""
        blocks = self.tree.blocks
        start, count = 0, len(hashes)
        while start < count:
            segment = blocks.get(hashes[start])
            if segment is None or not segment.reach & workers:
                return
            own = segment.hashes
            stop = start + len(own)
            if stop > count or hashes[stop - 1] != own[-1]:
                yield start + alike_blocks(own, hashes, start), segment
                return
            yield stop, segment
            start = stop

    def depths(self, hashes: Sequence[bytes], workers: int, names: WorkerNames) -> dict[str, int]:
        """Per worker the blocks from the start of a sequence that it reaches, if any.

        From one change to the next it walks a few segments, and leaps where there are more: what
        is reached only shrinks along a sequence, so a leap over no change has missed none.
        """
        get, known = self.tree.blocks.get, names.known.get
        found: dict[str, int] = {}
        count = len(hashes)
        segment = get(hashes[0]) if count else None
        alive = workers & segment.reach if segment is not None else 0
        start = 0  # the head of `segment`, which all of `alive` reach
        while alive and segment is not None:
            walk = _WALK
            while True:  # until something changes at `stop`
                own = segment.hashes
                length = len(own)
                stop = start + length
                if stop >= count or (length > 1 and hashes[stop - 1] != own[-1]):
                    stop = start + alike_blocks(own, hashes, start)
                    following, left = None, 0
                    break
                following = get(hashes[stop])
                if following is None:
                    left = 0
                    break
                left = alive & following.reach
                if left != alive:
                    break
                segment, start = following, stop
                if not walk:
                    stop = _leap(get, hashes, start, alive)
                    following = get(hashes[stop]) if stop < count else None
                    left = alive & following.reach if following is not None else 0
                    break
                walk -= 1
            dropped = alive ^ left
            for name in known(dropped) or names.of(dropped):
                found[name] = stop
            alive, segment, start = left, following, stop
        return found

    def served_by(self, column: int, holders: int) -> int:
        """The workers that can serve what these hold in a column."""
        return self._mounts.get(column, holders) if holders else 0

    def served_from_tiers(self, segment: Segment) -> int:
        """The workers that can load a segment from a tier, wherever it is."""
        held = segment.held
        workers = 0
        for column in range(1, len(held)):
            workers |= self.served_by(column, held[column])
        return workers

    # ---- inside ----

    def _grow(self, column: int, bit: int, parent_hash: bytes, hashes: list[bytes]) -> None:
        """Blocks that nobody held: behind the segment of their parent if it is alike, else new."""
        tree = self.tree
        held = self._alone.get((column, bit))
        if held is None:
            held = self._alone[(column, bit)] = (*(0,) * column, bit)
        parent = tree.blocks.get(parent_hash)
        if (
            parent is not None
            and parent.held == held
            and parent.children is None
            and parent.hashes[-1] == parent_hash
            and len(parent.hashes) + len(hashes) <= MAX_SEGMENT_BLOCKS
        ):
            tree.extend(parent, hashes)
        else:
            above = parent_hash
            for start in range(0, len(hashes), MAX_SEGMENT_BLOCKS):
                part = hashes[start : start + MAX_SEGMENT_BLOCKS]
                tree.add(part, held, above)
                self._refresh(tree.blocks[part[0]])
                above = part[-1]
        for waited in tree.adopt(hashes):
            self._refresh(waited)
        tree.merge_around(tree.blocks[hashes[0]])
        tree.merge_around(tree.blocks[hashes[-1]])

    def _release(self, segment: Segment, start: int, stop: int, column: int, bit: int) -> None:
        tree = self.tree
        remaining = _with(segment.held, column, _mask(segment.held, column) & ~bit)
        if start and stop == len(segment.hashes):
            if not remaining and segment.children is None:
                tree.cut_tail(segment, start)
                return
            if remaining and tree.shift_tail(segment, start, remaining):
                return
        part = tree.carve(segment, start, stop)
        part.held = remaining
        if remaining:
            self._refresh(part)
            tree.merge_around(part)
            return
        parent = part.parent
        for waiting in tree.remove(part):
            self._refresh(waiting)
        if parent is not None:
            tree.merge_around(parent)

    def _refresh(self, segment: Segment) -> None:
        """Bring the reach of a segment up to date, and of all below it that change with it."""
        stack = [segment]
        while stack:
            changed = stack.pop()
            if self._set_reach(changed) and changed.children:
                stack.extend(changed.children)

    def _set_reach(self, segment: Segment) -> bool:
        parent = segment.parent
        if parent is not None:
            device_above, above = parent.device_reach, parent.reach
        else:
            device_above = above = _EVERYBODY if segment.parent_hash == CHAIN_ROOT else 0
        held = segment.held
        device = held[0] & device_above
        anywhere = device
        for column in range(1, len(held)):
            anywhere |= self.served_by(column, held[column])
        reach = anywhere & above
        if device == segment.device_reach and reach == segment.reach:
            return False
        segment.device_reach = device
        segment.reach = reach
        return True

    def _merge_all(self) -> None:
        merged = True
        while merged:
            before = self.tree.segment_count
            for segment in list(self.tree):
                if segment.parent is not None or segment.children is not None:
                    self.tree.merge_around(segment)
            merged = self.tree.segment_count < before


def _mask(held: Masks, column: int) -> int:
    return held[column] if column < len(held) else 0


def _with(held: Masks, column: int, mask: int) -> Masks:
    """The masks with another one in a column; zeros at the end are cut off."""
    masks = [*held, *(0,) * (column + 1 - len(held))]
    masks[column] = mask
    while masks and not masks[-1]:
        masks.pop()
    return tuple(masks)


def _common(segment: Segment, hashes: list[bytes], start: int) -> tuple[int, int]:
    """Where `hashes[start]` lies in its segment, and how far the two go on alike."""
    own = segment.hashes
    offset = len(own) - len(hashes) + start  # if both end together, as where a tail leaves
    if offset < 0 or own[offset] != hashes[start]:
        offset = segment.offset(hashes[start])
    length = min(len(own) - offset, len(hashes) - start)
    if length == 1 or own[offset : offset + length] == hashes[start : start + length]:
        return offset, start + length
    stop = start + 1
    while own[offset + stop - start] == hashes[stop]:
        stop += 1
    return offset, stop


def _leap(
    get: Callable[[bytes], Segment | None], hashes: Sequence[bytes], inside: int, workers: int
) -> int:
    """The first block behind `inside` that not all of `workers` reach."""
    count = len(hashes)
    leap = _FIRST_LEAP
    outside = inside + leap
    while outside < count:
        segment = get(hashes[outside])
        if segment is None or segment.reach & workers != workers:
            break
        inside = outside
        leap += leap
        outside = inside + leap
    outside = min(outside, count)
    while outside - inside > 1:
        middle = (inside + outside) >> 1
        segment = get(hashes[middle])
        if segment is None or segment.reach & workers != workers:
            outside = middle
        else:
            inside = middle
    return outside
