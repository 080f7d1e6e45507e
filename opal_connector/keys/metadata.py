"""What makes two caches incompatible, and the key of one stored object."""

from hashlib import sha256
from typing import Self

import msgspec

from opal_connector.keys.chain import HASH_BYTES

FORMAT_VERSION = 1


class OpalEngineMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Every fact about an engine that changes the bytes it stores.

    Neither the model's name nor the instance is here: the same weights elsewhere are the same
    cache. `weights_id` is a fingerprint, see `weights_fingerprint`. `page_formats` say per rank
    what the bytes of a model with several kinds of attention mean; a dense model has none.
    `storage_ranks` say under which number each rank's bytes are stored, where some ranks store
    nothing: elsewhere the same number means the bytes of another rank.
    """

    weights_id: str
    dtype: str
    kv_cache_dtype: str
    block_tokens: int
    chunk_tokens: int
    group_page_bytes: tuple[int, ...]
    quantization: str = "none"
    attention_backend: str = "unknown"
    cpu_isa: str = "none"
    kv_layout: str = "unknown"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    format_version: int = FORMAT_VERSION
    page_formats: tuple[str, ...] = ()
    storage_ranks: tuple[int, ...] = ()

    @property
    def namespace(self) -> bytes:
        """The 32-byte digest that separates incompatible caches."""
        facts = msgspec.to_builtins(self)
        for later in ("page_formats", "storage_ranks"):
            if not facts[later]:  # what was stored before there was such a fact stays readable
                del facts[later]
        encoded = msgspec.json.encode(facts, order="sorted")
        return sha256(b"opal_connector/namespace/1" + encoded).digest()


class OpalCacheEngineKey(msgspec.Struct, frozen=True):
    """The full name of one stored object: namespace, kv group, rank and chunk hash."""

    namespace: bytes
    group: int
    rank: int
    chunk_hash: bytes

    def to_string(self) -> str:
        """A printable, filename-safe form that `from_string` reads back."""
        return f"{self.namespace.hex()}-{self.group}-{self.rank}-{self.chunk_hash.hex()}"

    @classmethod
    def from_string(cls, text: str) -> Self:
        """Read what `to_string` wrote.

        Raises:
            ValueError: The text is not such a key.
        """
        parts = text.split("-")
        if len(parts) != 4:
            raise ValueError(f"not a cache key (four fields joined by '-'): {text!r}")
        namespace, chunk_hash = bytes.fromhex(parts[0]), bytes.fromhex(parts[3])
        if len(namespace) != HASH_BYTES or len(chunk_hash) != HASH_BYTES:
            raise ValueError(f"not a cache key (digests of {HASH_BYTES} bytes): {text!r}")
        key = cls(namespace, int(parts[1]), int(parts[2]), chunk_hash)
        if key.to_string() != text:  # one key, one text
            raise ValueError(f"not a cache key as this version writes it: {text!r}")
        return key
