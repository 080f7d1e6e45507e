"""Facts about single blocks, as the channel's answers carry them."""

from collections.abc import Iterable, Iterator
from typing import Final

from opal_connector.events import ObjectFact
from opal_connector.events.digests import HASH_BYTES

RUN_BLOCKS: Final = 1_024
Block = tuple[bytes, bytes]  # parent digest, digest


def facts_of_blocks(group: int, blocks: Iterable[Block]) -> Iterator[ObjectFact]:
    """Facts about blocks; those that follow each other are one fact."""
    run: list[bytes] = []
    run_parent = b""
    for parent, digest in blocks:
        if run and (parent != run[-1] or len(run) >= RUN_BLOCKS):
            yield ObjectFact(group, run_parent, b"".join(run))
            run = []
        if not run:
            run_parent = parent
        run.append(digest)
    if run:
        yield ObjectFact(group, run_parent, b"".join(run))


def blocks_of_fact(fact: ObjectFact, buckets: frozenset[int]) -> Iterator[ObjectFact]:
    """The blocks of a fact that fall into these buckets, one by one."""
    run = fact.block_hashes
    heads = run[::HASH_BYTES]
    if buckets.isdisjoint(heads):
        return
    for index, head in enumerate(heads):
        if head in buckets:
            start = index * HASH_BYTES
            parent = run[start - HASH_BYTES : start] if index else fact.parent_hash
            yield ObjectFact(fact.group, parent, run[start : start + HASH_BYTES])
