"""Where tokens of a hit came from, in vLLM's words."""

import pytest

pytest.importorskip("vllm")
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from opal_connector.integrations.vllm.hit_sources import hit_sources

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        ("CPUMemory", CacheHitSource.HOST),
        ("LocalNVMe", CacheHitSource.DISK),
        ("DistributedFS", CacheHitSource.DISK),
        ("ObjectStore", CacheHitSource.EXTERNAL_UNSPECIFIED),
        ("Mooncake", CacheHitSource.EXTERNAL_UNSPECIFIED),
        ("Valkey", CacheHitSource.EXTERNAL_UNSPECIFIED),
    ],
)
def test_every_tier_is_one_of_vllms_sources(tier: str, expected: CacheHitSource) -> None:
    """Files are a disk; stores that others run are remote, which vLLM has no better word for."""
    assert hit_sources({tier: 64}, 64) == {expected: 64}


def test_tiers_of_one_source_are_added_up() -> None:
    found = hit_sources({"LocalNVMe": 64, "DistributedFS": 32, "CPUMemory": 16}, 112)
    assert found == {CacheHitSource.DISK: 96, CacheHitSource.HOST: 16}


def test_what_does_not_add_up_is_not_said_of_a_tier() -> None:
    """VLLM wants sources that sum to what it loads."""
    assert hit_sources({"CPUMemory": 64}, 96) == {CacheHitSource.EXTERNAL_UNSPECIFIED: 96}
