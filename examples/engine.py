"""The three verbs without vLLM: store a prompt's KV, find it again, get it back."""

import numpy as np

from opal_connector.config import load_config
from opal_connector.engine import OpalKVCacheEngine
from opal_connector.keys import OpalEngineMetadata
from opal_connector.tiers import ArrayBlocks

BLOCK_TOKENS, BLOCK_BYTES = 16, 4096

# Your paged KV cache: 64 blocks, here of random bytes.
paged = np.random.default_rng(0).integers(0, 256, (64, BLOCK_BYTES), dtype=np.uint8)
metadata = OpalEngineMetadata(
    weights_id="example",
    dtype="float16",
    kv_cache_dtype="float16",
    block_tokens=BLOCK_TOKENS,
    chunk_tokens=64,
    group_page_bytes=(BLOCK_BYTES,),
)
config = load_config({"chunk_size": 64, "CPUMemory": {"capacity_GB": "16MiB"}})

with OpalKVCacheEngine(config, metadata, ArrayBlocks(paged)) as engine:
    prompt = list(range(1000, 1300))  # 300 tokens: 18 whole blocks
    source = list(range(18))  # where the prompt's blocks lie
    print("stored tokens:", engine.store(prompt, source))

    longer = [*prompt[:200], 7, 8, 9]  # parts from the first prompt inside a chunk
    print("lookup of a sibling:", engine.lookup(longer))
    print("lookup behind a local hit:", engine.lookup(prompt, num_computed_tokens=128))

    target = list(range(40, 58))
    mask, tier_tokens = engine.retrieve(prompt, target)
    print("retrieved tokens:", int(mask.sum()), tier_tokens)
    print("same bytes:", bool((paged[source] == paged[target]).all()))
