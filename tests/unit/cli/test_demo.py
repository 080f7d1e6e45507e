"""The demo without a server: what it reads, what it reports, and what it refuses."""

import itertools
import json
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("httpx")

from opal_connector.cli import demo as demo_module
from opal_connector.cli import demo_report, demo_runs
from opal_connector.cli.demo_report import summarize, verdict
from opal_connector.cli.demo_runs import Measurement, demo_prompt, device_blocks, measure
from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.machine import machine_facts
from opal_connector.cli.main import opal
from opal_connector.cli.progress import Reporter
from opal_connector.cli.prometheus import Sample, parse_prometheus, sum_by_label
from opal_connector.cli.server_client import Answer, read_stream
from opal_connector.cli.tiny_models import byte_tokenizer

FIELDS = [
    "cold_ttft_s",
    "warm_ttft_s",
    "device_ttft_s",
    "ttft_ratio",
    "warm_to_device_ratio",
    "prompt_tokens",
    "hit_tokens_by_tier",
    "hit_fraction",
    "outputs_equal",
    "model",
    "machine",
    "warm_ttfts_s",
    "device_ttfts_s",
    "num_gpu_blocks",
    "num_gpu_blocks_without_opal",
]
HITS = "vllm:opal_hit_tokens_total"
SOURCES = "vllm:prompt_tokens_cached_by_source_total"


def answer(ttft_seconds: float = 1.0, token_ids: tuple[int, ...] = (1, 2)) -> Answer:
    return Answer(ttft_seconds, token_ids, "text", prompt_tokens=100)


def measurement(**changes: object) -> Measurement:
    parts: dict[str, object] = {
        "cold": answer(10.0),
        "device": [answer(0.2), answer(0.3), answer(0.9)],
        "warm": [answer(0.5), answer(0.25), answer(0.2)],
        "warm_hits": [{"CPUMemory": 96}, {"CPUMemory": 95}, {"CPUMemory": 97}],
    }
    return Measurement(**{**parts, **changes})  # type: ignore[arg-type]


# Reading.


def test_prometheus_text_is_read() -> None:
    """Names, labels with every escape, values in every form; comments and noise are left out."""
    text = r"""
# HELP vllm:a A counter.
# TYPE vllm:a counter
vllm:a{engine="0",tier="CPUMemory"} 12.0
vllm:a{engine="1",tier="a \"b\", c\\d\ne"} 1.5e+03 1700000000
plain 3
infinite{le="+Inf"} +Inf
vllm:broken{engine="0"} many
"""

    assert parse_prometheus(text) == [
        Sample("vllm:a", {"engine": "0", "tier": "CPUMemory"}, 12.0),
        Sample("vllm:a", {"engine": "1", "tier": 'a "b", c\\d\ne'}, 1500.0),
        Sample("plain", {}, 3.0),
        Sample("infinite", {"le": "+Inf"}, float("inf")),
    ]


def test_counter_is_summed_over_engines() -> None:
    """A total per tier, whatever other labels there are; other metrics do not count."""
    samples = [
        Sample(HITS, {"engine": "0", "tier": "CPUMemory"}, 10.0),
        Sample(HITS, {"engine": "1", "tier": "CPUMemory"}, 5.0),
        Sample(HITS, {"engine": "0", "tier": "LocalNVMe"}, 1.0),
        Sample(HITS.replace("_total", "_created"), {"tier": "CPUMemory"}, 1e9),
        Sample(HITS, {"engine": "0"}, 7.0),
    ]

    assert sum_by_label(samples, HITS, "tier") == {"CPUMemory": 15, "LocalNVMe": 1}


def event(**fields: object) -> str:
    return f"data: {json.dumps(fields)}"


def test_stream_is_assembled_and_timed_to_its_first_token() -> None:
    """A first event without a token does not count as the first token."""
    ticks = itertools.count(100.0)

    found = read_stream(
        iter(
            [
                event(choices=[{"text": "", "token_ids": []}]),
                "",
                event(choices=[{"text": "", "token_ids": [7]}]),
                ": comment",
                event(choices=[{"text": " ab", "token_ids": [8, 9]}]),
                event(choices=[], usage={"prompt_tokens": 12}),
                "data: [DONE]",
            ]
        ),
        clock=lambda: next(ticks),
    )

    assert found == Answer(1.0, (7, 8, 9), " ab", prompt_tokens=12)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["data: [DONE]"], "without a single token"),
        ([event(error={"message": "too long"})], "too long"),
    ],
)
def test_stream_that_fails_is_one_sentence(lines: list[str], sentence: str) -> None:
    """An answer that is none is never taken for a fast one."""
    with pytest.raises(CommandFailure, match=sentence):
        read_stream(iter(lines))


