"""Made-up workloads: they share what they say, arrive as they say, and are the same everywhere."""

import itertools
import math
import os
import statistics
import subprocess
import sys
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opal_connector.cli.bench import (
    Conversation,
    ExponentialReqRate,
    RAGWorkload,
    SC25Workload,
    Sessions,
    Turn,
    UniformReqRate,
    Vocabulary,
    Workload,
    WorkloadError,
)
from opal_connector.cli.bench.words import spell

SMALL = {"prompt_size_min": 60, "prompt_size_max": 90, "default_prefix_length": 50}


GOLDEN = [70, 162, 55, 44, 58, 57, 111, 50]  # of the key ("hash id", 0, 7)


def conversations(
    workload: Workload, vocabulary: Vocabulary | None = None
) -> list[tuple[Conversation, list[Turn]]]:
    made = workload.conversations(vocabulary or Vocabulary())
    return [(one, list(one.turns)) for one in made]


def prompts(workload: Workload, vocabulary: Vocabulary | None = None) -> list[list[int]]:
    return [turn.token_ids for _, turns in conversations(workload, vocabulary) for turn in turns]


def common(one: list[int], other: list[int]) -> int:
    """Tokens that two prompts have in common from the start."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def batched(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


# Rates.


@given(
    seed=st.integers(0, 1000),
    length=st.integers(0, 200),
    more=st.tuples(st.integers(1, 20), st.integers(0, 100)),
    prefixes=st.integers(1, 5),
)
def test_prompts_share_beginnings_of_exactly_that_length(
    seed: int, length: int, more: tuple[int, int], prefixes: int
) -> None:
    """As many beginnings as were asked for at most, and behind them nothing is shared for long."""
    workload = UniformReqRate(
        seed=seed,
        total_requests=20,
        default_prefix_length=length,
        prefixes=prefixes,
        prompt_size_min=length + more[0],
        prompt_size_max=length + sum(more),
    )

    found = prompts(workload, Vocabulary(end=100_000))

    beginnings = Counter(tuple(prompt[:length]) for prompt in found)
    assert len(beginnings) <= prefixes
    assert all(length + more[0] <= len(prompt) <= length + sum(more) for prompt in found)
    for one, other in itertools.combinations(found, 2):
        shared = common(one, other)
        if length:
            assert (shared >= length) == (one[:length] == other[:length])
        assert shared <= length + 2, "chance alone makes longer ones too rarely to be seen"


def test_every_prefix_is_used() -> None:
    """Five beginnings over a hundred requests are about equally frequent."""
    found = prompts(UniformReqRate(**SMALL, total_requests=100, prefixes=5))

    counts = Counter(tuple(prompt[:50]) for prompt in found)
    assert len(counts) == 5
    assert min(counts.values()) >= 8


def test_sizes_and_answers_fill_their_ranges() -> None:
    """Both ends of a range are reached."""
    workload = UniformReqRate(**SMALL, total_requests=500, output_tokens_min=3, output_tokens_max=6)

    turns = [turns[0] for _, turns in conversations(workload)]

    assert {len(turn.token_ids) for turn in turns} == set(range(60, 91))
    assert {turn.output_tokens for turn in turns} == {3, 4, 5, 6}


def gaps(workload: Workload) -> list[float]:
    starts = [one.start_seconds for one, _ in conversations(workload)]
    return [later - sooner for sooner, later in itertools.pairwise(starts)]


def test_uniform_arrivals_are_equally_far_apart() -> None:
    """Without jitter there is no chance in them."""
    found = gaps(UniformReqRate(**SMALL, total_requests=50, request_rate=4))

    assert found == pytest.approx([0.25] * 49)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    """Distances are exponentially distributed: their spread equals their mean."""
    found = gaps(ExponentialReqRate(**SMALL, total_requests=4000, request_rate=20))

    assert statistics.mean(found) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(found) == pytest.approx(1 / 20, rel=0.08)
    below_mean = sum(gap < 1 / 20 for gap in found) / len(found)
    assert below_mean == pytest.approx(0.632, abs=0.02)


def test_jitter_mixes_both() -> None:
    """Half of a distance is fixed with a jitter of a half, and the rate stays."""
    found = gaps(UniformReqRate(**SMALL, total_requests=4000, request_rate=20, jitter=0.5))

    assert min(found) >= 0.025
    assert statistics.mean(found) == pytest.approx(1 / 20, rel=0.05)


def test_duration_ends_the_arrivals() -> None:
    """With a duration, as many come as the rate brings."""
    workload = UniformReqRate(**SMALL, request_rate=10, time_duration_sec=2.05)

    assert len(conversations(workload)) == 21
    assert workload.request_count is None


def test_infinite_rate_is_all_at_once() -> None:
    """The most that an endpoint takes is measured without waiting for arrivals."""
    workload = ExponentialReqRate(**SMALL, request_rate=float("inf"), total_requests=5)

    assert [one.start_seconds for one, _ in conversations(workload)] == [0.0] * 5


# RAG.


@given(
    seed=st.integers(0, 1000),
    documents=st.integers(1, 12),
    share=st.floats(0, 1),
    sizes=st.tuples(st.integers(0, 20), st.integers(1, 30), st.integers(0, 9)),
)
def test_rag_prompts_are_distinct_documents_in_order(
    seed: int, documents: int, share: float, sizes: tuple[int, int, int]
) -> None:
    """System prompt, then whole documents sorted, none twice, then what is the request's own."""
    wanted = max(1, round(share * documents))
    workload = RAGWorkload(
        seed=seed,
        num_documents=documents,
        docs_per_request=wanted,
        system_prompt_size=sizes[0],
        document_size=sizes[1],
        question_size=sizes[2],
        total_requests=10,
    )
    vocabulary = Vocabulary(end=1_000_000)

    found = prompts(workload, vocabulary)

    texts = [vocabulary.tokens(sizes[1], "document", seed, number) for number in range(documents)]
    for prompt in found:
        assert len(prompt) == sizes[0] + wanted * sizes[1] + sizes[2]
        assert prompt[: sizes[0]] == found[0][: sizes[0]]
        body = prompt[sizes[0] : sizes[0] + wanted * sizes[1]]
        numbers = [texts.index(part) for part in batched(body, sizes[1])]
        assert numbers == sorted(set(numbers))


