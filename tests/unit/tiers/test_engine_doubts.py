"""Writes whose end is unknown: what is stored well meanwhile stays, and no doubt lasts for ever."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest
from dict_engine import DictClient, DictEngine
from file_tier_suite import Pool, make_name

from opal_connector.tiers.engines import EngineTier
from opal_connector.tiers.engines.names import rank_prefix, value_key
from opal_connector.tiers.engines.resp_doubts import Doubts
from opal_connector.tiers.file_errors import RefusedError
from opal_connector.tiers.file_names import object_key

NAMESPACE = sha256(b"namespace").digest()
ROW_BYTES = 4096
PATIENCE_SECONDS = 20


def nothing(call: str) -> None:
    """The engine is well."""


def fail_after_put(call: str) -> None:
    """The value is there, and nobody was told."""
    if call == "put-done":
        raise TimeoutError("the engine did not answer")


@pytest.fixture
def engine() -> DictEngine:
    return DictEngine()


@pytest.fixture
def tier(engine: DictEngine) -> Iterator[EngineTier]:
    tier = EngineTier("Engine", DictClient(engine), row_bytes=ROW_BYTES, rank=0)
    assert list(tier.open(NAMESPACE)) == []
    engine.rule = fail_after_put
    with pytest.raises(TimeoutError):
        Pool(ROW_BYTES).write(tier, make_name(1))
    engine.rule = nothing
    yield tier
    tier.close()


def while_removing(
    engine: DictEngine, removing: Callable[[], object], meanwhile: Callable[[], object]
) -> None:
    """Do something while the first removal of another thread is on its way to the engine."""
    at_removal, may_go_on = threading.Event(), threading.Event()

    def rule(call: str) -> None:
        if call == "remove" and not at_removal.is_set():
            at_removal.set()
            assert may_go_on.wait(PATIENCE_SECONDS)

    engine.rule = rule
    with ThreadPoolExecutor(1) as threads:
        removal = threads.submit(removing)
        try:
            assert at_removal.wait(PATIENCE_SECONDS)
            meanwhile()
        finally:
            may_go_on.set()
        removal.result(PATIENCE_SECONDS)


@pytest.mark.parametrize("beside", [True, False])
def test_what_is_stored_while_it_is_taken_back_is_there_or_failed(
    engine: DictEngine, tier: EngineTier, beside: bool
) -> None:
    """Or the books would call readable what the removal takes away."""
    failed = []

    def store_again() -> None:
        try:
            Pool(ROW_BYTES).write(tier, make_name(1))
        except RefusedError as error:
            failed.append(error)

    def write_another() -> object:
        return Pool(ROW_BYTES).write(tier, make_name(2))

    while_removing(engine, write_another if beside else tier.probe, store_again)

    if not failed:
        Pool(ROW_BYTES).read(tier, make_name(1))
    Pool(ROW_BYTES).write(tier, make_name(1))  # afterwards it can be stored
    tier.probe()
    Pool(ROW_BYTES).read(tier, make_name(1))


def test_a_new_doubt_outlasts_the_removal_of_an_older_one(
    engine: DictEngine, tier: EngineTier
) -> None:
    """A write that failed while the key was being removed may arrive after that."""
    late: dict[str, bytes] = {}

    def fail_again() -> None:
        rule = engine.rule
        engine.rule = fail_after_put
        try:
            Pool(ROW_BYTES).write(tier, make_name(1))
        except TimeoutError:
            late.update(engine.values)
        except RefusedError:
            pass  # nothing was sent
        engine.rule = rule

    while_removing(engine, tier.probe, fail_again)
    engine.values.update(late)
    tier.probe()

    assert engine.values == {}


def test_what_could_not_be_taken_back_is_still_in_doubt(
    engine: DictEngine, tier: EngineTier
) -> None:
    """And can be stored as soon as the engine is well."""

    def fail_removal(call: str) -> None:
        if call == "remove":
            raise TimeoutError("the engine did not answer")

    engine.rule = fail_removal
    with pytest.raises(TimeoutError):
        tier.probe()
    with pytest.raises(TimeoutError):
        tier.remove_object(make_name(1))
    engine.rule = nothing
    key = value_key(rank_prefix(NAMESPACE, 0), object_key(make_name(1)))
    assert key in engine.values
    tier.probe()
    assert engine.values == {}
    Pool(ROW_BYTES).write(tier, make_name(1))
    tier.probe()
    Pool(ROW_BYTES).read(tier, make_name(1))


def test_what_was_removed_is_in_doubt_no_more(engine: DictEngine, tier: EngineTier) -> None:
    """Another instance may have stored it since."""
    late = dict(engine.values)
    tier.remove_object(make_name(1))
    engine.values.update(late)

    tier.probe()

    Pool(ROW_BYTES).read(tier, make_name(1))


@pytest.mark.parametrize("is_taken_back", [True, False])
def test_a_server_that_never_closes_does_not_keep_a_doubt_for_ever(is_taken_back: bool) -> None:
    """It may have vanished without a word, and another one be well in its place."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        with theirs:
            ours.shutdown(socket.SHUT_WR)
            doubts = Doubts(patience_seconds=0.2)
            doubts.add("key", ours, is_taken_back=is_taken_back)
            started = time.monotonic()
            with pytest.raises(TimeoutError):
                doubts.settle("key".__eq__, started + 0.02)  # not yet
            doubts.settle("key".__eq__, started + PATIENCE_SECONDS)
            assert 0.2 <= time.monotonic() - started < PATIENCE_SECONDS / 2
            doubts.settle("key".__eq__, time.monotonic())  # nothing is left
            assert ours.fileno() == -1
