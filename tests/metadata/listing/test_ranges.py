"""What is known completely, and since when, against a model; which parts may be answered, and at what age."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.metadata.entries import ObservedAt
from gateway.metadata.listing.ranges import (
    Interval,
    KeyBound,
    answerable,
    bound_of,
    including,
    is_known_better,
    known_until,
    without,
)
from gateway.policy.slots import DEFAULT_SLOT, Prefix, Slots
from tests.support.slots import Slot

PLACES = [bytes([code]) for code in b"abcdefghij"]
PLACE = st.sampled_from(PLACES)


def learned(seconds: float, epoch: int = 0, boot: int = 1) -> ObservedAt:
    return ObservedAt(epoch, seconds, boot)


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    start, stop = sorted(draw(st.lists(PLACE, min_size=2, max_size=2, unique=True)))
    return Interval(start, stop, learned(draw(st.integers(0, 5)), draw(st.integers(0, 1))))


STEPS = st.lists(st.tuples(st.booleans(), intervals()), max_size=12)


def play(steps: list[tuple[bool, Interval]], merge_seconds: float) -> tuple[list[Interval], dict[bytes, ObservedAt]]:
    """The intervals, and what a model knows of each place between two letters."""
    known: list[Interval] = []
    told: dict[bytes, ObservedAt] = {}
    for is_added, one in steps:
        within = [place for place in PLACES if one.start <= place < one.stop]
        if is_added:
            known = including(known, one, merge_seconds=merge_seconds)
            told |= dict.fromkeys(within, one.observed_at)
        else:
            known = without(known, one.start, one.stop)
            told = {place: when for place, when in told.items() if place not in within}
    return known, told


def of_place(known: list[Interval], place: bytes) -> ObservedAt | None:
    return next((one.observed_at for one in known if one.start <= place < one.stop), None)


@given(STEPS, st.floats(0, 3))
def test_each_place_is_known_as_it_was_told_last(steps: list[tuple[bool, Interval]], merge_seconds: float) -> None:
    """Nothing is taken for known that is not, nor for younger than it is; nor for much older."""
    known, told = play(steps, merge_seconds)
    for place in PLACES:
        found, expected = of_place(known, place), told.get(place)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert (found.epoch, found.boot) == (expected.epoch, expected.boot)
            assert found.seconds <= expected.seconds


@given(STEPS)
def test_intervals_are_in_order_apart_and_as_few_as_ages_allow(steps: list[tuple[bool, Interval]]) -> None:
    """Neighbours of one moment are one."""
    known, told = play(steps, 0.0)
    for one, other in pairwise(known):
        assert one.start < one.stop <= other.start < other.stop
        assert one.stop < other.start or one.observed_at != other.observed_at
    assert all(of_place(known, place) == told.get(place) for place in PLACES)


@given(STEPS, PLACE, PLACE, st.integers(0, 5))
def test_known_until_stops_where_something_may_not_be_used(
    steps: list[tuple[bool, Interval]], start: bytes, stop: bytes, seconds: int
) -> None:
    """Everything up to there may be used, and what comes next may not."""
    known, told = play(steps, 0.0)
    until = known_until(known, start, lambda one: one.seconds >= seconds)
    reached = [place for place in PLACES if start <= place < until]
    assert all(told[place].seconds >= seconds for place in reached)
    if until in PLACES and until >= start:
        assert until not in told or told[until].seconds < seconds
    asked = learned(seconds)
    if start < stop:
        usable = [place in told and told[place].seconds > seconds and not told[place].epoch for place in PLACES]
        within = [usable[PLACES.index(place)] for place in PLACES if start <= place < stop]
        assert is_known_better(known, start, stop, asked) == all(within)


def test_a_chain_of_neighbours_never_grows_younger() -> None:
    """Pages of a long listing become one interval as long as the first is not too old for the last."""
    known: list[Interval] = []
    for number, (start, stop) in enumerate(pairwise(PLACES)):
        known = including(known, Interval(start, stop, learned(number)), merge_seconds=3.0)
    assert [(one.start, one.stop, one.observed_at.seconds) for one in known] == [
        (b"a", b"e", 0),
        (b"e", b"i", 4),
        (b"i", b"j", 8),
    ]


def test_other_boots_and_epochs_never_merge() -> None:
    """Their times cannot be compared."""
    first = Interval(b"a", b"b", learned(1.0))
    for other in (learned(1.0, epoch=1), learned(1.0, boot=2)):
        assert len(including([first], Interval(b"b", b"c", other), merge_seconds=9.0)) == 2


TEXT = st.text("ab/é", max_size=4)
SLOT = st.builds(
    lambda bucket, prefix, consistency, ttl: Slot(
        f"{bucket}{prefix}", Prefix(bucket, prefix), "read-write", consistency, float(ttl)
    ),
    st.sampled_from(["b", "b", "c"]),
    TEXT,
    st.sampled_from(["strict", "ttl", "immutable"]),
    st.integers(1, 5),
)
EVERYWHERE = st.sampled_from(["strict", "ttl"]).map(lambda one: Slot("all", Prefix(""), "read-write", one))
SLOTS = st.tuples(st.lists(SLOT, max_size=5, unique_by=lambda slot: slot.name), st.none() | EVERYWHERE).map(
    lambda found: Slots([*found[0], *([found[1]] if found[1] else [])])
)


@given(SLOTS, TEXT)
def test_a_key_is_answerable_where_its_slot_is_not_strict(slots: Slots, key: str) -> None:
    """And nowhere else, whatever slots lie within others."""
    place = key.encode()
    within = [start <= place < stop for start, stop in answerable(slots, "b")]
    assert sum(within) <= 1
    assert any(within) == (slots.find("b", key).consistency != "strict")


@given(SLOTS, TEXT, TEXT)
def test_the_slots_under_a_prefix_are_all_that_its_keys_may_lie_in(slots: Slots, prefix: str, rest: str) -> None:
    """So that the bound of a listing is never laxer than that of a key in it."""
    found = list(slots.under("b", prefix))
    slot = slots.find("b", prefix + rest)
    assert slot in found
    bound = bound_of(found)
    if slot.consistency == "strict":
        assert bound is None
    elif slot.consistency == "ttl" and bound is not None:
        assert bound.fresh_seconds <= slot.metadata_ttl_seconds


def test_the_strictest_of_several_decides() -> None:
    """Each limit by itself."""
    short = Slot("a", Prefix("b"), "read-only", "ttl", 10.0, stale_if_unreachable_seconds=100.0)
    long = Slot("b", Prefix("b", "x"), "read-only", "ttl", 50.0)
    for_ever = Slot("c", Prefix("b", "y"), "read-only", "immutable")
    assert bound_of([short, long, for_ever]) == KeyBound(10.0, 50.0)
    assert bound_of([for_ever]) == KeyBound(math.inf, math.inf)
    assert bound_of([for_ever, DEFAULT_SLOT]) is None


NOW = ObservedAt(7, 100.0, 1)


@pytest.mark.parametrize(
    ("learned", "fresh", "stale", "for_ever"),
    [
        (ObservedAt(7, 100.0, 1), True, True, True),
        (ObservedAt(7, 90.1, 1), True, True, True),
        (ObservedAt(7, 90.0, 1), False, True, True),
        (ObservedAt(7, 50.0, 1), False, False, True),
        (ObservedAt(7, 100.1, 1), False, False, True),
        (ObservedAt(7, 100.0, 2), False, False, True),
        (ObservedAt(6, 100.0, 1), False, False, False),
    ],
)
def test_what_was_learned_is_allowed_by_its_age(learned: ObservedAt, fresh: bool, stale: bool, for_ever: bool) -> None:
    """Of another boot its age is unknown, of the future too; of another write epoch it is void."""
    bound = KeyBound(10.0, 50.0)
    assert bound.allows(learned, NOW) is fresh
    assert bound.allows(learned, NOW, stale=True) is stale
    assert KeyBound(math.inf, math.inf).allows(learned, NOW) is for_ever
