"""Sizes that people write, and the chunk that follows from a size in tokens."""

import pytest

from opal_connector.config import chunk_blocks_for, parse_size_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [
        (8, 8 * GIB),
        (0.5, GIB // 2),
        ("8", 8 * GIB),
        ("0.5", GIB // 2),
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        (" 1.5 GB ", 1_500_000_000),
        ("1GiB", GIB),
        ("1TiB", GIB << 10),
        ("2TB", 2 * 10**12),
        ("3kB", 3000),
        ("3KiB", 3072),
        ("1b", 1),
        ("100000000B", 10**8),
    ],
)
def test_size_is_read(value: float | str, size_bytes: int) -> None:
    """A number counts GiB, also in quotes; a unit says itself what it counts."""
    assert parse_size_bytes(value) == size_bytes


@pytest.mark.parametrize(
    "value", [0, -1, 1e-10, "0", "0GB", "-1GB", "", "GB", "1 XB", "1e3MB", "1,5GB", "1GB2", "٣GB"]
)
def test_size_that_is_none_is_refused(value: float | str) -> None:
    """Nothing is guessed: what is not clearly a positive size is an error."""
    with pytest.raises(ValueError, match=r"is not a"):
        parse_size_bytes(value)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_endless_size_is_refused(value: float) -> None:
    """JSON of Python may carry these."""
    with pytest.raises((ValueError, OverflowError)):
        parse_size_bytes(value)


def blocks_of(chunk_size: int | str, block_tokens: int = 16, block_bytes: int = 1 << 10) -> int:
    """Blocks of a chunk, where no warning is due."""
    return chunk_blocks_for(
        chunk_size, block_tokens=block_tokens, block_bytes=block_bytes, warn=pytest.fail
    )


@pytest.mark.parametrize(
    ("chunk_size", "block_tokens", "blocks"),
    [(256, 16, 16), (16, 16, 1), (128, 128, 1), (32, 8, 4)],
)
def test_chunk_is_whole_blocks(chunk_size: int, block_tokens: int, blocks: int) -> None:
    """A size that the block size divides is taken as it is, without a word."""
    assert blocks_of(chunk_size, block_tokens) == blocks


@pytest.mark.parametrize(
    ("chunk_size", "block_tokens", "blocks"),
    [(1, 16, 1), (15, 16, 1), (17, 16, 1), (31, 16, 2), (256, 96, 3), (100, 128, 1), (260, 16, 16)],
)
def test_chunk_that_blocks_do_not_divide_is_rounded_with_a_warning(
    chunk_size: int, block_tokens: int, blocks: int
) -> None:
    """The nearest number of whole blocks, at least one, and the user is told which."""
    warnings: list[str] = []

    rounded = chunk_blocks_for(
        chunk_size, block_tokens=block_tokens, block_bytes=1024, warn=warnings.append
    )

    assert rounded == blocks
    assert warnings == [
        f"chunk_size {chunk_size} is not a multiple of the block size {block_tokens}: "
        f"chunks hold {blocks * block_tokens} tokens"
    ]


@pytest.mark.parametrize(
    ("block_bytes", "blocks"),
    [
        (2 << 20, 1),
        (1 << 20, 2),
        (100 << 20, 1),
        (3 << 20, 1),
        (600 << 10, 3),
        (1, 2 << 20),
    ],
)
def test_auto_chunk_is_nearest_to_2_mib(block_bytes: int, blocks: int) -> None:
    """Large enough to be worth a transfer, whatever a token of the model weighs."""
    assert blocks_of("auto", block_bytes=block_bytes) == blocks
