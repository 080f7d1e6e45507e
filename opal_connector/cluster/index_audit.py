"""The auditors of the index: they recompute what it keeps up to date."""

from collections.abc import Iterable

from opal_connector.cluster.block_book import BlockBook
from opal_connector.cluster.index import PrefixIndex
from opal_connector.cluster.segments import MAX_SEGMENT_BLOCKS, Segment
from opal_connector.cluster.worker_state import OpalWorkerState
from opal_connector.events.digests import BucketDigests
from opal_connector.keys import CHAIN_ROOT


def audit_index(index: PrefixIndex) -> None:
    """Compare an index with itself, from nothing.

    Raises:
        AssertionError: Something in it contradicts something else.
    """
    tree = index.tree
    segments = list(tree)
    assert len(set(map(id, segments))) == len(segments) == tree.segment_count
    blocks: dict[bytes, Segment] = {}
    for segment in segments:
        assert 0 < len(segment.hashes) <= MAX_SEGMENT_BLOCKS
        assert any(segment.held[-1:]), "nobody holds it"
        for block_hash in segment.hashes:
            assert block_hash not in blocks, "a block is in two segments"
            blocks[block_hash] = segment
    assert blocks == tree.blocks
    for parent_hash, below in tree.tops.items():
        assert below, "an empty top"
        assert parent_hash not in blocks, "it waits for a block that is there"
        for segment in below:
            assert segment.parent is None
            assert segment.parent_hash == parent_hash
    for segment in segments:
        _audit_links(segment)
        _audit_reach(index, segment)


def audit_book(book: BlockBook, states: Iterable[OpalWorkerState]) -> None:
    """Compare what is counted and fingerprinted by worker with what the indexes hold.

    Raises:
        AssertionError: They contradict each other.
    """
    held: set[tuple[int, int, int]] = set()
    for state in states:
        for (group, tier), place in state.places.items():
            hashes = [found for _, found in book.contents(state, group, tier, b"")]
            digest = BucketDigests()
            digest.flip_all(hashes)
            assert len(hashes) == place.block_count
            assert digest.buckets() == place.digest.buckets()
            held.add((id(place.index), place.column, place.bit))
    for index in book.indexes():
        audit_index(index)
        for segment in index.tree:
            for column, mask in enumerate(segment.held):
                while mask:
                    assert (id(index), column, mask & -mask) in held, "held by nobody"
                    mask &= mask - 1


def _audit_links(segment: Segment) -> None:
    children = segment.children
    assert children is None or children, "an empty dict of children"
    for child in children or ():
        assert child.parent is segment
        assert child.parent_hash == segment.hashes[-1]
    if children is not None and len(children) == 1:
        (child,) = children
        fits = len(segment.hashes) + len(child.hashes) <= MAX_SEGMENT_BLOCKS
        assert not (fits and child.held == segment.held), "could be one segment"


def _audit_reach(index: PrefixIndex, segment: Segment) -> None:
    above = segment.parent
    is_rooted = segment.parent_hash == CHAIN_ROOT
    base = -1 if is_rooted and above is None else 0
    device = segment.held[0] & (above.device_reach if above is not None else base)
    anywhere = device
    for column, mask in enumerate(segment.held[1:], start=1):
        anywhere |= index.served_by(column, mask)
    assert segment.device_reach == device
    assert segment.reach == anywhere & (above.reach if above is not None else base)