def test_rag_uses_all_documents_equally() -> None:
    """Every document is in its share of the prompts."""
    workload = RAGWorkload(
        num_documents=5, docs_per_request=2, document_size=8, system_prompt_size=0,
        total_requests=1000,
    )  # fmt: skip
    vocabulary = Vocabulary()
    texts = {tuple(vocabulary.tokens(8, "document", 0, number)): number for number in range(5)}

    counts = Counter(
        texts[tuple(prompt[place : place + 8])] for prompt in prompts(workload) for place in (0, 8)
    )

    assert all(330 <= counts[number] <= 470 for number in range(5))


# SC25.


def test_sc25_is_a_cold_pass_and_the_same_once_more() -> None:
    """One conversation: every prompt waits for the answer before it."""
    workload = SC25Workload(num_prompts=4, prompt_size_min=10, prompt_size_max=40, pause_sec=2)

    [(conversation, turns)] = conversations(workload)

    assert [len(turn.token_ids) for turn in turns] == [10, 20, 30, 40] * 2
    assert [turn.token_ids for turn in turns[:4]] == [turn.token_ids for turn in turns[4:]]
    assert [turn.phase for turn in turns] == ["cold"] * 4 + ["warm"] * 4
    assert [turn.delay_seconds for turn in turns] == [0, 0, 0, 0, 2, 0, 0, 0]
    assert conversation.turn_count == workload.request_count == 8
    assert workload.requests_at_once == 1
    for one, other in itertools.combinations(turns[:4], 2):
        assert common(one.token_ids, other.token_ids) < 10, "no prompt warms another"


def test_sc25_defaults_are_opals() -> None:
    """Ten prompts from 4092 to 130944 tokens."""
    sizes = SC25Workload().sizes

    assert (len(sizes), sizes[0], sizes[-1]) == (10, 4092, 130944)
    assert sizes == sorted(set(sizes))


# Sessions.


def test_sessions_share_the_system_prompt_and_differ_in_all_else() -> None:
    """What is common to users is the system prompt, and a document that they share."""
    workload = Sessions(
        num_users=4, turns_per_user=3, system_prompt_size=20, document_size=30, num_documents=2
    )

    found = conversations(workload)

    systems = {turns[0].messages[0]["content"] for _, turns in found}
    assert len(systems) == 1
    assert len(systems.pop().split()) == 20
    openings = [turns[0].messages[1]["content"].split("\n\n") for _, turns in found]
    assert [len(part.split()) for part in openings[0]] == [30, 32]
    assert openings[0][0] == openings[2][0] != openings[1][0] == openings[3][0]
    questions = [turn.messages[-1]["content"] for _, turns in found for turn in turns]
    assert len(set(questions)) == 12
    assert all(len(turn.messages) == 1 for _, turns in found for turn in turns[1:])


def test_think_time_has_its_mean_and_no_jitter_is_none() -> None:
    """Pauses are drawn per turn; the first turn has none."""
    drawn = Sessions(num_users=200, turns_per_user=6, think_time_sec=2.0)
    fixed = Sessions(num_users=2, turns_per_user=3, think_time_sec=2.0, think_jitter=0.0)

    pauses = [turn.delay_seconds for _, turns in conversations(drawn) for turn in turns[1:]]

    assert statistics.mean(pauses) == pytest.approx(2.0, rel=0.1)
    assert [turn.delay_seconds for turn in conversations(fixed)[0][1]] == [0.0, 2.0, 2.0]


