"""Real engines over tiers below memory: restarts, overflow, sharing, damaged and vanished files."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checks import assert_at_rest, assert_same
from engine_process import BLOCK_TOKENS, EngineProcess, opal, running_engine
from prompts import random_tokens, request
from reference import Reference

from opal_connector.cli.models import ensure_tiny_llama

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHUNK_TOKENS = 2 * BLOCK_TOKENS
VOCABULARY = 255


def prompt(length: int, seed: int) -> list[int]:
    return random_tokens(length, seed=seed, last=VOCABULARY)


def settings(tiers: Sequence[str], directory: Path, **of_tiers: Any) -> dict[str, Any]:
    """Small chunks; every tier of files in a directory of its own name."""
    extra: dict[str, Any] = {"kvc_tiers": list(tiers), "chunk_size": CHUNK_TOKENS}
    for name in tiers:
        extra[name] = {"capacity_GB": "64MiB"}
        if name != "CPUMemory":
            extra[name]["path"] = str(directory / name)
        extra[name] |= of_tiers.get(name, {})
    return {"kv_transfer_config": opal(extra), "model": ensure_tiny_llama()}


def expected(reference: Reference, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return reference.answers(requests, model=ensure_tiny_llama())


def hits(answers: Sequence[dict[str, Any]], tier: str) -> int:
    return sum(answer["opal"]["hit_tokens"].get(tier, 0) for answer in answers)


def whole_blocks(tokens: list[int]) -> int:
    """What can be hit of a prompt: its last token is always computed."""
    return (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.opal"))


def test_killed_engine_finds_its_cache_again(reference: Reference, tmp_path: Path) -> None:
    """SIGKILL, another process, the same prompt: all of it from disk, then from memory."""
    arguments = settings(["CPUMemory", "LocalNVMe"], tmp_path)
    requests = [request(prompt(450, seed=1)), request(prompt(333, seed=2))]
    with running_engine(**arguments) as engine:
        before = engine.generate(requests)
        engine.kill()
    with running_engine(**arguments) as engine:
        after = engine.generate(requests)
        assert_at_rest(engine)
        engine.reset_device()
        again = engine.generate(requests)
        assert_at_rest(engine)

    for answers in (before, after, again):
        assert_same(answers, expected(reference, requests))
    total = sum(whole_blocks(one["tokens"]) for one in requests)
    assert (hits(after, "LocalNVMe"), hits(again, "CPUMemory")) == (total, total)


@pytest.mark.parametrize("write", ["through", "demote"])
def test_disk_holds_what_memory_forgets(reference: Reference, tmp_path: Path, write: str) -> None:
    """A pool of a few chunks over a disk with room for all: nothing is computed twice."""
    with running_engine(
        **settings(
            ["CPUMemory", "LocalNVMe"],
            tmp_path,
            CPUMemory={"capacity_GB": "1MiB", "eviction_threshold": 0.7},
            LocalNVMe={"write": write},
        ),
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    ) as engine:
        requests = [request(prompt(300 + 40 * one, seed=10 + one)) for one in range(6)]
        first = [engine.generate([one])[0] for one in requests]
        engine.reset_device()
        second = [engine.generate([one])[0] for one in requests]
        books = assert_at_rest(engine)
        metrics = engine.metrics()
        for place, tier in enumerate(("CPUMemory", "LocalNVMe")):
            there = engine.call("tier_blocks", place=place)
            assert engine.call("replayed_blocks", tier=tier) == there

    assert_same(first, expected(reference, requests))
    assert_same(second, expected(reference, requests))
    total = sum(whole_blocks(one["tokens"]) for one in requests)
    assert hits(second, "CPUMemory") + hits(second, "LocalNVMe") == total
    assert hits(second, "LocalNVMe") > 0
    assert books["used_bytes"] <= books["capacity_bytes"]
    assert metrics.total("vllm:opal_evictions_total", tier="CPUMemory") > 0
    assert metrics.total("vllm:opal_store_bytes_total", tier="LocalNVMe") > 0
    assert metrics.total("vllm:opal_failures_total") == 0


def test_without_memory(reference: Reference, tmp_path: Path) -> None:
    """A disk alone: stored from the device and loaded to it."""
    with running_engine(**settings(["LocalNVMe"], tmp_path)) as engine:
        requests = [request(prompt(450, seed=20))]
        cold = engine.generate(requests)
        engine.reset_device()
        warm = engine.generate(requests)
        assert_at_rest(engine)

    assert_same(cold + warm, expected(reference, requests) * 2)
    assert hits(warm, "LocalNVMe") == whole_blocks(requests[0]["tokens"])


def test_two_engines_are_one_cache(reference: Reference, tmp_path: Path) -> None:
    """What one has stored the other finds, while both run; tails and beginnings too."""
    arguments = settings(["CPUMemory", "DistributedFS"], tmp_path)
    text = prompt(450, seed=30)
    with running_engine(**arguments) as writer, running_engine(**arguments) as reader:
        writer.generate([request(text)])
        found = reader.generate([request(text)])
        longer = reader.generate([request(text + prompt(200, seed=31))])
        back = writer.generate([request(text + prompt(200, seed=31))])
        assert_at_rest(writer)
        assert_at_rest(reader)

    assert hits(found, "DistributedFS") == whole_blocks(text)
    assert_same(found, expected(reference, [request(text)]))
    both = [request(text + prompt(200, seed=31))]
    assert_same(longer + back, expected(reference, both) * 2)
    assert back[0]["cached_tokens"] >= whole_blocks(text)


def damage(path: Path) -> None:
    """Flip a byte of a file's payload."""
    data = bytearray(path.read_bytes())
    data[-1000] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("fault", ["damaged", "truncated", "gone", "directory-gone"])
