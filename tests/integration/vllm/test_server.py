"""A server as users start it: its answers, its usage figures, its metrics, its log, its end."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_process import opal
from live_server import Server, group_lives, running_server
from prompts import greedy, random_tokens
from reference import Reference

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROW_BYTES = 196608  # 32 tokens of the model with four layers
TIER_BYTES = 256 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """By the short name, which vLLM knows from the plugin's entry point."""
    config = opal()
    del config["kv_connector_module_path"]
    directory = tmp_path_factory.mktemp("server")
    with running_server(directory, transfer_config=config) as running:
        yield running


def cached_tokens(answer: dict) -> int:
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def test_completions(server: Server, reference: Reference) -> None:
    """Cold and from the tier: equal tokens; the response says how much was cached, and where."""
    tokens = random_tokens(900, seed=500)
    cold = server.complete(tokens, max_tokens=20)
    server.reset_device()
    warm = server.complete(tokens, max_tokens=20)

    expected = reference.answer(tokens, sampling=greedy(20))["tokens"]
    assert cold["choices"][0]["token_ids"] == expected
    assert warm["choices"][0]["token_ids"] == expected
    assert (cached_tokens(cold), cached_tokens(warm)) == (0, 896)
    assert warm["kv_transfer_params"]["opal"]["hit_tokens"] == {"CPUMemory": 896}
    assert warm["kv_transfer_params"]["opal"]["stored_tokens"] == 896


def test_chat_completions(server: Server, reference: Reference) -> None:
    """The second turn finds the first turn's prompt and answer in the tier."""
    chat = [{"role": "user", "content": "Tell me about rivers. " * 20}]
    body = {
        "model": "model",
        "max_tokens": 80,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    first = server.post("/v1/chat/completions", {**body, "messages": chat})
    chat += [
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "And now about mountains."},
    ]
    server.reset_device()
    second = server.post("/v1/chat/completions", {**body, "messages": chat})

    for answer in (first, second):
        expected = reference.answer(answer["prompt_token_ids"], sampling=greedy(80))
        assert answer["choices"][0]["token_ids"] == expected["tokens"]
    known = first["prompt_token_ids"] + first["choices"][0]["token_ids"][:-1]
    prompt = second["prompt_token_ids"]
    common = next(
        (
            place
            for place, pair in enumerate(zip(known, prompt, strict=False))
            if len(set(pair)) > 1
        ),
        min(len(known), len(prompt)),
    )
    assert cached_tokens(first) == 0
    assert cached_tokens(second) == common // 32 * 32
    assert cached_tokens(second) > len(first["prompt_token_ids"])


def test_metrics(server: Server) -> None:
    """What /metrics say agrees with what was asked."""
    server.reset_device(external=True)
    before = server.metrics()
    tokens = random_tokens(900, seed=501)
    server.complete(tokens)
    server.reset_device()
    server.complete(tokens)
    server.reset_device()
    time.sleep(1.5)  # the numbers of a tier's use are renewed once a second, by the next activity
    server.complete(tokens[:400])
    after = server.metrics()

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    # 900 tokens cold, 4 left of them warm, and 400 of which the last block is computed again.
    assert grown("vllm:opal_hit_tokens_total", tier="CPUMemory") == 896 + 384
    assert grown("vllm:opal_miss_tokens_total", tier="CPUMemory") == 900 + 4 + 16
    assert grown("vllm:opal_store_bytes_total", tier="CPUMemory") == 28 * ROW_BYTES
    assert grown("vllm:opal_load_bytes_total", tier="CPUMemory") == (28 + 12) * ROW_BYTES
    assert 0 < grown("vllm:opal_store_seconds_total", tier="CPUMemory") < 60
    assert 0 < grown("vllm:opal_load_seconds_total", tier="CPUMemory") < 60
    assert grown("vllm:prompt_tokens_cached_by_source_total", source="host") == 896 + 384
    assert grown("vllm:prompt_tokens_cached_by_source_total", source="device") == 0
    assert after.total("vllm:opal_capacity_bytes", tier="CPUMemory") == (
        TIER_BYTES // ROW_BYTES * ROW_BYTES
    )
    assert after.total("vllm:opal_used_bytes", tier="CPUMemory") == 28 * ROW_BYTES
    assert after.labels_of("vllm:opal_hit_tokens_total", "engine") == {"0"}


def test_log(server: Server) -> None:
    """One line with what is in force, and vLLM's own line with Opal's numbers."""
    server.complete(random_tokens(300, seed=502))
    server.wait_for_log("KV Transfer metrics: ")
    lines = server.log_text().splitlines()
    (start,) = [line for line in lines if "Opal is on: CPUMemory 0.25 GiB a worker" in line]
    assert "INFO" in start
    assert "chunks of 256 tokens" in start
    assert any("KV Transfer metrics: " in line and "store MB=" in line for line in lines)
    assert not [line for line in lines if "ERROR" in line]


def test_stops_when_asked_to(tmp_path: Path) -> None:
    """With the module path and a file of settings; SIGTERM ends all processes, also our threads."""
    settings = tmp_path / "opal.yaml"
    settings.write_text("chunk_size: auto\nCPUMemory:\n  capacity_GB: 64MiB\n")
    config = opal()
    config["kv_connector_extra_config"] = {"opal_config": str(settings)}
    with running_server(tmp_path, "--shutdown-timeout", "60", transfer_config=config) as server:
        tokens = random_tokens(400, seed=503)
        server.complete(tokens)
        server.reset_device()
        assert cached_tokens(server.complete(tokens)) == 384
        server.complete(random_tokens(1500, seed=504), max_tokens=1)  # its store is under way
        code = server.stop()
        deadline = time.monotonic() + 10
        while group_lives(server.process) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not group_lives(server.process)
        log = server.log_text()

    assert code == 0
    assert "CPUMemory 0.06 GiB a worker" in log
    assert "chunks of 352 tokens" in log
    assert "request processing complete" in log
    assert "opal_connector/integrations" not in log  # no traceback of ours
