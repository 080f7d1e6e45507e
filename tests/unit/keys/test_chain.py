"""The hash chain: what it hashes, how often, and that nothing else enters it."""

import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import pytest

from opal_connector.keys import (
    CHAIN_ROOT,
    LoraIdentity,
    MultimodalSpan,
    OpalTokenDatabase,
    RequestIdentity,
    TokenChain,
    canonical_extras,
    chain,
)

BLOCK = 4
SQL = LoraIdentity(name="sql", path="/adapters/sql", fingerprint="ff")


def hashes(
    tokens: Sequence[int], identity: RequestIdentity | None = None, block_tokens: int = BLOCK
) -> list[bytes]:
    """The chain of a whole sequence, from scratch."""
    made = TokenChain(identity or RequestIdentity(), block_tokens)
    made.extend(tokens)
    return made.hashes


def naive_chain(tokens: Sequence[int], extras: Sequence[bytes]) -> list[bytes]:
    """The definition of the chain, one token at a time."""
    parent = CHAIN_ROOT
    digests = []
    for index in range(len(tokens) // BLOCK):
        digest = sha256(parent)
        for token in tokens[index * BLOCK : (index + 1) * BLOCK]:
            digest.update(struct.pack("<I", token))
        digest.update(extras[index] if index < len(extras) else b"")
        parent = digest.digest()
        digests.append(parent)
    return digests


# The definition.


def test_root_is_a_versioned_constant() -> None:
    """A change of the root orphans every cache on disk, so it cannot happen unnoticed."""
    assert CHAIN_ROOT.hex() == "54954e25d27008fb76465e96c1b6a252fa52fb8fb6e04a2034ca7babb8669b3f"


@pytest.mark.parametrize(
    ("tokens", "identity", "expected"),
    [
        (
            [0, 1, 2, 3, 4, 5, 6, 7],
            RequestIdentity(),
            [
                "fd75c6ebb5f9e3904277b26b117024d5bed3ac5bc7ee8aa7b5d659ae4dd49f7c",
                "d6a7bef54da5bbdf4826d5a100c6ef47d6aef69bb38e0e4594cefd64b4ed5b33",
            ],
        ),
        (
            [2**32 - 1, 0, 2**31, 7],
            RequestIdentity(),
            ["52023871d88223c9b2299f283ce3f828da0057aa2a17f6f857c7f9fa52ab21db"],
        ),
        (
            [1, 2, 3, 4, 1, 2, 3, 4],
            RequestIdentity(lora=SQL, cache_salt="x", multimodal=(MultimodalSpan("img", 3, 2),)),
            [
                "1a7c8d5d163a8ac65d41dcb60000b2e603b4c16c05806871f2251e301126f85e",
                "aec0f1cef5a777e114d1080776ff961fb6f6e95a272f243d67e0b55c9b4e618a",
            ],
        ),
    ],
    ids=["plain", "largest-token", "every-extra"],
)
def test_golden_digests(tokens: list[int], identity: RequestIdentity, expected: list[str]) -> None:
    """Another version of Opal reads what this one wrote: these digests never change."""
    assert [digest.hex() for digest in hashes(tokens, identity)] == expected


def test_chain_equals_its_definition() -> None:
    """The fast loop computes the chain that the router and other processes compute slowly."""
    tokens = [(index * 7919) % 50_000 for index in range(10 * BLOCK + 3)]

    assert hashes(tokens) == naive_chain(tokens, [])


def test_chain_with_extras_equals_its_definition() -> None:
    """Blocks behind the last extra take the fast loop, and it gives the same digests."""
    identity = RequestIdentity(cache_salt="x", multimodal=(MultimodalSpan("img", 6, 3),))
    tokens = list(range(6 * BLOCK))
    extras = [
        canonical_extras(identity, block_index=index, block_tokens=BLOCK) for index in range(6)
    ]

    assert [bool(extra) for extra in extras] == [True, True, True, False, False, False]
    assert hashes(tokens, identity) == naive_chain(tokens, extras)


@pytest.mark.parametrize("token", [-1, 2**32, 2**63])
def test_token_that_fits_no_uint32_is_refused_and_changes_nothing(token: int) -> None:
    """A wrapped token id would name other tokens' KV."""
    made = TokenChain(RequestIdentity(), BLOCK)
    made.extend([1, 2, 3, 4])
    before = list(made.hashes)

    with pytest.raises(OverflowError):
        made.extend([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, token, 4])

    assert made.hashes == before


# Growth.


@pytest.mark.parametrize(
    "identity",
    [
        RequestIdentity(),
        RequestIdentity(lora=SQL, cache_salt="x", multimodal=(MultimodalSpan("img", 5, 30),)),
    ],
    ids=["plain", "extras"],
)
@pytest.mark.parametrize("step", [1, 3, BLOCK, BLOCK + 1, 5 * BLOCK])
def test_incremental_equals_from_scratch(identity: RequestIdentity, step: int) -> None:
    """A sequence that grew token by token has the chain that it has at once."""
    tokens = list(range(100, 100 + 12 * BLOCK + 2))
    grown = TokenChain(identity, BLOCK)
    for length in range(0, len(tokens) + step, step):
        grown.extend(tokens[:length])

    assert grown.hashes == hashes(tokens, identity)


def test_growth_by_one_block_hashes_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding costs one digest per completed block, however long the request has become."""
    calls: list[int] = []

    def counting(data: bytes = b"") -> Any:
        calls.append(len(data))
        return sha256(data)

    monkeypatch.setattr(chain, "sha256", counting)
    tokens = list(range(500 * BLOCK))
    made = TokenChain(RequestIdentity(), BLOCK)
    made.extend(tokens)
    assert len(calls) == 500
    calls.clear()

    assert made.extend(tokens) == 0
    assert made.extend([*tokens, 1, 2, 3]) == 0
    assert calls == []
    assert made.extend([*tokens, 1, 2, 3, 4]) == 1
    assert calls == [32 + 4 * BLOCK]


def test_what_was_hashed_is_not_read_again() -> None:
    """A host may hand over a view that no longer has the beginning at hand."""

    class OnlyNewTokens(list[int]):
        def __getitem__(self, place: Any) -> Any:
            assert place.start >= 2 * BLOCK
            return super().__getitem__(place)

    tokens = list(range(3 * BLOCK))
    made = TokenChain(RequestIdentity(), BLOCK)
    made.extend(tokens[: 2 * BLOCK])

    assert made.extend(OnlyNewTokens(tokens)) == 1


# Nothing else enters the chain.


@pytest.mark.parametrize("seed", ["1", "2", None])
def test_ht_26_chain_does_not_depend_on_the_hash_seed(seed: str | None) -> None:
    """Two processes name the same tokens alike, whatever PYTHONHASHSEED they have."""
    program = (
        "from opal_connector.keys import *\n"
        "identity = RequestIdentity(lora=LoraIdentity('sql', '/adapters/sql', 'ff'),"
        " cache_salt='x', multimodal=(MultimodalSpan('img', 3, 2),))\n"
        "chunk = OpalTokenDatabase(block_tokens=4, chunk_blocks=2)"
        ".process_tokens([1, 2, 3, 4] * 2, identity)[-1].chunk_hash\n"
        "namespace = OpalEngineMetadata(weights_id='w', dtype='float32',"
        " kv_cache_dtype='float32', block_tokens=4, chunk_tokens=8,"
        " group_page_bytes=(64,)).namespace\n"
        "print(OpalCacheEngineKey(namespace, 0, 0, chunk).to_string())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed

    printed = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()

    assert printed == (
        "506fa8cd92c5400ff9510794135d08b242c564befaf69939d7a4eff5fa614ce1-0-0-"
        "aec0f1cef5a777e114d1080776ff961fb6f6e95a272f243d67e0b55c9b4e618a"
    )


# Extras.


def test_ht_20_adapters_share_no_block() -> None:
    """Equal tokens under adapter a, adapter b and no adapter are three different caches."""
    tokens = list(range(3 * BLOCK))
    identities = [
        RequestIdentity(),
        RequestIdentity(lora=SQL),
        RequestIdentity(lora=LoraIdentity("law", SQL.path, SQL.fingerprint)),
        RequestIdentity(lora=LoraIdentity(SQL.name, "/adapters/law", SQL.fingerprint)),
        RequestIdentity(lora=LoraIdentity(SQL.name, SQL.path, "fe")),
    ]

    chains = [hashes(tokens, identity) for identity in identities]

    assert len({digest for digests in chains for digest in digests}) == 3 * len(identities)


def test_ht_23_salts_share_no_block() -> None:
    """What one tenant's salt stored, another tenant's salt, or none, cannot find."""
    tokens = list(range(3 * BLOCK))
    chains = [
        hashes(tokens, RequestIdentity(cache_salt=salt)) for salt in (None, "", "x", "y", "xy")
    ]

    assert len({digest for digests in chains for digest in digests}) == 15


def test_ht_24_same_placeholders_of_other_images_share_no_block() -> None:
    """Placeholder tokens look alike; the image behind them decides."""
    tokens = [9] * (3 * BLOCK)

    first = hashes(tokens, RequestIdentity(multimodal=(MultimodalSpan("h1", 0, 8),)))
    second = hashes(tokens, RequestIdentity(multimodal=(MultimodalSpan("h2", 0, 8),)))

    assert set(first).isdisjoint(second)


def test_ht_24_same_image_at_another_offset_shares_no_block_behind_it() -> None:
    """An image at 0 and at 8 tokens: the prefix before both may be shared, nothing else."""
    tokens = [9] * (4 * BLOCK)

    at_0 = hashes(tokens, RequestIdentity(multimodal=(MultimodalSpan("h1", 0, 8),)))
    at_8 = hashes(tokens, RequestIdentity(multimodal=(MultimodalSpan("h1", 8, 8),)))
    at_9 = hashes(tokens, RequestIdentity(multimodal=(MultimodalSpan("h1", 9, 8),)))

    assert set(at_0).isdisjoint(at_8)
    assert at_8[:2] == at_9[:2] == hashes(tokens)[:2]
    assert set(at_8[2:]).isdisjoint(at_9[2:])


def test_image_changes_only_the_blocks_from_its_own_on() -> None:
    """Text before an image hits also when the image is another one."""
    tokens = [9] * (4 * BLOCK)

    with_image = hashes(tokens, RequestIdentity(multimodal=(MultimodalSpan("h1", 9, 2),)))

    assert with_image[:2] == hashes(tokens)[:2]
    assert set(with_image[2:]).isdisjoint(hashes(tokens)[2:])


@pytest.mark.parametrize(
    ("offset", "length", "blocks"),
    [
        (0, 4, {0}),
        (3, 1, {0}),
        (3, 2, {0, 1}),
        (4, 4, {1}),
        (4, 5, {1, 2}),
        (0, 12, {0, 1, 2}),
    ],
)
def test_image_is_in_the_extras_of_exactly_its_blocks(
    offset: int, length: int, blocks: set[int]
) -> None:
    """A span is half open: the block behind its last token does not name it."""
    identity = RequestIdentity(multimodal=(MultimodalSpan("h", offset, length),))

    named = {
        index
        for index in range(4)
        if canonical_extras(identity, block_index=index, block_tokens=BLOCK)
    }

    assert named == blocks


def test_kinds_of_extras_cannot_be_taken_for_each_other() -> None:
    """Tags and lengths: no text in one field can imitate another field or another kind."""
    forged = "\x03\x05\x00\x00\x00\x01\x00\x00\x00x"
    identities = [
        RequestIdentity(),
        RequestIdentity(cache_salt="a"),
        RequestIdentity(lora=LoraIdentity("a", "", "")),
        RequestIdentity(lora=LoraIdentity("", "a", "")),
        RequestIdentity(lora=LoraIdentity("", "", "a")),
        RequestIdentity(lora=LoraIdentity("a", "b", "")),
        RequestIdentity(lora=LoraIdentity("ab", "", "")),
        RequestIdentity(multimodal=(MultimodalSpan("a", 0, 4),)),
        RequestIdentity(multimodal=(MultimodalSpan("a", 0, 4), MultimodalSpan("a", 0, 4))),
        RequestIdentity(multimodal=(MultimodalSpan("aa", 0, 4),)),
        RequestIdentity(lora=LoraIdentity("a", "", ""), cache_salt="x"),
        RequestIdentity(lora=LoraIdentity("a", "", forged)),
        RequestIdentity(cache_salt=forged),
        RequestIdentity(multimodal=(MultimodalSpan(forged, 0, 4),)),
    ]

    extras = [
        canonical_extras(identity, block_index=0, block_tokens=BLOCK) for identity in identities
    ]

    assert len(set(extras)) == len(identities)


def test_chain_of_the_database_is_this_chain() -> None:
    """There is one chain: what the database hands out is the same as made by hand."""
    made = OpalTokenDatabase(block_tokens=BLOCK, chunk_blocks=2).chain(
        RequestIdentity(cache_salt="x")
    )
    made.extend(range(8))

    assert made.hashes == hashes(range(8), RequestIdentity(cache_salt="x"))
