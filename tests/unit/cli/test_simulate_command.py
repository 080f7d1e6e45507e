"""`opal simulate`: what a person types, reads and is told when it cannot be."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from cluster_world import TOKENS, chats

from opal_connector.cli.main import opal
from opal_connector.simulated_cluster import ClusterReport


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty requests of chats, written as a trace."""
    ids: dict[bytes, int] = {}
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1000 * request.arrival_seconds,
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": [ids.setdefault(block, len(ids)) for block in request.hashes],
        }
        for request in chats(requests=40).requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(opal, ["simulate", *map(str, arguments)])


def facts(trace: Path, command: str, *arguments: str) -> dict[str, Any]:
    file = trace.with_name("out.json")
    given = [command, str(trace), *arguments, "--json", str(file)]
    result = CliRunner().invoke(opal, given)
    assert result.exit_code == 0, result.output
    return dict(json.loads(file.read_text()))


def test_table_has_a_column_per_policy_and_size(trace: Path) -> None:
    """What grows with the cluster is read along a row."""
    result = run(trace, "--instances", "1,3", "--policy", "balanced,MaxPrefix")

    lines = result.stdout.splitlines()
    assert result.exit_code == 0, result.output
    assert lines[0].split() == [
        "Balanced",
        "1",
        "Balanced",
        "3",
        "MaxPrefix",
        "1",
        "MaxPrefix",
        "3",
    ]
    labels = [line[:32].strip() for line in lines]
    for label in ("Hit rate (%)", "P95 TTFT (ms)", "Event bytes a request", "Router's index"):
        assert label in labels


def test_json_is_the_report_with_all_its_fields(trace: Path) -> None:
    """Scripts read what the table shows, and the settings that led to it."""
    found = facts(
        trace, "simulate", "--instances", "2,5", "--tier", "CPUMemory=50blocks", "--seed", "7",
        "--prefill-tokens-per-s", "2000", "--prefill-concurrency", "1",
    )  # fmt: skip

    reports = msgspec.convert(found["simulations"], list[ClusterReport], strict=True)
    assert [(one.policy, one.instances) for one in reports] == [("Balanced", 2), ("Balanced", 5)]
    assert set(found["simulations"][0]) == set(ClusterReport.__struct_fields__)
    assert (found["seed"], found["block_tokens"]) == (7, TOKENS)
    assert found["settings"]["prefill_concurrency"] == 1
    for one in reports:
        assert sum(one.tier_tokens.values()) == one.input_tokens
        assert one.traffic.bytes > 0
        assert one.router.index_bytes > 0
        assert one.ttft_seconds.keys() == {"mean", "median", "p95", "p99"}


def test_one_instance_hits_what_replay_says_with_the_same_options(trace: Path) -> None:
    """The two commands share their options and their model of an instance."""
    options = ("--tier", "CPUMemory=30blocks", "--tier", "LocalNVMe=90blocks")

    [replayed] = facts(trace, "replay", *options)["replays"]
    [simulated] = facts(trace, "simulate", *options, "--instances", "1")["simulations"]

    assert simulated["tier_tokens"] == replayed["tier_tokens"]
    assert simulated["hit_rate"] == replayed["hit_rate"]


def test_model_and_its_arithmetic_make_the_speed_of_a_prefill(trace: Path) -> None:
    """Two FLOPs a parameter and token: 8e9 of them on 160 TFLOPS are 10,000 tokens a second."""
    found = facts(
        trace, "simulate", "--instances", "1", "--model-parameters", "8e9", "--tflops", "160"
    )

    assert found["settings"]["prefill_tokens_per_second"] == pytest.approx(10_000)


def test_plot_is_a_picture_of_all_runs(trace: Path) -> None:
    """The suffix names the format; nothing needs a display."""
    pytest.importorskip("matplotlib")
    picture = trace.with_name("out.png")

    result = run(trace, "--instances", "1,4", "--policy", "Balanced,Random", "--plot", picture)

    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_is_said_before_anything_is_simulated(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra is named, and nothing was computed in vain."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    result = run(trace, "--plot", trace.with_name("out.png"))

    assert result.exit_code == 1
    assert result.stderr == (
        "Error: The Python package 'matplotlib' is missing: pip install 'opal-connector[replay]'.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--instances", "1,0"], "--instances: found '1,0', allowed: numbers from 1 to 1000"),
        (["--instances", "1001"], "--instances: found '1001', allowed"),
        (["--instances", "many"], "--instances: found 'many', allowed"),
        (["--policy", "Balanced,Best"], "--policy: found 'Best', allowed: RoundRobin, LeastLoaded"),
        (["--shared-tier"], "--shared-tier: found no tier DistributedFS, allowed: with --tier"),
        (["--tier", "GPU=1GiB"], "--tier: found 'GPU=1GiB', allowed: NAME=CAPACITY"),
        (
            ["--model-parameters", "8e9", "--prefill-tokens-per-s", "100"],
            "--model-parameters: found beside --prefill-tokens-per-s, allowed: one of them.",
        ),
        (["--model-parameters", "0"], "--model-parameters and --tflops: found 0"),
    ],
)
def test_mistake_is_one_sentence(trace: Path, arguments: list[str], sentence: str) -> None:
    """No traceback, and what is allowed."""
    result = run(trace, *arguments)

    assert result.exit_code == 2, result.output
    [line] = result.stderr.removeprefix("Error: ").splitlines()
    assert line.startswith(sentence)


def test_progress_goes_to_standard_error_alone(trace: Path) -> None:
    """Standard output has the answer and nothing else."""
    result = run(trace, "--instances", "2")

    assert "Balanced, 2 instances: 40 requests" in result.stderr
    assert "40 requests" not in result.stdout
