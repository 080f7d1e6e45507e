"""The namespace changes with every fact about an engine; a key survives its own text."""

from typing import Any

import msgspec
import pytest

from opal_connector.keys import HASH_BYTES, OpalCacheEngineKey, OpalEngineMetadata

METADATA = OpalEngineMetadata(
    weights_id="w",
    dtype="bfloat16",
    kv_cache_dtype="bfloat16",
    block_tokens=16,
    chunk_tokens=256,
    group_page_bytes=(4096,),
)
OTHER: dict[str, Any] = {
    "weights_id": "v",
    "dtype": "float16",
    "kv_cache_dtype": "fp8_e4m3",
    "block_tokens": 32,
    "chunk_tokens": 512,
    "group_page_bytes": (4096, 4096),
    "quantization": "awq",
    "attention_backend": "CPU_ATTN",
    "cpu_isa": "amx",
    "kv_layout": "LBHNC",
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "context_parallel_size": 2,
    "format_version": 2,
    "page_formats": ("a", "b"),
    "storage_ranks": (0, 0),
}
KEY = OpalCacheEngineKey(METADATA.namespace, 3, 12, bytes(range(HASH_BYTES)))


def test_golden_namespace() -> None:
    """Another version of Opal finds what this one stored: the digest of these facts is fixed."""
    assert (
        METADATA.namespace.hex()
        == "ea1a93e780fedb89d62c8b69ae4769f32f0abdceddfb6d9e8bf0efa5b49fb242"
    )


def test_every_field_has_a_test() -> None:
    """A field that is added to the metadata is added here too."""
    assert OTHER.keys() == set(OpalEngineMetadata.__struct_fields__)


@pytest.mark.parametrize("field", OTHER)
def test_ht_18_every_single_fact_changes_the_namespace(field: str) -> None:
    """An fp8 run must not read the pages of a bf16 run, and so for every other fact."""
    changed = msgspec.structs.replace(METADATA, **{field: OTHER[field]})

    assert changed.namespace != METADATA.namespace


def test_facts_cannot_be_shifted_from_one_field_to_the_next() -> None:
    """Fields are named in the digest: the same text in another field is another namespace."""
    one = msgspec.structs.replace(METADATA, attention_backend="x", cpu_isa="y")
    other = msgspec.structs.replace(METADATA, attention_backend="y", cpu_isa="x")
    joined = msgspec.structs.replace(METADATA, group_page_bytes=(40, 96))

    assert len({one.namespace, other.namespace, joined.namespace, METADATA.namespace}) == 4


def test_key_survives_its_text() -> None:
    """A file name gives back the key that it was made from."""
    text = KEY.to_string()

    assert OpalCacheEngineKey.from_string(text) == KEY
    assert all(character.isalnum() or character == "-" for character in text)
    assert len(text) < 200


@pytest.mark.parametrize(
    "field", [{"namespace": b"\1" * 32}, {"group": 4}, {"rank": 1}, {"chunk_hash": b"\2" * 32}]
)
def test_every_part_of_a_key_is_in_its_text(field: dict[str, Any]) -> None:
    """Two keys never have one file name."""
    assert msgspec.structs.replace(KEY, **field).to_string() != KEY.to_string()


NAMESPACE, CHUNK = "ab" * 32, "cd" * 32


@pytest.mark.parametrize(
    "text",
    [
        "",
        "---",
        f"{NAMESPACE}-0-0",
        f"{NAMESPACE}-0-0-{CHUNK}-0",
        f"{NAMESPACE}-0-0-{CHUNK[:-2]}",
        f"{NAMESPACE[:-1]}-0-0-{CHUNK}",
        f"{NAMESPACE}-x-0-{CHUNK}",
        f"{NAMESPACE}-0--1-{CHUNK}",
        f"{NAMESPACE}-0-0-{'zz' * 32}",
        # Texts that to_string never writes: two names for one key would hide one of the files.
        f"{NAMESPACE.upper()}-0-0-{CHUNK}",
        f"{NAMESPACE}-+0-0-{CHUNK}",
        f"{NAMESPACE}-00-0-{CHUNK}",
        f"{NAMESPACE}-0- 0-{CHUNK}",
        f"{NAMESPACE}-0-1_0-{CHUNK}",
        f"{NAMESPACE}-0-0-{CHUNK}\n",
        f"{NAMESPACE[:2]} {NAMESPACE[2:]}-0-0-{CHUNK}",
    ],
)
def test_text_that_is_no_key_is_refused(text: str) -> None:
    """A truncated or foreign file name is no key, and each key has one text."""
    with pytest.raises(ValueError, match=r"not a cache key|non-hexadecimal|invalid literal"):
        OpalCacheEngineKey.from_string(text)
