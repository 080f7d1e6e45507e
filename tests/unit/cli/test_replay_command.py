"""`opal replay`: what a person types, reads and is told when it cannot be."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from opal_connector.cli.main import opal

TOKENS = 16


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six prompts of four blocks, the second half a repetition of the first."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1000 * place,
            "input_length": 4 * TOKENS + 1,
            "output_length": 5,
            "hash_ids": [4 * (place % 3) + block for block in range(4)] + [99],
        }
        for place in range(6)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(opal, ["replay", *map(str, arguments)])


def facts(trace: Path, *arguments: str) -> dict[str, Any]:
    file = trace.with_name("out.json")
    result = run(trace, *arguments, "--json", file)
    assert result.exit_code == 0, result.output
    return dict(json.loads(file.read_text()))


def refusal(*arguments: str | Path) -> str:
    """The one sentence of a refused call."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    [sentence] = result.stderr.removeprefix("Error: ").splitlines()
    return sentence


def test_table_has_opals_rows_and_a_column_per_policy(trace: Path) -> None:
    """Readers of the simulator find the rows that they know, the misses last."""
    result = run(trace, "--policy", "lru,s3-fifo", "--policy", "Belady")

    lines = result.stdout.splitlines()
    assert result.exit_code == 0, result.output
    assert lines[0].split() == ["LRU", "S3-FIFO", "Belady"]
    assert "KVC Tier Token Breakdown" in [line.strip() for line in lines]  # no markup around it
    breakdown = lines.index(next(line for line in lines if "KVC Tier Token Breakdown" in line))
    assert lines[breakdown + 1].split() == ["CPUMemory", "192", "(49.23%)", "192", "(49.23%)", "-"]
    assert lines[breakdown + 3].split()[:4] == ["Cache", "Miss", "198", "(50.77%)"]
    assert any("[CPUMemory] hit rate (%)" in line for line in lines)


def test_json_is_complete_and_adds_up(trace: Path) -> None:
    """Every figure of the table is in the file, with the settings that led to it."""
    found = facts(
        trace, "--tier", "CPUMemory=4blocks", "--tier", "LocalNVMe=1GiB,write=through",
        "--policy", "LRU", "--device-blocks", "2", "--bytes-per-token", "1KiB",
    )  # fmt: skip

    [report] = found["replays"]
    assert found["block_tokens"] == TOKENS
    assert found["settings"]["config"]["LocalNVMe"]["write"] == "through"
    assert list(report["tier_tokens"]) == ["apc", "CPUMemory", "LocalNVMe", "Cache Miss"]
    assert sum(report["tier_tokens"].values()) == report["input_tokens"] == 6 * (4 * TOKENS + 1)
    assert report["tiers"]["CPUMemory"]["capacity_bytes"] == 4 * TOKENS * 1024
    assert report["tiers"]["LocalNVMe"]["writes_per_unique_chunk"] == 1.0
    assert report["tiers"]["LocalNVMe"]["hit_tokens"] > 0
    assert report["events"]["INSERT"] > 0


def test_device_parameters_change_the_times(trace: Path) -> None:
    """A tier's bandwidth and latency are what the replay waits for."""

    def mean_ttft(option: str) -> float:
        [report] = facts(trace, "--sequential", "--tier", option)["replays"]
        return float(report["ttft_seconds"]["mean"])

    slow = mean_ttft("CPUMemory=1GiB,bandwidth_GBps=0.001,latency_nsec=5,concurrency=1")

    assert slow > 100 * mean_ttft("CPUMemory=1GiB")


def test_tier_with_its_own_policy_keeps_it(trace: Path) -> None:
    """`--policy` compares what the tiers do not fix."""
    found = facts(
        trace,
        "--tier",
        "CPUMemory=1GiB,policy=SIEVE",
        "--tier",
        "LocalNVMe=1GiB",
        "--policy",
        "ARC",
    )

    assert found["replays"][0]["policy"] == "ARC"
    assert facts(trace, "--tier", "CPUMemory=1GiB,policy=SIEVE")["replays"][0]["policy"] == "SIEVE"