def test_ht_35_faults_of_files_are_misses(reference: Reference, tmp_path: Path, fault: str) -> None:
    """HT-13, HT-35, HT-55: right answers, a count, and the next store writes anew."""
    with running_engine(**settings(["LocalNVMe"], tmp_path)) as engine:
        requests = [request(prompt(450, seed=40))]
        engine.generate(requests)
        files = files_of(tmp_path)
        assert len(files) == 7
        for path in files:
            if fault == "damaged":
                damage(path)
            elif fault == "truncated":
                path.write_bytes(path.read_bytes()[:-1])
            elif fault == "gone":
                path.unlink()
        if fault == "directory-gone":
            shutil.rmtree(tmp_path / "LocalNVMe")
        engine.reset_device()
        hurt = engine.generate(requests)
        engine.reset_device()
        # While a file is being deleted none is written under its name; now all is at rest.
        again = engine.generate(requests)
        engine.reset_device()
        healed = engine.generate(requests)
        assert_at_rest(engine)
        failures = engine.metrics().total("vllm:opal_failures_total")

    assert_same(hurt + again + healed, expected(reference, requests) * 3)
    assert hits(hurt, "LocalNVMe") == 0
    assert failures > 0
    if fault != "directory-gone":
        assert hits(healed, "LocalNVMe") == whole_blocks(requests[0]["tokens"])


def test_reset_empties_the_directory(reference: Reference, tmp_path: Path) -> None:
    """After a reset nothing of before is served, not even after a restart."""
    arguments = settings(["CPUMemory", "LocalNVMe"], tmp_path)
    requests = [request(prompt(450, seed=50))]

    def ask(engine: EngineProcess) -> list[dict[str, Any]]:
        return engine.generate(requests)

    with running_engine(**arguments) as engine:
        ask(engine)
        assert files_of(tmp_path)
        assert engine.call("reset_tiers")
        engine.call("settle")
        assert files_of(tmp_path) == []
        engine.reset_device()
        after = ask(engine)
        engine.kill()
    with running_engine(**arguments) as engine:
        restarted = ask(engine)

    assert_same(after + restarted, expected(reference, requests) * 2)
    assert after[0]["cached_tokens"] == 0
    assert hits(restarted, "LocalNVMe") == whole_blocks(requests[0]["tokens"])
