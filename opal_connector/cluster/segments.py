"""The tree of block hashes, path-compressed: a segment is a run of blocks with the same holders.

A place is one tier of one worker: a column (the tier) and a bit (the worker) of a mask.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from opal_connector.keys import CHAIN_ROOT

MAX_SEGMENT_BLOCKS: Final = 512  # bounds what a change inside a segment costs

Masks = tuple[int, ...]  # by column, the workers that hold; no zeros at the end


class Segment:
    """A run of blocks in a row, each the parent of the next, with equal holders.

    `device_reach` are the workers whose device holds everything from the start of the sequence to
    the end of the segment; `reach` those who can serve it from the device as far as it goes and
    from any tier behind that. A segment without a parent hangs below `parent_hash`: the start of
    all sequences, or a block that nobody holds.
    """

    __slots__ = ("children", "device_reach", "hashes", "held", "parent", "parent_hash", "reach")

    def __init__(self, hashes: list[bytes], held: Masks, parent_hash: bytes) -> None:
        self.hashes = hashes
        self.held = held
        self.parent: Segment | None = None
        self.parent_hash = parent_hash
        self.children: dict[Segment, None] | None = None
        self.device_reach = 0
        self.reach = 0

    def offset(self, block_hash: bytes) -> int:
        """The position of one of its blocks; the ends, where most changes are, are found first."""
        hashes = self.hashes
        if hashes[0] == block_hash:
            return 0
        if hashes[-1] == block_hash:
            return len(hashes) - 1
        return hashes.index(block_hash)


class SegmentTree:
    """Segments, the blocks that lead to them, and what hangs where.

    Mutable state: `blocks`, from hash to segment, and `tops`, the segments without a parent by the
    hash that they hang below; used by one thread.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, Segment] = {}
        self.tops: dict[bytes, dict[Segment, None]] = {}
        self.segment_count = 0

    def __iter__(self) -> Iterator[Segment]:
        """All segments, parents before children."""
        stack = [segment for below in self.tops.values() for segment in below]
        while stack:
            segment = stack.pop()
            yield segment
            if segment.children:
                stack.extend(segment.children)

    def pieces(
        self, hashes: Sequence[bytes], start: int, stop: int
    ) -> Iterator[tuple[int, int, Segment | None]]:
        """The part of a sequence from `start` up to `stop`, segment by segment.

        Each with where it begins and ends; a single block that nobody holds has no segment.
        """
        get = self.blocks.get
        while start < stop:
            segment = get(hashes[start])
            if segment is None:
                end = start + 1
            else:
                own = segment.hashes
                offset = 0 if own[0] == hashes[start] else segment.offset(hashes[start])
                end = min(stop, start + len(own) - offset)
                if hashes[end - 1] != own[offset + end - 1 - start]:
                    end = start + alike_blocks(own, hashes, start, offset)
            yield start, end, segment
            start = end

    def add(self, hashes: list[bytes], held: Masks, parent_hash: bytes) -> None:
        """A new segment of blocks that are all new, below the block `parent_hash`."""
        segment = Segment(hashes, held, parent_hash)
        parent = self.blocks.get(parent_hash)
        if parent is not None and parent.hashes[-1] != parent_hash:
            parent = self.split(parent, parent.offset(parent_hash) + 1)[0]
        self._hang(segment, parent)
        self.segment_count += 1
        self.blocks.update(dict.fromkeys(hashes, segment))

    def extend(self, segment: Segment, hashes: list[bytes]) -> None:
        """More blocks at the end of a segment that has no children."""
        segment.hashes += hashes
        self.blocks.update(dict.fromkeys(hashes, segment))

    def adopt(self, hashes: Iterable[bytes]) -> list[Segment]:
        """Hang what waits for these new blocks below them, and say what that was."""
        if len(self.tops) <= (CHAIN_ROOT in self.tops) or self.tops.keys().isdisjoint(hashes):
            return []
        adopted: list[Segment] = []
        for block_hash in [found for found in hashes if found in self.tops]:
            parent = self.blocks[block_hash]
            if parent.hashes[-1] != block_hash:
                parent = self.split(parent, parent.offset(block_hash) + 1)[0]
            for waiting in list(self.tops[block_hash]):
                if not _is_above(waiting, parent):  # as only a forged parent can make it
                    self._unhang(waiting)
                    self._hang(waiting, parent)
                    adopted.append(waiting)
        return adopted

    def split(self, segment: Segment, at: int) -> tuple[Segment, Segment]:
        """Cut before block `at`: head and tail, of which the one that is dearer to move stays."""
        hashes = segment.hashes
        children = segment.children
        if at <= len(hashes) - at + (len(children) if children else 0):
            head = self._like(segment, hashes[:at])
            del hashes[:at]
            self._unhang(segment)
            head.parent_hash = segment.parent_hash
            self._hang(head, segment.parent)
            segment.parent_hash = head.hashes[-1]
            self._hang(segment, head)
            return head, segment
        tail = self._like(segment, hashes[at:])
        del hashes[at:]
        tail.parent_hash = hashes[-1]
        tail.children, segment.children = children, None
        for child in children or ():
            child.parent = tail
        self._hang(tail, segment)
        return segment, tail

    def carve(self, segment: Segment, start: int, stop: int) -> Segment:
        """The blocks from `start` up to `stop` as a segment of their own."""
        if stop < len(segment.hashes):
            segment = self.split(segment, stop)[0]
        if start:
            segment = self.split(segment, start)[1]
        return segment

    def merge_around(self, segment: Segment) -> None:
        """Join a segment with its only child and as the only child, where all hold the same."""
        children = segment.children
        if children and len(children) == 1:
            segment = self._merged(segment, next(iter(children)))
        parent = segment.parent
        if parent is not None and parent.children is not None and len(parent.children) == 1:
            self._merged(parent, segment)

    def remove(self, segment: Segment) -> list[Segment]:
        """Take a segment out that nobody holds any more; what hung below waits for its return.

        Returns:
            The segments that wait now.
        """
        self._unhang(segment)
        self.segment_count -= 1
        self._forget(segment.hashes)
        waiting = list(segment.children or ())
        segment.children = None
        for child in waiting:
            self._hang(child, None)
        return waiting

    def cut_tail(self, segment: Segment, at: int) -> None:
        """Forget the blocks from `at` on of a segment that has no children."""
        self._forget(segment.hashes[at:])
        del segment.hashes[at:]

    def shift_tail(self, segment: Segment, at: int, held: Masks) -> bool:
        """Give the blocks from `at` on to the only child, if it is held as they are to be.

        It is what a worker that evicts from the tail needs at every block.
        """
        children = segment.children
        if children is None or len(children) != 1:
            return False
        (child,) = children
        moved = segment.hashes[at:]
        if child.held != held or len(child.hashes) + len(moved) > MAX_SEGMENT_BLOCKS:
            return False
        child.hashes[:0] = moved
        del segment.hashes[at:]
        child.parent_hash = segment.hashes[-1]
        self.blocks.update(dict.fromkeys(moved, child))
        return True

    def _forget(self, hashes: list[bytes]) -> None:
        deque(map(self.blocks.__delitem__, hashes), maxlen=0)

    def _like(self, segment: Segment, hashes: list[bytes]) -> Segment:
        part = Segment(hashes, segment.held, b"")
        part.device_reach = segment.device_reach
        part.reach = segment.reach
        self.segment_count += 1
        self.blocks.update(dict.fromkeys(hashes, part))
        return part

    def _merged(self, parent: Segment, child: Segment) -> Segment:
        """One segment of both if they may be joined, else the parent."""
        fits = len(parent.hashes) + len(child.hashes) <= MAX_SEGMENT_BLOCKS
        if parent.held != child.held or not fits:
            return parent
        self.segment_count -= 1
        grandchildren = child.children
        if len(child.hashes) + (len(grandchildren) if grandchildren else 0) <= len(parent.hashes):
            parent.hashes += child.hashes
            self.blocks.update(dict.fromkeys(child.hashes, parent))
            parent.children = grandchildren
            for grandchild in grandchildren or ():
                grandchild.parent = parent
            child.parent = child.children = None
            return parent
        child.hashes[:0] = parent.hashes
        self.blocks.update(dict.fromkeys(parent.hashes, child))
        self._unhang(parent)
        child.parent_hash = parent.parent_hash
        self._hang(child, parent.parent)
        parent.parent = parent.children = None
        return child

    def _hang(self, segment: Segment, parent: Segment | None) -> None:
        segment.parent = parent
        if parent is None:
            self.tops.setdefault(segment.parent_hash, {})[segment] = None
        elif parent.children is None:
            parent.children = {segment: None}
        else:
            parent.children[segment] = None

    def _unhang(self, segment: Segment) -> None:
        parent = segment.parent
        if parent is None:
            below = self.tops[segment.parent_hash]
            del below[segment]
            if not below:
                del self.tops[segment.parent_hash]
        elif parent.children is not None:
            del parent.children[segment]
            if not parent.children:
                parent.children = None


def alike_blocks(own: list[bytes], hashes: Sequence[bytes], start: int, offset: int = 0) -> int:
    """How many blocks a sequence from `start` shares with a segment from `offset`; at least one."""
    alike, differs = 1, min(len(own) - offset, len(hashes) - start) + 1
    while differs - alike > 1:  # equal up to `alike`, and not so from `differs` on
        middle = (alike + differs) // 2
        if own[offset + middle - 1] == hashes[start + middle - 1]:
            alike = middle
        else:
            differs = middle
    return alike


def _is_above(segment: Segment, other: Segment | None) -> bool:
    while other is not None:
        if other is segment:
            return True
        other = other.parent
    return False
