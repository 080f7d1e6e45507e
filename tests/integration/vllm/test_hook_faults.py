"""An exception inside a hook never leaves it, and the engine goes on: I7."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_without_model import Engine
from vllm_parts import prompt

from opal_connector.integrations.vllm.guard import hook_faults

pytestmark = pytest.mark.vllm

# hook -> where inside it the exception is raised: object of the engine, attribute
FAULTS: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "on_new_request": (lambda engine: engine.manager, "new_request"),
    "get_num_new_matched_tokens": (lambda engine: engine.manager, "lookup"),
    "update_state_after_alloc": (lambda engine: engine.manager, "plan_load"),
    "update_state_after_alloc/release": (lambda engine: engine.manager, "release"),
    "update_state_after_alloc/count": (lambda engine: engine.manager, "count_admission"),
    "get_external_cache_hit_sources": (lambda engine: engine.half, "hit_sources"),
    "build_connector_meta": (lambda engine: engine.manager, "plan_store"),
    "build_connector_meta/expire": (lambda engine: engine.manager, "expire"),
    "update_connector_output": (lambda engine: engine.manager, "commit"),
    "request_finished_all_groups": (lambda engine: engine.manager, "end_request"),
    "take_events": (lambda engine: engine.manager, "take_events"),
    "has_pending_block_frees": (lambda engine: engine.half.holds, "frees_soon"),
    "has_pending_push_work": (lambda engine: engine.half, "has_work"),
    "get_kv_connector_stats": (lambda engine: engine.manager, "take_counters"),
    "start_load_kv": (lambda engine: engine.mover(), "submit"),
    "get_transfer_results": (lambda engine: engine.mover(), "take_results"),
    "get_block_ids_with_load_errors": (
        lambda engine: engine.workers[0].worker_half,
        "take_load_errors",
    ),
    "build_connector_worker_meta": (lambda engine: engine.workers[0].worker_half, "take_results"),
}
# What fails here at every call keeps the books from ever closing,
NEVER_IDLE = ("update_connector_output", "take_events")
# and here the scheduler never hears that a transfer has ended.
NEVER_ANSWERS = ("get_transfer_results", "build_connector_worker_meta")


class Raises:
    """Stands in for a method: raises in some of its calls."""

    def __init__(self, method: Callable[..., Any], is_faulty: Callable[[int], bool]) -> None:
        self.method = method
        self.is_faulty = is_faulty
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.is_faulty(self.calls):
            raise RuntimeError("injected")
        return self.method(*args, **kwargs)


def engine_with_hits() -> Engine:
    """Two prompts are stored, the device is empty, and there is little room on it."""
    engine = Engine(num_blocks=17, tier_blocks=24)
    for seed in (1, 2):
        engine.generate(f"fill{seed}", prompt(seed, 64), max_tokens=1)
    engine.forget_device()
    engine.half._next_expiry = 0.0
    return engine


def add_requests(engine: Engine) -> list[str]:
    """Hits, a miss, growth beyond the device."""
    lengths = {"a": (1, 70), "b": (2, 70), "c": (3, 70), "d": (1, 50)}
    for name, (seed, length) in lengths.items():
        engine.add(name, prompt(seed, length), max_tokens=45)
    return list(lengths)


@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize("hook", FAULTS)
def test_one_exception_in_a_hook_costs_a_miss(
    hook: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests end with the right tokens, and nothing of them is left behind."""
    engine = engine_with_hits()
    find, attribute = FAULTS[hook]
    target = find(engine)
    fault = Raises(getattr(target, attribute), lambda number: number == call)
    monkeypatch.setattr(target, attribute, fault)
    names = add_requests(engine)
    engine.run()

    engine.assert_answers(*names)
    if hook != "request_finished_all_groups" or fault.calls < call:
        engine.assert_idle()
    monkeypatch.undo()
    engine.forget_device()
    engine.generate("after", prompt(1, 70))
    engine.assert_answers("after")


@pytest.mark.parametrize("hook", [hook for hook in FAULTS if hook not in NEVER_ANSWERS])
def test_hook_that_always_raises_leaves_a_working_engine(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is as good as without a cache."""
    engine = engine_with_hits()
    find, attribute = FAULTS[hook]
    target = find(engine)
    fault = Raises(getattr(target, attribute), lambda number: True)
    monkeypatch.setattr(target, attribute, fault)
    before = sum(hook_faults.values())
    names = add_requests(engine)
    for _ in range(2000):
        engine.step()
        engine.clock.now += 0.05  # what would be waited for never comes
        if all(engine.results[name].finish_reason is not None for name in names):
            break

    engine.assert_answers(*names)
    if hook not in NEVER_IDLE:
        engine.run()
    assert fault.calls > 0
    # A transfer that cannot be started is a result like any other.
    assert sum(hook_faults.values()) > before or hook == "start_load_kv"


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_load_that_cannot_be_planned_is_a_load_error(
    prefix_caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM has allocated blocks and waits for them: every one of them is reported."""
    engine = Engine(prefix_caching=prefix_caching)
    engine.generate("fill", prompt(1, 100))
    engine.forget_device()
    if prefix_caching:
        engine.generate("local", prompt(1, 33), max_tokens=1)
    computed = 2 if prefix_caching else 0
    monkeypatch.setattr(
        engine.manager, "plan_load", Raises(engine.manager.plan_load, lambda number: True)
    )
    engine.add("a", prompt(1, 100))
    engine.step()
    blocks = engine.block_ids("a")
    monkeypatch.undo()
    engine.run()

    assert engine.load_errors == [set(blocks[computed:6])]
    engine.assert_answers("a")
    engine.assert_idle()


def test_reset_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that could not be emptied is reported as not reset."""
    engine = engine_with_hits()
    monkeypatch.setattr(engine.manager, "reset", Raises(print, lambda number: True))

    assert not engine.scheduler.reset_connector_cache()


def test_lookup_of_another_library_version_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without a field that the connector reads is not cached; it is served."""
    engine = engine_with_hits()
    request = engine.make_request("odd", prompt(1, 70))
    del request.mm_features
    engine.connector.on_new_request(request)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert engine.connector.request_finished(request, []) == (False, None)

    engine.run()
    engine.assert_idle()
