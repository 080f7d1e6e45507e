"""What the tier over an engine does beside storing: doubtful writes, and what a rank sees."""

from collections.abc import Iterator, Sequence
from hashlib import sha256

import pytest
from dict_engine import DictClient, DictEngine, UnlistedClient, refreshed
from file_tier_suite import Pool, make_name
from typing_extensions import override

from opal_connector.tiers.engines import EngineMedium, EngineTier, Listed
from opal_connector.tiers.engines.names import parse_value_key, rank_prefix, value_key
from opal_connector.tiers.file_errors import NoSpaceError, ObjectGoneError
from opal_connector.tiers.file_names import object_key

NAMESPACE = sha256(b"namespace").digest()
ROW_BYTES = 4096


@pytest.fixture
def engine() -> DictEngine:
    return DictEngine()


@pytest.fixture
def tier(engine: DictEngine) -> Iterator[EngineTier]:
    tier = EngineTier("Engine", DictClient(engine), row_bytes=ROW_BYTES, rank=0)
    assert list(tier.open(NAMESPACE)) == []
    yield tier
    tier.close()


def fail_after_put(call: str) -> None:
    """The value is there, and nobody was told."""
    if call == "put-done":
        raise TimeoutError("the engine did not answer")


def fail_always(call: str) -> None:
    raise ConnectionRefusedError("nobody listens")


def test_a_write_without_an_answer_is_taken_back(engine: DictEngine, tier: EngineTier) -> None:
    """The books count it as failed: it must not be found, least of all after a reset."""
    pool = Pool(ROW_BYTES)
    engine.rule = fail_after_put
    with pytest.raises(TimeoutError):
        pool.write(tier, make_name(1))
    assert engine.values, "the engine did what it was told"
    engine.rule = lambda call: None

    tier.probe()

    assert engine.values == {}


def test_a_wipe_takes_back_writes_without_an_answer(engine: DictEngine, tier: EngineTier) -> None:
    """One that arrives at the engine after the wipe's listing would come back to life."""
    pool = Pool(ROW_BYTES)
    engine.rule = fail_after_put
    with pytest.raises(TimeoutError):
        pool.write(tier, make_name(1))
    value = dict(engine.values)
    engine.rule = lambda call: engine.values.update(value) if call == "remove" else None

    tier.wipe()

    assert engine.values == {}


def test_a_write_that_worked_after_all_is_kept(engine: DictEngine, tier: EngineTier) -> None:
    """What was in doubt and was then written again with success is no longer in doubt."""
    pool = Pool(ROW_BYTES)
    engine.rule = fail_after_put
    with pytest.raises(TimeoutError):
        pool.write(tier, make_name(1))
    engine.rule = lambda call: None
    pool.write(tier, make_name(1))

    tier.probe()

    pool.read(tier, make_name(1))


def test_a_full_engine_has_no_doubts(engine: DictEngine, tier: EngineTier) -> None:
    """It said no: nothing of the write is there, and what was there before stays."""
    pool = Pool(ROW_BYTES)
    pool.write(tier, make_name(1))
    engine.limit_bytes = 0
    for number in (1, 2):
        with pytest.raises(NoSpaceError):
            pool.write(tier, make_name(number))
    with pytest.raises(NoSpaceError):
        tier.probe()
    engine.limit_bytes = 1 << 40
    tier.probe()
    pool.read(tier, make_name(1))


def test_an_engine_that_does_not_answer_does_not_open(engine: DictEngine) -> None:
    """The tier is suspended then, and a probe opens it later."""
    engine.rule = fail_always
    tier = EngineTier("Engine", DictClient(engine), row_bytes=ROW_BYTES, rank=0)
    with pytest.raises(ConnectionRefusedError):
        list(tier.open(NAMESPACE))


