"""`opal kvbm`: what a person sees of real event channels, and that a difference is found."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fakes import done, make_manager, store, tokens_of
from publisher_world import BooksSource, blocks_of, books_blocks, open_channel
from typing_extensions import override

from opal_connector.cli import kvbm_client
from opal_connector.cli.main import opal
from opal_connector.cli.tiny_models import TinyLlama
from opal_connector.cluster.publisher import Publisher
from opal_connector.config import Endpoint
from opal_connector.events import ObjectFact
from opal_connector.managers import OpalKVCacheManager, one_table

TIER = "CPUMemory"
NOBODY = "tcp://127.0.0.1:9"  # the discard port, where nothing listens


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(opal, ["kvbm", *map(str, arguments)])


def facts(*arguments: str | Path, exit_code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return dict(json.loads(result.stdout))


def address(publisher: Publisher) -> str:
    endpoint: Endpoint | None = publisher.endpoint
    assert endpoint is not None
    return endpoint.announced


@pytest.fixture
def books() -> OpalKVCacheManager:
    return make_manager(rows=64)


@pytest.fixture
def channel(books: OpalKVCacheManager) -> Iterator[str]:
    """The address of an instance whose books hold six blocks."""
    publisher = open_channel(books)
    store(books, range(6))
    yield address(publisher)
    publisher.close()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("dump",), "Name at least one source, with --instance, --vllm or --vllm-url."),
        (("dump", "--instance", "host:5601"), "--instance takes tcp://HOST:PORT, not 'host:5601'."),
        (
            ("dump", "--instance", "tcp://*:5601"),
            "--instance needs the host and the port to connect to, not 'tcp://*:5601'.",
        ),
        (
            ("dump", "--instance", NOBODY, "--instance", NOBODY),
            f"{NOBODY} is named twice; a source is named once.",
        ),
        (
            ("watch", "--vllm", "tcp://host:5557"),
            "--vllm takes NAME=tcp://HOST:PORT[,replay=tcp://HOST:PORT], not 'tcp://host:5557'.",
        ),
        (
            ("watch", "--vllm", "a=tcp://host:5557,again=tcp://host:5558"),
            "--vllm has one replay= behind its endpoint, not 'again=tcp://host:5558'.",
        ),
        (
            ("watch", "--vllm", "a=tcp://host:5557,replay=host"),
            "--vllm replay takes tcp://HOST:PORT, not 'host'.",
        ),
        (("verify", "--vllm-url", "host"), "--vllm-url takes http://HOST:PORT, not 'host'."),
        (
            ("match", "--instance", NOBODY),
            "Give the prompt with --prompt or with --tokens, and not with both.",
        ),
        (
            ("match", "--instance", NOBODY, "--prompt", "a"),
            "--prompt needs --tokenizer, the directory of the model's tokenizer.",
        ),
        (
            ("match", "--instance", NOBODY, "--tokens", "1,x"),
            "--tokens takes numbers such as 1,2,3 or @FILE with a JSON list, not '1,x'.",
        ),
        (
            ("match", "--instance", NOBODY, "--tokens", "@/nowhere"),
            "/nowhere cannot be read: No such file or directory.",
        ),
        (
            ("match", "--instance", NOBODY, "--tokens", "1,-2"),
            "--tokens takes at most 1048576 token ids, of 0 to 2^32 - 1 each.",
        ),
    ],
)
def test_wrong_option_gets_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = run(*arguments)

    assert result.exit_code == 2
    assert result.stderr == f"Error: {sentence}\n"


def test_tokenizer_directory_without_a_tokenizer_is_said(tmp_path: Path) -> None:
    result = run("match", "--instance", NOBODY, "--prompt", "a", "--tokenizer", tmp_path)

    assert result.exit_code == 2
    assert "has no tokenizer.json, which --tokenizer needs." in result.stderr


def test_source_that_does_not_answer_is_named_with_its_state() -> None:
    result = run("dump", "--instance", NOBODY, "--wait", "0.2")

    assert result.exit_code == 1
    assert result.stderr == (f"Error: Not all sources are known within 0.2 s: {NOBODY} is init.\n")


def test_dump_is_what_the_books_hold(channel: str, books: OpalKVCacheManager) -> None:
    (place,) = facts("dump", "--instance", channel, "--blocks")["places"]

    held = books_blocks(books)[0, TIER]
    assert {bytes.fromhex(block["hash"]) for block in place.pop("hashes")} == held
    assert place == {"instance": "one", "group": 0, "tier": TIER, "blocks": 6}


def test_dump_is_a_table_for_a_person(channel: str) -> None:
    counts = run("dump", "--instance", channel).stdout.splitlines()
    blocks = run("dump", "--instance", channel, "--blocks").stdout.splitlines()

    assert counts[1].split() == ["one", "0", TIER, "6"]
    assert len(blocks) == 7


def test_match_says_how_much_of_a_prompt_lies_where(channel: str, tmp_path: Path) -> None:
    tokens = [*tokens_of(range(4)), *tokens_of([99])]
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(tokens))

    from_file = facts("match", "--instance", channel, "--tokens", f"@{file}", "--model", "m")
    listed = facts("match", "--instance", channel, "--tokens", ",".join(map(str, tokens)))

    block_tokens = len(tokens) // 5
    assert from_file == listed
    assert from_file["prompt_tokens"] == len(tokens)
    assert from_file["workers"] == [
        {
            "instance": "one",
            "tokens": 4 * block_tokens,
            "device_tokens": 0,
            "tier_tokens": {TIER: 4 * block_tokens},
            "fraction": 0.8,
        }
    ]


@pytest.mark.parametrize(
    "other", [("--salt", "x"), ("--lora", "adapter"), ("--model", "another")], ids=lambda o: o[0]
)
def test_match_of_another_namespace_is_empty(channel: str, other: tuple[str, str]) -> None:
    tokens = ",".join(map(str, tokens_of(range(4))))

    found = facts("match", "--instance", channel, "--tokens", tokens, *other)
    text = run("match", "--instance", channel, "--tokens", tokens, *other).stdout

    assert found["workers"] == []
    assert text == f"No instance has anything of these {len(tokens_of(range(4)))} tokens.\n"


def test_match_reads_a_text_with_the_models_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    TinyLlama().build(tmp_path)
    manager = make_manager(rows=64)
    publisher = open_channel(manager)
    text = "".join(chr(33 + place % 90) for place in range(3 * len(tokens_of([0]))))
    request = manager.new_request("r")
    request.extend(list(text.encode()))
    job = manager.plan_store(request, full_blocks=3, tables=one_table(range(3)), include_tail=True)
    assert job is not None
    manager.commit(done(job))
    try:
        found = facts(
            *("match", "--instance", address(publisher)),
            *("--prompt", text, "--tokenizer", tmp_path),
        )
    finally:
        publisher.close()

    assert found["workers"][0]["tokens"] == len(text)


def test_watch_once_shows_instance_state_and_tiers(channel: str) -> None:
    (row,) = facts("watch", "--instance", channel, "--once")["instances"]
    shown = run("watch", "--instance", channel, "--once").stdout.splitlines()

    assert (row["instance"], row["state"], row["gaps"]) == ("one", "live", 0)
    assert [(tier["tier"], tier["blocks"]) for tier in row["tiers"]] == [(TIER, 6)]
    assert shown[1].split()[:2] == ["one", "live"]
    assert shown[4].split()[:4] == ["one", TIER, "6", "6"]


def test_watch_shows_a_source_that_was_never_heard() -> None:
    (row,) = facts("watch", "--instance", NOBODY, "--once", "--wait", "0.1")["instances"]

    assert (row["instance"], row["source"], row["state"]) == (None, NOBODY, "init")


def test_watch_ends_with_ctrl_c_and_has_written_whole_lines(channel: str) -> None:
    command = [sys.executable, "-m", "opal_connector.cli.main", "kvbm", "watch", "--json"]
    with subprocess.Popen(
        [*command, "--instance", channel], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        looks += map(json.loads, process.stdout)

    assert process.returncode == 0
    assert looks[2]["instances"][0]["instance"] == "one"
    assert looks[0]["at"] < looks[1]["at"] < looks[2]["at"]


def test_server_that_does_not_say_where_its_events_are_is_named() -> None:
    result = run("dump", "--vllm-url", "http://127.0.0.1:9")

    assert result.exit_code == 1
    assert result.stderr.startswith("Error: http://127.0.0.1:9/kv_event_sources does not answer")
    assert result.stderr.count("\n") == 1


def test_verify_finds_no_difference_where_there_is_none(channel: str) -> None:
    report = facts("verify", "--instance", channel, "--seconds", "0")

    assert (report["ok"], report["differences"], report["not_compared"]) == (True, 0, 0)
    (place,) = report["instances"][0]["places"]
    assert (place["tier"], place["blocks"]) == (TIER, 6)


class Liar(BooksSource):
    """Says the truth to whoever asks first, and later names other blocks than its events did."""

    def __init__(self, manager: OpalKVCacheManager) -> None:
        super().__init__(manager)
        self.listings = 0

    @override
    def list_facts(self, group: int, tier: str) -> Iterator[ObjectFact]:
        self.listings += 1
        named = list(super().list_facts(group, tier))
        if self.listings == 1:
            yield from named
            return
        yield from named[1:]
        yield ObjectFact(0, b"", b"\x07" * 32)


def test_verify_names_what_is_missing_and_what_is_phantom(books: OpalKVCacheManager) -> None:
    liar = Liar(books)
    publisher = open_channel(books, source=liar)
    store(books, range(6))
    try:
        report = facts(*("verify", "--instance", address(publisher), "--seconds", "0"), exit_code=1)
        liar.listings = 0
        text = run("verify", "--instance", address(publisher), "--seconds", "0")
    finally:
        publisher.close()

    (place,) = report["instances"][0]["places"]
    lost = set(blocks_of(next(iter(BooksSource(books).list_facts(0, TIER))).block_hashes))
    assert (report["ok"], place["missing"], place["phantom"]) == (False, 1, len(lost))
    assert place["missing_hashes"] == ["07" * 32]
    assert {bytes.fromhex(name) for name in place["phantom_hashes"]} <= lost
    assert "differences, 0 of 1 sources not compared." in text.stdout


def test_verify_says_what_it_could_not_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvbm_client, "ANSWER_SECONDS", 0.2)

    report = facts(
        *("verify", "--instance", NOBODY, "--vllm", f"plain={NOBODY}"),
        *("--seconds", "0", "--settle", "0"),
        exit_code=2,
    )

    reasons = {one["source"]: one["reason"] for one in report["instances"]}
    assert (report["ok"], report["not_compared"]) == (False, 2)
    assert reasons[NOBODY] == f"{NOBODY} did not answer within 0.2 s"
    assert reasons["plain"] == "a plain vLLM engine cannot be asked what it holds"


@pytest.mark.parametrize("number", ["nan", "inf", "-1"])
@pytest.mark.parametrize("option", ["--seconds", "--settle"])
def test_waiting_times_are_numbers(option: str, number: str) -> None:
    result = run("verify", "--instance", NOBODY, option, number)

    assert result.exit_code == 2
    assert option in result.output
