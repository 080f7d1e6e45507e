"""What a hybrid model's engine announces, group by group, and what is promised of it."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess, opal, running_engine
from prompts import greedy, request
from tiny_hybrid import VOCABULARY, WINDOW_TOKENS, make_tiny_gemma

from opal_connector.cli.server_process import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LAYERS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]


def kvbm(command: str, endpoint: str, *options: str) -> dict[str, Any]:
    """One of `opal kvbm`, as JSON."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "opal_connector.cli.main", "kvbm", command, "--json"),
            *("--instance", endpoint, *options),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout, done.stderr
    return dict(json.loads(done.stdout))


def promised(endpoint: str, tokens: list[int]) -> dict[str, Any]:
    """What the only instance could serve of a prompt."""
    found = kvbm("match", endpoint, "--tokens", ",".join(map(str, tokens)))["workers"]
    return dict(found[0]) if found else {"tokens": 0, "device_tokens": 0}


def hit(engine: EngineProcess, tokens: list[int]) -> int:
    """What the engine has of a prompt when it is asked."""
    (answer,) = engine.generate([request(tokens, sampling=greedy(2))])
    return int(answer["cached_tokens"])


def test_what_is_announced_by_group_is_what_there_is_and_what_is_promised_is_had(
    tmp_path: Path,
) -> None:
    """The device's sparse windows and the tiers' dense ones; a match is the engine's next hit."""
    rng = random.Random(4)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(6 * WINDOW_TOKENS + 10)]
    tails = [[rng.randrange(3, VOCABULARY) for _ in range(size)] for size in (145, 90, 40)]
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with running_engine(
        model=make_tiny_gemma(tmp_path, LAYERS),
        skip_tokenizer_init=True,
        kv_transfer_config=opal({"events": {"endpoint": endpoint, "heartbeat_seconds": 0.2}}),
    ) as engine:
        assert promised(endpoint, shared + tails[0])["tokens"] == 0
        assert hit(engine, shared + tails[0]) == 0
        for tail in (tails[0], tails[1]):
            expected = promised(endpoint, shared + tail)
            assert expected["tokens"] > 0
            assert hit(engine, shared + tail) == expected["tokens"]
        engine.reset_device()
        hit(engine, shared[:3])  # an engine in this process takes no step by itself
        expected = promised(endpoint, shared + tails[2])
        assert expected["device_tokens"] == 0
        assert expected["tier_tokens"]["CPUMemory"] == expected["tokens"] > 0
        assert hit(engine, shared + tails[2]) == expected["tokens"]
        report = kvbm("verify", endpoint, "--seconds", "0.5")
        assert report["ok"], report
        places = report["instances"][0]["places"]
        held = {(place["group"], place["tier"]) for place in places if place["blocks"]}
        assert held == {(group, tier) for group in (0, 1) for tier in ("Device", "CPUMemory")}