def test_given_texts_take_the_place_of_made_up_ones() -> None:
    """A benchmark with real documents uses them, in turn."""
    workload = Sessions(
        num_users=3,
        turns_per_user=2,
        system_prompt="Be brief.",
        documents=("first", "second"),
        questions=("why?", "how?", "when?"),
    )

    found = conversations(workload)

    assert found[0][1][0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first\n\nwhy?"},
    ]
    assert found[2][1][0].messages[1]["content"] == "first\n\nhow?"
    assert found[1][1][1].messages == [{"role": "user", "content": "why?"}]


# All.

WORKLOADS: list[Workload] = [
    UniformReqRate(**SMALL, total_requests=8, prefixes=2, jitter=0.5),
    ExponentialReqRate(**SMALL, total_requests=8),
    RAGWorkload(
        num_documents=4, document_size=20, docs_per_request=2, total_requests=8, question_size=5
    ),
    SC25Workload(num_prompts=3, prompt_size_min=10, prompt_size_max=50),
    Sessions(num_users=3, think_time_sec=1.0, document_size=10, session_rate=2.0),
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one.kind)
def test_seed_alone_decides(workload: Workload) -> None:
    """Equal seeds give equal requests and times, another seed gives others."""

    def everything(one: Workload) -> list[Any]:
        return [
            (found.conversation_id, found.start_seconds, turns)
            for found, turns in conversations(one)
        ]

    assert everything(workload) == everything(workload)
    assert everything(msgspec.structs.replace(workload, seed=1)) != everything(workload)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one.kind)
def test_counts_are_what_is_made(workload: Workload) -> None:
    """The progress bar ends at its end; conversations say how many turns they have."""
    found = conversations(workload)

    assert sum(len(turns) for _, turns in found) == workload.request_count
    assert all(one.turn_count == len(turns) for one, turns in found)
    starts = [one.start_seconds for one, _ in found]
    assert starts == sorted(starts)
    assert len({one.conversation_id for one, _ in found}) == len(found)


@pytest.mark.parametrize(
    "workload", [one for one in WORKLOADS if not one.is_chat], ids=lambda one: one.kind
)
def test_token_ids_are_of_the_vocabulary(workload: Workload) -> None:
    """A small vocabulary is used whole, and nothing outside of it is ever sent."""
    found = [token for prompt in prompts(workload, Vocabulary(10, 15)) for token in prompt]

    assert set(found) == set(range(10, 15))


def test_prompts_are_the_same_in_another_process() -> None:
    """Nothing depends on the hash seed of a process: a second run meets the first one's cache."""
    program = (
        "from opal_connector.cli.bench import ExponentialReqRate, Vocabulary\n"
        "made = ExponentialReqRate(total_requests=3).conversations(Vocabulary())\n"
        "print([(one.start_seconds, list(one.turns)[0].token_ids[-9:]) for one in made])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }

    assert len(outputs) == 1


def test_tokens_of_a_key_never_change() -> None:
    """Runs of one version warm caches for runs of the next: the numbers are part of the format."""
    assert Vocabulary().tokens(8, "hash id", 0, 7) == GOLDEN
    assert Vocabulary().tokens(3, "hash id", 0, 7) == GOLDEN[:3]


def test_words_keep_a_common_start_and_their_number() -> None:
    """A text has a word for every token, so that sizes keep their meaning."""
    assert spell([1, 2, 3, 4]).split() == [*spell([1, 2, 3]).split(), spell([4])]
    assert len({spell([token]) for token in range(32, 256)}) == 224


@pytest.mark.parametrize(
    ("kind", "parameters", "sentence"),
    [
        (UniformReqRate, {"request_rate": 0}, "request_rate: found 0, allowed: more than 0"),
        *(
            (
                kind,
                {"request_rate": math.inf, "time_duration_sec": 5},
                "request_rate: found inf, allowed: a finite one, or total_requests as well",
            )
            for kind in (UniformReqRate, RAGWorkload)
        ),
        (UniformReqRate, {"jitter": 1.5}, "jitter: found 1.5, allowed: 1 or less"),
        (UniformReqRate, {"total_requests": 0}, "total_requests: found 0, allowed: 1 or more"),
        (
            UniformReqRate,
            {"prompt_size_min": 1024},
            "prompt_size_min: found 1024, allowed: 1025 or more",
        ),
        (
            UniformReqRate,
            {"prompt_size_min": 3000},
            "prompt_size_min: found 3000, allowed: at most prompt_size_max, which is 2048",
        ),
        (
            RAGWorkload,
            {"docs_per_request": 11},
            "docs_per_request: found 11, allowed: at most num_documents, which is 10",
        ),
        (SC25Workload, {"num_prompts": 0}, "num_prompts: found 0, allowed: 1 or more"),
        (Sessions, {"think_time_sec": -1}, "think_time_sec: found -1, allowed: 0 or more"),
        (Vocabulary, {"end": 32}, "vocabulary: found 32 token ids, allowed: more than 32"),
    ],
)
def test_parameter_that_cannot_be_is_named(kind: Any, parameters: Any, sentence: str) -> None:
    """One sentence says the field, what was found and what is allowed."""
    with pytest.raises(WorkloadError) as caught:
        kind(**parameters)

    assert str(caught.value) == sentence
