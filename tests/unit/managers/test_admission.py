"""Who may come into a full tier: first sight where it pays, second sight where it does not."""

from collections.abc import Iterator
from hashlib import sha256
from types import SimpleNamespace

import pytest

from opal_connector.managers import admission as module
from opal_connector.managers.admission import Admission
from opal_connector.managers.records import ObjectKey, object_key

HELD = 200  # chunks in the full tier


class Tier:
    """All that admission asks a tier: how much it holds, and whether that is all it can."""

    def __init__(self, held: int = HELD, *, is_crowded: bool = True) -> None:
        self.held = held
        self.levels = SimpleNamespace(is_crowded=is_crowded)

    def __len__(self) -> int:
        return self.held


def key(number: int) -> ObjectKey:
    return object_key(sha256(number.to_bytes(8, "little", signed=True)).digest(), 0)


def made(tier: Tier, *faster: Tier, is_adaptive: bool = True) -> Admission:
    return Admission(tier, is_adaptive=is_adaptive, faster=faster)  # type: ignore[arg-type]


class Stream:
    """Requests of one chunk each, all of them new ones between those that come again."""

    def __init__(self) -> None:
        self.next_number = 0

    def new(self, count: int) -> Iterator[list[ObjectKey]]:
        for _ in range(count):
            self.next_number += 1
            yield [key(self.next_number)]

    def again(self, count: int, *, distance: int) -> Iterator[list[ObjectKey]]:
        """Of three new ones each, one comes a second time after `distance` others."""
        for _ in range(count):
            yield from self.new(3)
            yield [key(self.next_number - distance * 3 // 4)]

    def twice(self, count: int, *, distance: int) -> Iterator[list[ObjectKey]]:
        """So many new ones, and all of them a second time."""
        for _ in range(count):
            yield from self.new(1)
            yield [key(self.next_number - distance // 2)]


def feed(admission: Admission, requests: Iterator[list[ObjectKey]]) -> None:
    for keys in requests:
        admission.count_sight(keys)


def test_tier_with_room_takes_everything() -> None:
    """Nothing has to go for it, so nothing is risked by it."""
    admission = made(Tier(is_crowded=False))

    feed(admission, Stream().new(20 * HELD))

    assert admission.admits(key(10**6))


def test_full_tier_stops_to_take_what_is_never_asked_for_again() -> None:
    """A write that nobody reads costs the disk its life and somebody else his place."""
    admission = made(Tier())

    feed(admission, Stream().new(4 * HELD))

    assert not admission.takes_first_sight
    assert not admission.admits(key(10**6))


def test_second_sight_is_always_enough() -> None:
    """What two requests had is taken, and is named to whoever can still copy it."""
    admission = made(Tier())
    feed(admission, Stream().new(4 * HELD))

    assert admission.count_sight([key(10**6)]) == []
    assert admission.count_sight([key(10**6)]) == [key(10**6)]
    assert admission.admits(key(10**6))
    assert admission.count_sight([key(10**6)]) == []


def test_full_tier_goes_on_where_first_sight_brings_hits() -> None:
    """Chunks that come twice, within the reach of the tier, would never hit at second sight."""
    admission = made(Tier())

    feed(admission, Stream().again(20 * HELD, distance=HELD // 2))

    assert admission.takes_first_sight


def test_nothing_is_risked_where_second_sight_saves_no_writes() -> None:
    """If everything comes twice, waiting for it the second time only loses the first hit."""
    admission = made(Tier(), Tier(held=HELD // 2))

    feed(admission, Stream().twice(20 * HELD, distance=HELD // 8))

    assert admission.takes_first_sight


def test_hits_of_a_faster_tier_are_not_lost() -> None:
    """What comes again so soon that memory still has it is no reason to write it below."""
    admission = made(Tier(), Tier(held=HELD // 2))

    feed(admission, Stream().again(20 * HELD, distance=HELD // 8))

    assert not admission.takes_first_sight


def test_another_workload_brings_another_rule() -> None:
    """The images go on whatever the rule is, so it can change both ways."""
    admission, stream = made(Tier()), Stream()
    feed(admission, stream.new(4 * HELD))
    assert not admission.takes_first_sight

    feed(admission, stream.again(2 * HELD, distance=HELD // 2))
    assert admission.takes_first_sight

    feed(admission, stream.new(100 * HELD))
    assert not admission.takes_first_sight


def test_few_lost_hits_are_worth_the_writes() -> None:
    """One hit lost of two hundred accesses is below what a write is worth."""
    admission, stream = made(Tier()), Stream()

    for _ in range(200):
        feed(admission, stream.new(198))
        feed(admission, stream.again(1, distance=HELD // 2))

    assert not admission.takes_first_sight


def test_tier_that_is_told_to_takes_always() -> None:
    """`admission` "always" means it."""
    admission = made(Tier(), is_adaptive=False)

    feed(admission, Stream().new(10 * HELD))

    assert admission.admits(key(10**6))


@pytest.mark.parametrize("held", [HELD, 50_000])
def test_memory_stays_small_however_large_the_tier(
    held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million chunks are judged by a sample of them."""
    monkeypatch.setattr(module, "_SIGHTS", 4096)
    admission = made(Tier(held), Tier(held))

    feed(admission, Stream().new(30_000))

    images = [vars(admission)[name].keys for name in ("_near", "_first", "_second")]
    assert max(map(len, images)) <= module._IMAGE_MOST + 1
    assert len(vars(admission)["_sights"]) == 4096
    sampled = sum(not key(number)[0] & vars(admission)["_mask"] for number in range(1, 30_001))
    assert sampled == 30_000 if held == HELD else sampled < 3 * module._IMAGE_MOST
