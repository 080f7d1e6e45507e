"""The router's small parts: breaker, bodies, what answers say, figures, keys."""

import pytest

from opal_connector.cluster.router.access import read_key
from opal_connector.cluster.router.bodies import read_body
from opal_connector.cluster.router.breaker import Breaker, BreakerSettings, BreakerState
from opal_connector.cluster.router.histogram import Histogram
from opal_connector.cluster.router.usage import CachedTokens
from opal_connector.cluster.router.wire import origin_form, passed_on
from opal_connector.config import ConfigError

SETTINGS = BreakerSettings(failures=2, open_seconds=1.0, longest_open_seconds=3.0)


def test_a_breaker_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(5):
        breaker.fail(0.0)
        breaker.succeed()
    assert breaker.allows(0.0)
    breaker.fail(0.0)
    breaker.fail(0.0)
    assert (breaker.state(0.5), breaker.allows(0.5)) == (BreakerState.OPEN, False)
    assert breaker.wait_seconds(0.4) == pytest.approx(0.6)


def test_a_half_open_breaker_lets_one_request_try() -> None:
    breaker = Breaker(SETTINGS)
    breaker.fail(0.0)
    breaker.fail(0.0)
    assert breaker.state(1.0) is BreakerState.HALF_OPEN
    assert breaker.allows(1.0)
    breaker.begin()
    assert not breaker.allows(1.0)
    breaker.abandon()  # its client went away: that tells nothing
    assert breaker.allows(1.0)
    breaker.begin()
    breaker.succeed()
    assert breaker.state(1.0) is BreakerState.CLOSED


def test_each_failed_trial_doubles_the_wait_up_to_a_bound() -> None:
    breaker, now, waits = Breaker(SETTINGS), 0.0, []
    breaker.fail(now)
    for _ in range(4):
        breaker.fail(now)
        waits.append(breaker.wait_seconds(now))
        now += waits[-1]
        breaker.begin()
    assert waits == [1.0, 2.0, 3.0, 3.0]
    breaker.succeed()
    breaker.fail(now)
    breaker.fail(now)
    assert breaker.wait_seconds(now) == 1.0


@pytest.mark.parametrize(
    ("raw", "token_ids", "text"),
    [
        (b'{"prompt": [1, 2]}', [1, 2], None),
        (b'{"prompt": [ [1, 2] ]}', [1, 2], None),
        (b'{"prompt": [[1], [2]]}', None, None),
        (b'{"prompt": []}', None, None),
        (b'{"prompt": [[]]}', None, None),
        (b'{"prompt": [-1]}', None, None),
        (b'{"prompt": [4294967296]}', None, None),
        (b'{"prompt": [1.5]}', None, None),
        (b'{"prompt": "a"}', None, "a"),
        (b'{"prompt": ["a"]}', None, "a"),
        (b'{"prompt": ["a", "b"]}', None, None),
        (b'{"prompt": null}', None, None),
        (b"{}", None, None),
        (b"null", None, None),
        (b"{", None, None),
        (b"[" * 100_000, None, None),
    ],
)
def test_a_prompt_is_found_where_there_is_one(
    raw: bytes, token_ids: list[int] | None, text: str | None
) -> None:
    body = read_body(raw)
    assert (body.token_ids, body.text, body.raw) == (token_ids, text, raw)
    assert body.estimated_tokens >= 1


def test_fields_of_a_wrong_type_are_not_there() -> None:
    body = read_body(b'{"model": 1, "user": ["a"], "cache_salt": ""}')
    assert (body.model, body.user, body.cache_salt) == (None, None, None)
    body = read_body(b'{"model": "m", "user": "u", "cache_salt": "s"}')
    assert (body.model, body.user, body.cache_salt) == ("m", "u", "s")


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_cached_tokens_are_found_however_the_answer_is_cut(size: int) -> None:
    said = b'data: {"usage": null}\n\n' * 5_000
    said += b'data: {"usage": {"prompt_tokens_details": {"cached_tokens": 48}}}\n\ndata: [DONE]\n\n'
    cached = CachedTokens(is_stream=True)
    for start in range(0, len(said), size):
        cached.see(said[start : start + size])
    assert cached.found() == 48


def test_what_a_model_wrote_is_never_taken_for_what_the_engine_says() -> None:
    cached = CachedTokens(is_stream=False)
    cached.see(rb'{"text": "\"cached_tokens\": 7", "usage": {"prompt_tokens": 3}}')
    assert cached.found() is None


def test_the_end_of_an_answer_is_all_that_is_kept() -> None:
    cached = CachedTokens(is_stream=True)
    for _ in range(10_000):
        cached.see(b"x" * 100)
    assert sum(map(len, cached._chunks)) < 40_000


def test_headers_between_two_neighbours_are_not_passed_on() -> None:
    headers = [(b"Connection", b"close, X-Mine"), (b"x-mine", b"1"), (b"Keep", b"2")]
    assert list(passed_on(headers, frozenset({b"connection"}))) == [(b"Keep", b"2")]


@pytest.mark.parametrize(
    ("target", "passed_on_as"),
    [
        ("/v1/completions?a=%2F&b", "/v1/completions?a=%2F&b"),
        ("http://evil/v1/completions?a=%2F&b", "/v1/completions?a=%2F&b"),
        ("http://a:b@evil:1", "/"),
    ],
)
def test_the_host_that_a_target_names_is_not_asked_of_an_instance(
    target: str, passed_on_as: str
) -> None:
    """Whoever stands before an instance would prefer it to the instance's own name."""
    assert origin_form(target) == passed_on_as


def test_a_histogram_counts_as_prometheus_does() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.see(value)
    assert histogram.buckets() == [("1", 2.0), ("2", 3.0), ("+Inf", 4.0)]
    assert (histogram.sum, histogram.count) == (12.0, 4)


def test_a_key_that_is_named_must_be_there() -> None:
    assert read_key("f", None, {}) is None
    assert read_key("f", "A", {"A": " k \n"}) == "k"
    for environ in ({}, {"A": ""}, {"A": "\u00e4"}, {"A": "a\nb"}):
        with pytest.raises(ConfigError, match=r"^f: found 'A'"):
            read_key("f", "A", environ)
