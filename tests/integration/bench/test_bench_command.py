"""`opal bench` as a person runs it: every workload, its table, its files, its refusals."""

import asyncio
import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_engine import FakeEngine

from opal_connector.cli.main import opal


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """In a thread of its own, since the command has its own loop."""
    made = FakeEngine(has_events=False)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    with contextlib.closing(loop):
        asyncio.run_coroutine_threadsafe(made.start(), loop).result(10)
        yield made
        asyncio.run_coroutine_threadsafe(made.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def run(workload: str, *arguments: str | Path, **more: Any) -> Result:
    return CliRunner().invoke(opal, ["bench", workload, *map(str, arguments)], **more)


def report(engine: FakeEngine, tmp_path: Path, workload: str, *arguments: str | Path) -> Any:
    """What the file says after a run that succeeded."""
    file = tmp_path / "out.json"
    result = run(workload, *arguments, "--url", engine.url, "--json", file)
    assert result.exit_code == 0, result.output
    return json.loads(file.read_text())


def lines(path: Path, *facts: Any) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in facts))
    return path


def bodies(engine: FakeEngine) -> list[dict[str, Any]]:
    return [json.loads(raw) for _, _, raw in engine.seen]


SIZES = ("--prompt-size-min", "70", "--prompt-size-max", "100", "--default-prefix-length", "64")
QUICK = ("--request-rate", "200", "--output-tokens-min", "2", "--output-tokens-max", "4")


@pytest.mark.parametrize("kind", ["uniform", "poisson"])
def test_rates_hit_what_prompts_share(engine: FakeEngine, tmp_path: Path, kind: str) -> None:
    """Two beginnings are computed once each, and found by all others."""
    found = report(
        engine, tmp_path, kind, *SIZES, *QUICK, "--prefixes", "2", "--total-requests", "20"
    )

    summary = found["summary"]
    assert summary["successful_requests"] == 20
    assert summary["tier_tokens"]["apc"] == 18 * 64
    assert list(summary["tier_tokens"]) == ["apc", "Cache Miss"]
    assert sum(summary["tier_tokens"].values()) == summary["input_tokens"]
    assert summary["notes"] == []
    assert found["run"]["settings"]["prefixes"] == 2
    assert len(found["run"]["requests"]) == 20


def test_outstanding_requests_are_limited(engine: FakeEngine, tmp_path: Path) -> None:
    """Arrivals wait for a place, and how long is a figure of its own."""
    engine.token_seconds = 0.005
    found = report(
        engine, tmp_path, "uniform", *SIZES, *QUICK, "--total-requests", "20",
        "--max-outstanding-requests", "2",
    )  # fmt: skip

    assert found["summary"]["peak_concurrent_requests"] == 2
    assert found["summary"]["held_back"]["p99_ms"] > 10


def test_sessions(engine: FakeEngine, tmp_path: Path) -> None:
    """Conversations grow by answers; their prefixes are found again."""
    found = report(
        engine, tmp_path, "sessions", "--num-users", "2", "--turns-per-user", "3",
        "--output-tokens", "8",
    )  # fmt: skip

    assert found["summary"]["successful_requests"] == 6
    assert found["summary"]["tier_tokens"]["apc"] > 0
    assert found["run"]["endpoint"] == "/v1/chat/completions"
    assert {record["turn"] for record in found["run"]["requests"]} == {0, 1, 2}
    assert all(record["output_text"] for record in found["run"]["requests"])


def test_rag(engine: FakeEngine, tmp_path: Path) -> None:
    """All documents in every prompt: the second one is found up to its question."""
    found = report(
        engine, tmp_path, "rag", "--num-documents", "3", "--docs-per-request", "3",
        "--document-size", "32", "--system-prompt-size", "16", "--question-size", "10",
        "--total-requests", "5", "--request-rate", "100", "--output-tokens", "2",
    )  # fmt: skip

    assert found["summary"]["tier_tokens"] == {"apc": 4 * 112, "Cache Miss": 5 * 122 - 4 * 112}


