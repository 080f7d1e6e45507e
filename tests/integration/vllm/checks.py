"""What every scenario asserts: the right answers, and nothing left behind."""

from typing import Any

from engine_process import EngineProcess

_LOGPROB_TOLERANCE = 2e-4  # 1e-5 was seen between batches, much more with one wrong block


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same tokens, each with the same probability but for the rounding of another batch.

    A model with few layers falls into loops, so its tokens alone would forgive a wrong cache.
    """
    assert [answer["tokens"] for answer in found] == [answer["tokens"] for answer in expected]
    for answer, other in zip(found, expected, strict=True):
        pairs = zip(answer["logprobs"], other["logprobs"], strict=True)
        assert max(abs(left - right) for left, right in pairs) < _LOGPROB_TOLERANCE


def assert_at_rest(engine: EngineProcess) -> dict[str, Any]:
    """Jobs, leases, holds and per-request state are back at nothing, and no hook has failed.

    Returns:
        The books, which were audited.
    """
    books = engine.books()
    left = {
        name: books[name]
        for name in (
            *("jobs", "leases", "trackers", "fetching"),
            *("held_blocks", "requests", "device_blocks_in_use"),
        )
    }
    assert not any(left.values()), left
    assert not books["hook_faults"]
    return books
