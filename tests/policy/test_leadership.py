"""Who decides for all processes: always somebody, and nobody waits for one that is stopped or killed."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.link_capacity import BEAT_SECONDS, LOST_SECONDS, ROWS_OF_LEADERSHIP, Leadership
from gateway.shared.arena import SharedCells, make_shared_memory

PROCESSES = 4


def processes(count: int = PROCESSES) -> list[Leadership]:
    descriptor = make_shared_memory(ROWS_OF_LEADERSHIP, count, 0.0)
    try:
        cells = [SharedCells.attach(descriptor, ROWS_OF_LEADERSHIP, count, own) for own in range(count)]
    finally:
        os.close(descriptor)
    return [Leadership(one, 0) for one in cells]


@given(
    st.lists(st.sets(st.integers(0, PROCESSES - 1), min_size=1), min_size=1, max_size=20),
    st.floats(min_value=1.0, max_value=1e6),
)
def test_the_lowest_number_that_turns_decides_alone_within_a_second(turning: list[set[int]], now: float) -> None:
    """Whichever processes come, go, are stopped and go on: a second later one decides, and all agree on it."""
    leaderships = processes()
    for alive in turning:
        for _ in range(round(1.0 / BEAT_SECONDS)):
            now += BEAT_SECONDS
            leading = {number for number in alive if leaderships[number].leads(now)}
        assert leading == {min(alive)}


def test_somebody_decides_from_the_first_moment() -> None:
    """At the start nobody has beaten yet: who comes first decides until one of a lower number is there."""
    first, second, *_ = processes()
    assert second.leads(1.0)
    assert first.leads(1.0)
    assert not second.leads(1.1)


@pytest.mark.parametrize(("away_seconds", "anew"), [(LOST_SECONDS / 2, False), (LOST_SECONDS * 2, True)])
def test_who_was_away_begins_anew(away_seconds: float, anew: bool) -> None:
    """What a process remembers from before it was stopped says nothing about now."""
    (alone,) = processes(1)
    assert alone.leads(10.0)
    assert alone.leads(10.0 + away_seconds)
    assert alone.leads_since == (10.0 + away_seconds if anew else 10.0)


def test_who_lost_its_place_begins_anew() -> None:
    """Another one has decided meanwhile."""
    first, second = processes(2)
    assert second.leads(10.0)
    assert first.leads(10.1)
    assert not second.leads(10.2)
    assert second.leads(10.2 + LOST_SECONDS)
    assert second.leads_since == 10.2 + LOST_SECONDS