def test_sc25(engine: FakeEngine, tmp_path: Path) -> None:
    """The warm pass finds all but the last block of every prompt."""
    found = report(
        engine, tmp_path, "sc25", "--num-prompts", "3", "--prompt-size-min", "33",
        "--prompt-size-max", "97", "--output-tokens", "2", "--pause-sec", "0",
    )  # fmt: skip

    records = found["run"]["requests"]
    assert [record["phase"] for record in records] == ["cold"] * 3 + ["warm"] * 3
    assert [record["cached_tokens"] for record in records] == [0, 0, 0, 32, 64, 96]
    assert found["summary"]["peak_concurrent_requests"] == 1
    assert set(found["summary"]["phases"]) == {"cold", "warm"}


def test_trace_hits_what_its_ids_say(engine: FakeEngine, tmp_path: Path) -> None:
    """The engine's own cache of 16-token blocks finds exactly the common ids."""
    trace = lines(
        tmp_path / "trace.jsonl",
        {"timestamp": 0, "input_length": 48, "output_length": 2, "hash_ids": [1, 2, 3]},
        {"timestamp": 20, "input_length": 64, "output_length": 2, "hash_ids": [1, 2, 4, 5]},
        {"timestamp": 40, "input_length": 33, "output_length": 2, "hash_ids": [1, 2, 3]},
    )

    found = report(engine, tmp_path, "trace", trace, "--max-outstanding-requests", "1")

    cached = [record["cached_tokens"] for record in found["run"]["requests"]]
    assert cached == [0, 32, 32]
    assert found["run"]["settings"]["trace_file"] == str(trace)
    assert all(255 >= token >= 32 for body in bodies(engine) for token in body["prompt"])


def test_trace_of_sessions(engine: FakeEngine, tmp_path: Path) -> None:
    """A turn waits for the answer before it."""
    turns = [
        {"t": 0, "think_time": 0, "input_length": 64 * size, "output_length": 2,
         "hash_ids": list(range(size))}
        for size in (1, 2, 3)
    ]  # fmt: skip
    trace = lines(tmp_path / "weka.jsonl", {"trace_id": "a", "requests": turns})

    found = report(engine, tmp_path, "trace", trace)

    cached = [record["cached_tokens"] for record in found["run"]["requests"]]
    assert cached == [0, 64, 128]


def test_otel_sends_what_was_recorded_in_order(engine: FakeEngine, tmp_path: Path) -> None:
    """Messages go to the chat endpoint, each turn after the answer before it."""
    hello = [{"role": "user", "content": "hello"}]
    more = [*hello, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "why?"}]
    spans = [
        {"start_time": at, "end_time": at + 0.5,
         "attributes": {"gen_ai.input.messages": json.dumps(messages)}}
        for at, messages in ((2.0, more), (1.0, hello))
    ]  # fmt: skip
    trace = lines(tmp_path / "otel.jsonl", {"trace_id": "a", "spans": spans})

    found = report(
        engine, tmp_path, "otel", trace, "--multiplier-to-sec", "0.1", "--output-length-max", "3"
    )

    assert [body["messages"] for body in bodies(engine)] == [hello, more]
    assert [body["max_tokens"] for body in bodies(engine)] == [3, 3]
    first, second = found["run"]["requests"]
    assert second["sent_seconds"] - first["sent_seconds"] >= 0.05


def test_pretokenized_otel_goes_to_completions(engine: FakeEngine, tmp_path: Path) -> None:
    """Token ids are sent as they are."""
    turns = [{"hash_ids": list(range(40)), "output_length": 2}]
    trace = lines(tmp_path / "tokens.jsonl", {"trace_id": "a", "turns": turns})

    found = report(engine, tmp_path, "otel", trace)

    assert found["run"]["endpoint"] == "/v1/completions"
    assert bodies(engine)[0]["prompt"] == list(range(40))