def test_configuration_file_is_read_and_options_win(trace: Path) -> None:
    """The file that vLLM gets can be replayed, with another size."""
    config = trace.with_name("opal.yaml")
    config.write_text(
        "kvc_tiers: [CPUMemory, LocalNVMe]\n"
        "CPUMemory: {capacity_GB: 1, eviction_policy: ARC}\n"
        "LocalNVMe: {path: /nowhere, capacity_GB: 3, write: demote}\n"
    )

    tiers = facts(trace, "--config", str(config), "--tier", "CPUMemory=2GiB")["settings"]["config"]

    assert tiers["CPUMemory"]["capacity_GB"] == "2GiB"
    assert tiers["CPUMemory"]["eviction_policy"] == "ARC"
    assert tiers["LocalNVMe"]["write"] == "demote"
    assert tiers["kvc_tiers"] == ["CPUMemory", "LocalNVMe"]


def test_store_of_others_is_refused_with_what_stands_for_it(trace: Path) -> None:
    """It has no size that a simulation could keep; a directory with its speed is the same to it."""
    config = trace.with_name("opal.yaml")
    config.write_text("kvc_tiers: [CPUMemory, ObjectStore]\nObjectStore: {url: 's3://a/b'}\n")

    assert refusal(trace, "--config", config) == (
        "kvc_tiers: found 'ObjectStore', allowed here: CPUMemory, LocalNVMe, DistributedFS; "
        "a store that others run is a DistributedFS of its bandwidth and latency."
    )


def test_plot_is_a_picture(trace: Path) -> None:
    """The suffix names the format; nothing needs a display."""
    pytest.importorskip("matplotlib")
    picture = trace.with_name("out.png")

    assert run(trace, "--policy", "LRU,Belady", "--plot", picture).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_is_one_sentence_before_the_work(
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
        (["--policy", "LRU,MRU"], "--policy: found 'MRU', allowed: LRU, FIFO"),
        (["--tier", "GPU=1GiB"], "--tier: found 'GPU=1GiB', allowed: NAME=CAPACITY"),
        (["--tier", "CPUMemory"], "--tier: found 'CPUMemory', allowed: NAME=CAPACITY"),
        (["--tier", "CPUMemory=much"], "CPUMemory.capacity_GB: found 'much'"),
        (["--tier", "CPUMemory=1GiB,color=red"], "--tier CPUMemory: found 'color=red', allowed"),
        (["--tier", "CPUMemory=1GiB,write=through"], "CPUMemory.write: unknown field"),
        (["--tier", "LocalNVMe=1GiB,write=never"], "LocalNVMe.write: found 'never'"),
        (["--tier", "CPUMemory=1,policy=MRU"], "CPUMemory.eviction_policy: found 'MRU'"),
        (
            ["--tier", "CPUMemory=1,bandwidth_GBps=0"],
            "--tier CPUMemory: bandwidth_GBps: found '0'; expected `float` > 0.0",
        ),
        (
            ["--tier", "CPUMemory=1,concurrency=x"],
            "--tier CPUMemory: concurrency: found 'x'; expected `int`",
        ),
        (["--bytes-per-token", "big"], "--bytes-per-token: found 'big'"),
        (["--config", "/nowhere.yaml"], "opal_config: found '/nowhere.yaml'"),
        (["--tokens-per-id", "512"], "trace.jsonl: line 1, hash_ids: 5 ids of 512 tokens"),
    ],
)
def test_mistake_is_one_sentence_that_says_what_is_allowed(
    trace: Path, arguments: list[str], sentence: str
) -> None:
    """No traceback, and no guess about what was meant."""
    assert refusal(trace, *arguments).startswith(sentence)


def test_bad_line_of_a_trace_is_named(trace: Path) -> None:
    """The file, the line and the field, in one sentence."""
    with trace.open("a") as file:
        file.write('{"timestamp": 0, "input_length": "many", "hash_ids": []}\n')

    assert refusal(trace) == ("trace.jsonl: line 7, input_length: expected `int`, got `str`.")


def test_progress_is_on_standard_error_only(trace: Path) -> None:
    """Standard output has the answer and nothing else."""
    result = run(trace, "--policy", "LRU")

    assert "LRU: 6 requests" in result.stderr
    assert "6 requests" not in result.stdout