def test_keys_are_told_apart() -> None:
    """Only the one spelling that is written is read: no two keys are one object."""
    prefix = rank_prefix(NAMESPACE, 3)
    key = object_key(make_name(1, group=7))
    text = value_key(prefix, key)
    assert parse_value_key(prefix, text) == key
    for other in (
        text.upper(),
        f"{text}x",
        text.replace("-g7", "-g07"),
        f"{prefix}probe",
        "",
        text[1:],
    ):
        assert parse_value_key(prefix, other) is None
    assert parse_value_key(rank_prefix(NAMESPACE, 30), text) is None


# What the scheduler's process sees.


class RepeatingClient(DictClient):
    """A client of an engine whose listing tells everything twice."""

    @override
    def list_values(self, prefix: str) -> Iterator[Sequence[Listed]]:
        for page in super().list_values(prefix):
            yield page
            yield page


def medium(
    engine: DictEngine, kind: type[DictClient], known: set[bytes], ranks: int = 1
) -> EngineMedium:
    return EngineMedium(
        kind(engine),
        identity="x",
        namespace=NAMESPACE,
        ranks=ranks,
        knows=known.__contains__,
        known_keys=lambda: list(known),
    )


def test_what_is_written_during_a_listing_is_not_called_gone(
    engine: DictEngine, tier: EngineTier
) -> None:
    """The books learn of it before or after, and either way it stays."""
    pool = Pool(ROW_BYTES)
    known: set[bytes] = set()
    pool.write(tier, make_name(1))
    known.add(object_key(make_name(1)))

    def write_one(call: str) -> None:
        if call == "list_values":
            engine.rule = lambda call: None
            known.add(object_key(make_name(2)))  # and the listing does not show it yet

    engine.rule = write_one

    found = refreshed(medium(engine, DictClient, known))

    assert found.gone == ()
    assert found.names == ()


@pytest.mark.parametrize("kind", [DictClient, RepeatingClient])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_value_that_is_listed_twice_is_one_value(
    engine: DictEngine, tier: EngineTier, kind: type[DictClient], ranks: int
) -> None:
    """An engine may tell a key twice: that is neither two ranks nor none."""
    Pool(ROW_BYTES).write(tier, make_name(1))  # rank 0's part of it
    key = object_key(make_name(1))

    assert refreshed(medium(engine, kind, {key}, ranks)).gone == (() if ranks == 1 else (key,))
    assert len(refreshed(medium(engine, kind, set(), ranks)).names) == (ranks == 1)

    other_prefix = rank_prefix(NAMESPACE, 1)
    text = value_key(rank_prefix(NAMESPACE, 0), key)
    engine.values[value_key(other_prefix, key)] = engine.values[text]
    assert refreshed(medium(engine, kind, {key}, ranks)).gone == ()
    assert refreshed(medium(engine, kind, set(), ranks)).names == (make_name(1),)
    del engine.values[text]
    assert refreshed(medium(engine, kind, {key}, ranks)).gone == (key,)


def test_own_writes_cost_no_request(engine: DictEngine, tier: EngineTier) -> None:
    """Only values that the books do not know are looked into."""
    pool = Pool(ROW_BYTES)
    known = {object_key(make_name(number)) for number in range(10)}
    for number in range(12):
        pool.write(tier, make_name(number))
    engine.calls.clear()

    found = refreshed(medium(engine, DictClient, known))

    assert set(found.names) == {make_name(10), make_name(11)}
    assert engine.calls.count(("get_start", 1)) == 2


def test_what_is_no_object_is_looked_into_once(engine: DictEngine) -> None:
    """Somebody else's values under our prefix do not cost a request with every refresh."""
    prefix = rank_prefix(NAMESPACE, 0)
    engine.values[value_key(prefix, object_key(make_name(1)))] = b"hello"
    seen = medium(engine, DictClient, set())
    for _ in range(3):
        assert refreshed(seen).names == ()
    assert engine.calls.count(("get_start", 1)) == 1