# Measuring.


class FakeServer:
    """Answers at once; counts what it was asked and moves its counters as vLLM would."""

    def __init__(self, *, lag: int = 0, opal_hits: int = 96, host_hits: int = 96) -> None:
        self.calls: list[str] = []
        self._is_cold = self._is_reset = True
        self._lag, self._left = lag, 0
        self._hits = (opal_hits, host_hits)
        self._totals = [0, 0]

    def complete(self, prompt: str | list[int], *, max_tokens: int) -> Answer:
        if prompt != "the prompt":
            self.calls.append("other")
        elif self._is_cold:
            self.calls.append("cold")
            self._is_cold = self._is_reset = False
        elif self._is_reset:
            self.calls.append("warm")
            self._is_reset = False
            self._left = self._lag
            self._totals = [
                total + hits for total, hits in zip(self._totals, self._hits, strict=True)
            ]
        else:
            self.calls.append("device")
        return answer()

    def reset_prefix_cache(self) -> None:
        self._is_reset = True

    def samples(self) -> list[Sample]:
        shown = self._totals
        if self._left:
            self._left -= 1
            shown = [total - hits for total, hits in zip(self._totals, self._hits, strict=True)]
        return [
            Sample(HITS, {"tier": "CPUMemory"}, float(shown[0])),
            Sample(SOURCES, {"source": "host"}, float(shown[1])),
            Sample(SOURCES, {"source": "device"}, 5000.0),
        ]


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_runs, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(demo_runs, "_METRICS_SECONDS_MAX", 0.05)


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("lag", [0, 2])
def test_runs_alternate_and_hits_are_those_of_each_warm_run(lag: int) -> None:
    """Another prompt first, one cold run, then device and warm; late metrics are awaited."""
    server = FakeServer(lag=lag)

    found = measure(server, "the prompt", Reporter())

    assert server.calls == ["other", "cold", *["device", "warm"] * 3]
    assert found.warm_hits == [{"CPUMemory": 96}] * 3
    assert (len(found.device), len(found.warm)) == (3, 3)


@pytest.mark.usefixtures("no_waiting")
def test_counters_that_disagree_are_refused() -> None:
    """Opal's own count of hits is believed only when vLLM counts the same."""
    with pytest.raises(CommandFailure, match=r"Opal counts 96 prompt tokens .* and vLLM 64"):
        measure(FakeServer(host_hits=64), "the prompt", Reporter())


@pytest.mark.usefixtures("no_waiting")
def test_miss_is_reported_and_not_waited_for_for_ever() -> None:
    """A cache that never hits gives a report that says so."""
    found = measure(FakeServer(opal_hits=0, host_hits=0), "the prompt", Reporter())

    assert found.warm_hits == [{}] * 3


def test_prompt_has_the_asked_length(tmp_path: Path) -> None:
    """The text is cut at a token, its question is whole."""
    tokenizer = byte_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    prompt = demo_prompt(tmp_path / "tokenizer.json", 700)

    assert prompt.startswith("Compound statements")
    assert prompt.endswith("\nAnswer:")
    assert abs(len(tokenizer.encode(prompt).ids) - 700) <= 2


# Reporting.


def test_report_has_exactly_the_promised_fields() -> None:
    """Scripts read these names; times are medians, hits are those of the worst warm run."""
    report = summarize(measurement(), model="m", machine=machine_facts())
    written = json.loads(msgspec.json.encode(report))

    assert list(written) == FIELDS
    assert {name: written[name] for name in FIELDS if name != "machine"} == {
        "cold_ttft_s": 10.0,
        "warm_ttft_s": 0.25,
        "device_ttft_s": 0.3,
        "ttft_ratio": 40.0,
        "warm_to_device_ratio": 0.833,
        "prompt_tokens": 100,
        "hit_tokens_by_tier": {"CPUMemory": 95},
        "hit_fraction": 0.95,
        "outputs_equal": True,
        "model": "m",
        "warm_ttfts_s": [0.5, 0.25, 0.2],
        "device_ttfts_s": [0.2, 0.3, 0.9],
        "num_gpu_blocks": None,
        "num_gpu_blocks_without_opal": None,
    }
    assert verdict(report) is None
    assert written["machine"]["cores"] >= 1
    assert written["machine"]["memory_bytes"] > 1 << 28


