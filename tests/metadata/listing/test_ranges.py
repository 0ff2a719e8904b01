"""What is known completely, and since when, against a model that asks of every place by itself."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.metadata.entries import ObservedAt
from gateway.metadata.listing.ranges import Interval, including, is_known_better, known_until, without

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