def test_table_on_standard_output_and_nothing_else(engine: FakeEngine) -> None:
    """What a script reads is the table; where it stands goes to standard error."""
    result = run("uniform", "--url", engine.url, *SIZES, *QUICK, "--total-requests", "4")

    shown = result.stdout.splitlines()
    assert result.exit_code == 0
    assert "Serving Benchmark Result" in shown[0]
    assert shown[1].split() == ["Successful", "requests:", "4"]
    assert any(line.startswith("Cache Miss (") for line in shown)
    assert "uniform: 4 requests to" in result.stderr
    assert "-1" not in result.stdout


def test_some_failures_are_counted_and_the_rest_is_a_result(
    engine: FakeEngine, tmp_path: Path
) -> None:
    """A failed request is in no figure but the number of failures."""
    engine.fault, engine.fault_count = 503, 3
    found = report(
        engine, tmp_path, "uniform", *SIZES, *QUICK, "--total-requests", "8",
        "--max-outstanding-requests", "1",
    )  # fmt: skip

    summary = found["summary"]
    assert (summary["successful_requests"], summary["failed_requests"]) == (5, 3)
    assert summary["errors"] == {"http_503": 3}
    assert sum(summary["tier_tokens"].values()) == summary["input_tokens"]


def test_nothing_but_failures_is_a_failure(engine: FakeEngine) -> None:
    """The exit code tells a script, the sentence a person what it was."""
    engine.fault = 500
    result = run("uniform", "--url", engine.url, *SIZES, *QUICK, "--total-requests", "3")

    assert result.exit_code == 1
    assert "  http_500:" in result.stdout
    assert "No request succeeded; the first one failed with http_500" in result.stderr


def test_engine_that_does_not_say_cached_tokens(engine: FakeEngine, tmp_path: Path) -> None:
    """Then the instances' counters are the split, and the notes say what would be better."""
    engine.says_cached = False
    found = report(engine, tmp_path, "uniform", *SIZES, *QUICK, "--total-requests", "5")

    assert found["summary"]["tier_tokens"]["apc"] == 4 * 64
    assert "--enable-prompt-tokens-details" in found["summary"]["notes"][0]


