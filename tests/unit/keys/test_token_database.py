"""Chunks of a sequence: where they begin and end, and which hashes name them."""

import pytest

from opal_connector.keys import CHAIN_ROOT, OpalTokenDatabase, RequestIdentity

BLOCK = 4
CHUNK_BLOCKS = 3
N = BLOCK * CHUNK_BLOCKS  # tokens of a chunk


def database(*, save_unfull_chunk: bool = True) -> OpalTokenDatabase:
    return OpalTokenDatabase(
        block_tokens=BLOCK, chunk_blocks=CHUNK_BLOCKS, save_unfull_chunk=save_unfull_chunk
    )


def bounds(length: int, *, save_unfull_chunk: bool = True) -> list[tuple[int, int]]:
    spans = database(save_unfull_chunk=save_unfull_chunk).process_tokens(range(length))
    return [(span.start_tokens, span.end_tokens) for span in spans]


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, []),
        (1, []),
        (BLOCK - 1, []),
        (BLOCK, [(0, BLOCK)]),
        (BLOCK + 1, [(0, BLOCK)]),
        (N - 1, [(0, N - BLOCK)]),
        (N, [(0, N)]),
        (N + 1, [(0, N)]),
        (N + BLOCK, [(0, N), (N, N + BLOCK)]),
        (2 * N - 1, [(0, N), (N, 2 * N - BLOCK)]),
        (2 * N, [(0, N), (N, 2 * N)]),
    ],
)
def test_chunks_cover_the_whole_blocks(length: int, expected: list[tuple[int, int]]) -> None:
    """Chunks adjoin from token 0, the tail is in whole blocks, a part of a block is in none."""
    assert bounds(length) == expected


@pytest.mark.parametrize(
    ("length", "expected"),
    [(N - 1, []), (N, [(0, N)]), (N + BLOCK, [(0, N)]), (2 * N, [(0, N), (N, 2 * N)])],
)
def test_tail_is_left_out_where_it_is_not_wanted(
    length: int, expected: list[tuple[int, int]]
) -> None:
    """With save_unfull_chunk off a tail is in no chunk."""
    assert bounds(length, save_unfull_chunk=False) == expected


def test_chunk_is_named_by_its_last_block_and_linked_to_its_parent() -> None:
    """Events, keys and the router link chunks by these two hashes."""
    made = database()
    tokens = list(range(2 * N + BLOCK))
    chain = made.chain()
    chain.extend(tokens)

    spans = made.process_tokens(tokens)

    assert [span.chunk_hash for span in spans] == [chain.hashes[i] for i in (2, 5, 6)]
    assert [span.parent_hash for span in spans] == [CHAIN_ROOT, chain.hashes[2], chain.hashes[5]]


def test_chunk_hash_depends_on_the_whole_prefix() -> None:
    """Equal chunks behind different beginnings are different objects."""
    one = database().process_tokens([1, *range(1, 2 * N)])
    other = database().process_tokens([2, *range(1, 2 * N)])

    assert one[1].start_tokens == other[1].start_tokens == N
    assert one[1].chunk_hash != other[1].chunk_hash


def test_chunk_size_does_not_enter_the_hash() -> None:
    """The router compares hashes of instances whose chunks differ: the chain is per block."""
    small = OpalTokenDatabase(block_tokens=BLOCK, chunk_blocks=1).process_tokens(range(N))
    large = database().process_tokens(range(N))

    assert small[-1].chunk_hash == large[-1].chunk_hash


def test_identity_reaches_the_chunks() -> None:
    """A salt given to the database is in every chunk's name."""
    plain = database().process_tokens(range(2 * N))
    salted = database().process_tokens(range(2 * N), RequestIdentity(cache_salt="x"))

    assert {span.chunk_hash for span in plain}.isdisjoint(span.chunk_hash for span in salted)


@pytest.mark.parametrize(("block_tokens", "chunk_blocks"), [(0, 1), (1, 0), (-1, 1)])
def test_sizes_below_one_are_refused(block_tokens: int, chunk_blocks: int) -> None:
    """A chunk without tokens would be in every cache."""
    with pytest.raises(ValueError, match="at least 1"):
        OpalTokenDatabase(block_tokens=block_tokens, chunk_blocks=chunk_blocks)