def test_all_that_is_known_is_asked_about_in_turn(engine: DictEngine, tier: EngineTier) -> None:
    """Of an engine without listings: a part with every refresh, and everything after a while."""
    known = {object_key(make_name(number, 1)) for number in range(9000)}
    seen = medium(engine, UnlistedClient, known)
    gone: set[bytes] = set()
    refreshes = 0
    while gone != known:
        gone |= set(refreshed(seen).gone)
        refreshes += 1
        assert refreshes <= 3
    assert max(count for call, count in engine.calls if call == "present") <= 1024


def test_an_engine_that_fails_in_between_asks_again(engine: DictEngine) -> None:
    """A refresh that failed has told nothing, so nothing may be left out later."""
    known = {object_key(make_name(1))}
    seen = medium(engine, UnlistedClient, known)
    engine.rule = fail_always
    with pytest.raises(ConnectionRefusedError):
        refreshed(seen)
    engine.rule = lambda call: None
    assert refreshed(seen).gone == tuple(known)


def test_the_first_refresh_connects_whatever_is_known(engine: DictEngine) -> None:
    """The first lookup that waits for an answer does not wait for a connection, too."""
    for kind in (DictClient, UnlistedClient):
        engine.calls.clear()
        refreshed(medium(engine, kind, set()))
        assert engine.calls


def test_gone_is_an_error_of_its_own(tier: EngineTier) -> None:
    """So that a miss does not count against the engine."""
    with pytest.raises(ObjectGoneError):
        Pool(ROW_BYTES).read(tier, make_name(1))


# What goes on for long.


def test_what_the_books_do_not_want_is_not_read_with_every_refresh(
    engine: DictEngine, tier: EngineTier
) -> None:
    """Such as the beginning of an object that they have: its header would cost a request each time.

    It is looked at again after a while: what the books did not want then, they may want now.
    """
    Pool(ROW_BYTES).write(tier, make_name(1))
    seen = medium(engine, DictClient, set())
    found = [len(refreshed(seen).names) for _ in range(25)]

    assert found[0] == 1
    assert sum(found) == engine.calls.count(("get_start", 1)) == 2


def test_a_value_that_was_damaged_is_found_when_it_is_whole(
    engine: DictEngine, tier: EngineTier
) -> None:
    """A judgement is not for ever."""
    Pool(ROW_BYTES).write(tier, make_name(1))
    key, value = next(iter(engine.values.items()))
    engine.values[key] = b"hello"
    seen = medium(engine, DictClient, set())
    assert refreshed(seen).names == ()
    engine.values[key] = value

    assert make_name(1) in [name for _ in range(25) for name in refreshed(seen).names]


def test_what_is_gone_is_told_before_anything_is_read(engine: DictEngine, tier: EngineTier) -> None:
    """A fault while headers are read costs what would have been found, and nothing else."""
    known = {object_key(make_name(7))}
    Pool(ROW_BYTES).write(tier, make_name(1))

    def rule(call: str) -> None:
        if call == "get_start":
            raise ConnectionResetError("the engine is gone")

    engine.rule = rule
    gone: list[bytes] = []

    def collect() -> None:
        for step in medium(engine, DictClient, known).changes():
            gone.extend(step.gone)

    with pytest.raises(ConnectionResetError):
        collect()
    assert gone == list(known)


def test_doubtful_writes_are_taken_back_a_few_at_a_time(
    engine: DictEngine, tier: EngineTier
) -> None:
    """As soon as the engine answers again, beside a write that goes well; and never without end."""
    pool = Pool(ROW_BYTES)
    engine.rule = fail_after_put
    for number in range(10):
        with pytest.raises(TimeoutError):
            pool.write(tier, make_name(number))
    engine.rule = lambda call: None

    pool.write(tier, make_name(100))
    assert len(engine.values) == 3
    pool.write(tier, make_name(101))

    assert len(engine.values) == 2
    for number in (100, 101):
        pool.read(tier, make_name(number))