@pytest.mark.parametrize("which", ["warm", "device"])
def test_one_differing_answer_is_told(which: str) -> None:
    """Every run counts, down to the token ids that decode to the same text."""
    answers = [answer(0.2), answer(0.2, (1, 3)), answer(0.2)]

    report = summarize(measurement(**{which: answers}), model="m", machine=machine_facts())

    assert not report.outputs_equal
    assert "differ" in str(verdict(report))


def test_hit_below_95_percent_is_told() -> None:
    """A cache that gives part of the prompt only has not done what it is shown for."""
    hits: list[dict[str, int]] = [{"CPUMemory": 96}, {"CPUMemory": 94}, {"CPUMemory": 96}]

    report = summarize(measurement(warm_hits=hits), model="m", machine=machine_facts())

    assert "Only 94.0% of the prompt" in str(verdict(report))


def test_blocks_that_opal_costs_are_reported() -> None:
    """Fewer blocks beside Opal than alone say that the hybrid memory manager is off."""
    equal = measurement(num_gpu_blocks=700, num_gpu_blocks_without_opal=700)
    fewer = measurement(num_gpu_blocks=100, num_gpu_blocks_without_opal=700)

    said = [
        verdict(summarize(found, model="m", machine=machine_facts())) for found in (equal, fewer)
    ]

    assert said[0] is None
    assert "100 blocks with Opal and 700 without" in str(said[1])


def test_device_blocks_are_read_from_the_metrics() -> None:
    """They are in a label of vLLM's; a server that does not say them is not a device of none."""
    name = "vllm:cache_config_info"

    assert device_blocks([Sample(name, {"num_gpu_blocks": "5461"}, 1.0)]) == 5461
    assert device_blocks([Sample(name, {"num_gpu_blocks": "None"}, 1.0)]) is None
    assert device_blocks([]) is None


def test_table_names_the_runs_and_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """A person sees the three times, how much faster, and what the model said."""
    demo_report.show(summarize(measurement(), model="m", machine=machine_facts()), " said\n[it]")

    shown = capsys.readouterr().out
    for part in ("cold", "10.000", "device", "33.3 x", "95 CPUMemory", "40.0 x", "said [it]"):
        assert part in shown


# Refusing.


def run(*arguments: str) -> Result:
    return CliRunner().invoke(opal, ["demo", *arguments])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--layers", "31"], "31 is not in the range 1<=x<=30"),
        (["--model", "gemma4"], "'gemma4' is not one of 'smollm2-135m', 'gemma3-270m',"),
        (["--model", "gemma3-270m", "--layers", "19"], "layers 1 to 18; cannot keep 19."),
        (["--model", "gemma3-270m", "--cluster"], "--model: --cluster runs smollm2-135m"),
        (["--prompt-tokens", "100"], "100 is not in the range 640<=x<=4000"),
        (["--tiers", "Tape"], "kvc_tiers[0]: found 'Tape', allowed: CPUMemory"),
        (["--tiers", "CPUMemory,CPUMemory"], "each tier is allowed once"),
        (["--json", "--layers", "31"], "31 is not in the range 1<=x<=30"),  # without a file
        (["--json", "absent/out.json"], "There is no directory absent to write out.json in."),
    ],
)
def test_mistake_is_refused_before_anything_starts(arguments: list[str], sentence: str) -> None:
    """What cannot be is said at once, with exit code 2."""
    result = run(*arguments)

    assert result.exit_code == 2
    assert sentence in result.stderr


def test_missing_httpx_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the user learns its name."""
    monkeypatch.setitem(sys.modules, "opal_connector.cli.server_client", None)
    monkeypatch.setattr(demo_module, "ensure_named", lambda *_, **__: pytest.fail("too late"))

    result = run()

    assert result.exit_code == 1
    assert "pip install 'opal-connector[demo]'" in result.stderr
    assert result.stderr.count("\n") == 1