def test_key_is_sent_and_never_written(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from the environment, goes to the endpoint, and is in no file and no output."""
    monkeypatch.setenv("BENCH_KEY", "sk-secret\n")  # as files end
    file = tmp_path / "out.json"
    result = run(
        "uniform", "--url", engine.url, *SIZES, *QUICK, "--total-requests", "2",
        "--api-key-env", "BENCH_KEY", "--header", "X-Tenant: a: b", "--json", file,
        "--extra-body", '{"cache_salt": "s", "temperature": 0.5}',
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    for _, found, _ in engine.seen:
        headers = {name.lower(): value for name, value in found}
        assert headers[b"authorization"] == b"Bearer sk-secret"
        assert headers[b"x-tenant"] == b"a: b"
    assert [(one["cache_salt"], one["temperature"]) for one in bodies(engine)] == [("s", 0.5)] * 2
    assert "sk-secret" not in file.read_text() + result.output


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
def test_plot_is_drawn(engine: FakeEngine, tmp_path: Path) -> None:
    """A picture in the format of the file's name, with failures too."""
    engine.fault, engine.fault_count = 500, 1
    picture = tmp_path / "out.png"
    result = run(
        "sc25", "--url", engine.url, "--num-prompts", "2", "--prompt-size-min", "20",
        "--prompt-size-max", "40", "--pause-sec", "0", "--plot", picture,
    )  # fmt: skip
    assert result.exit_code == 1
    engine.fault = None
    result = run(
        "uniform", "--url", engine.url, *SIZES, *QUICK, "--total-requests", "3", "--plot", picture
    )

    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_file_that_cannot_be_written_costs_no_figure(engine: FakeEngine, tmp_path: Path) -> None:
    """What took long to measure is shown before it is written."""
    result = run(
        "uniform", "--url", engine.url, *SIZES, *QUICK, "--total-requests", "2",
        "--json", tmp_path / ("x" * 300),
    )  # fmt: skip

    assert result.exit_code == 1
    assert "Successful requests" in result.stdout
    assert "File name too long" in result.stderr


@pytest.mark.parametrize("listing", [["m"], [{"name": "m"}], {"m": 1}, []])
def test_server_that_names_no_model_is_one_sentence(listing: Any) -> None:
    """Whatever it lists in place of models."""

    class Odd(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": listing}).encode())

    with HTTPServer(("127.0.0.1", 0), Odd) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = run("sc25", "--url", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()

    assert result.exit_code == 1
    assert "lists no model; name one with --model." in result.stderr


def test_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without aiohttp the user learns the extra's name."""
    monkeypatch.setitem(sys.modules, "opal_connector.cli.bench.client", None)

    result = run("uniform", "--url", "http://127.0.0.1:9", "--total-requests", "1")

    assert result.exit_code == 1
    assert "pip install 'opal-connector[bench]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["uniform", "--url", "localhost:8000"], "--url: found 'localhost:8000', allowed: http"),
        (["uniform", "--url", "http://[::1"], "--url: found 'http://[::1', allowed: http"),
        (["uniform", "--url", "http://me:secret@x"], "--url: found a name before the host; a"),
        (
            ["uniform", "--url", "http://x", "--metrics", "x"],
            "--metrics: found 'x', allowed: http://HOST:PORT",
        ),
        (
            ["uniform", "--url", "http://x", "--request-rate", "0"],
            "--request-rate: found 0, allowed: more than 0.",
        ),
        (
            ["rag", "--url", "http://x", "--docs-per-request", "11"],
            "--docs-per-request: found 11, allowed: at most num_documents, which is 10.",
        ),
        (
            ["sc25", "--url", "http://x", "--api-key-env", "NOT_THERE"],
            "--api-key-env: the environment variable NOT_THERE is not set.",
        ),
        (["sc25", "--url", "http://x", "--header", "nothing"], "--header: found no 'NAME: VALUE'"),
        (["sc25", "--url", "http://x", "--header", "A: b\nC: d"], "--header: found a character"),
        (
            ["sc25", "--url", "http://x", "--session-header", "a\0b"],
            "--session-header: found a char",
        ),
        (["sc25", "--url", "http://x", "--extra-body", "[]"], "--extra-body: Expected `object`"),
        (["sc25", "--url", "http://x", "--json", "absent/out.json"], "no directory absent."),
        (["sc25"], "Missing option '--url'"),
    ],
)
def test_mistake_is_one_sentence(arguments: list[str], sentence: str) -> None:
    """What cannot be is said before anything is sent, with exit code 2."""
    result = run(*arguments)

    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert "secret" not in result.output


def test_bad_trace_is_one_sentence(engine: FakeEngine, tmp_path: Path) -> None:
    """The file, the line and the field."""
    trace = lines(tmp_path / "bad.jsonl", {"timestamp": 1, "input_length": 5})

    result = run("trace", trace, "--url", engine.url)

    assert result.exit_code == 2
    assert "bad.jsonl: line 1, hash_ids: missing." in result.stderr


def test_trace_of_which_nothing_is_left_is_one_sentence(engine: FakeEngine, tmp_path: Path) -> None:
    """Limits that leave nothing are a mistake, not an empty table."""
    trace = lines(
        tmp_path / "one.jsonl",
        {"timestamp": 1, "input_length": 50, "hash_ids": [1, 2, 3, 4], "output_length": 1},
    )

    result = run("trace", trace, "--url", engine.url, "--input-length-max", "10")

    assert result.exit_code == 2
    assert "nothing of one.jsonl is within limits." in result.stderr
    assert "Traceback" not in result.output


def test_first_interruption_shows_what_was_measured(engine: FakeEngine, tmp_path: Path) -> None:
    """Ctrl-C after an hour does not throw the hour away."""
    engine.token_seconds = 0.05
    output = tmp_path / "out.txt"
    arguments = ["bench", "uniform", "--url", engine.url, *SIZES, "--request-rate", "20"]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "opal_connector.cli.main", *arguments], stdout=file
        )
        try:
            deadline = time.monotonic() + 30
            while engine.ended["whole"] < 2:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 1
        finally:
            process.kill()
            process.wait()

    shown = output.read_text()
    assert "Successful requests:" in shown
    assert "Note: Stopped early:" in shown
