"""Decisions about the link's capacity, by what is seen: never below the floor, never without evidence."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.capacity_controller import (
    CRUISE_SHARE,
    FLOOR_BYTES_PER_SECOND,
    TICK_SECONDS,
    UNLIMITED_BYTES_PER_SECOND,
    CapacityController,
    SeenTraffic,
)

CAPACITY = 100e6
SEEN = st.tuples(
    st.floats(min_value=0.0, max_value=1e10),
    st.booleans(),
    st.one_of(st.none(), st.floats(min_value=0.0, max_value=10.0)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


def quiet(now: float, arriving: float = CAPACITY * CRUISE_SHARE) -> SeenTraffic:
    """Nothing is late, and more is wanted."""
    return SeenTraffic(now, arriving, True, 0.0, 0.04, 0.03)


@given(st.one_of(st.none(), st.floats(min_value=1.0, max_value=1e10)), st.lists(SEEN, max_size=100))
def test_the_rate_is_never_below_the_floor_and_never_beyond_all_links(
    capacity: float | None, seen: list[tuple[float, bool, float | None, bool, bool, bool]]
) -> None:
    """Whatever is seen."""
    controller, now = CapacityController(capacity, 0.0), 0.0
    for arriving, is_wanted, delay, *others in seen:
        now += TICK_SECONDS
        rate = controller.decide(SeenTraffic(now, arriving, is_wanted, delay, 0.04, 0.03, *others))
        assert FLOOR_BYTES_PER_SECOND <= rate <= UNLIMITED_BYTES_PER_SECOND


@given(st.lists(st.floats(min_value=0.0, max_value=1e10), min_size=1, max_size=100))
def test_nothing_is_held_back_while_answers_are_on_time(arriving: list[float]) -> None:
    """However much arrives, and however little."""
    controller = CapacityController(None, 0.0)
    for tick, count in enumerate(arriving):
        assert controller.decide(quiet(tick * TICK_SECONDS, count)) == UNLIMITED_BYTES_PER_SECOND


@given(st.lists(st.floats(min_value=0.0, max_value=CAPACITY), min_size=1, max_size=200))
def test_who_wants_little_says_nothing(arriving: list[float]) -> None:
    """While nobody waits and answers are on time, what was found stays."""
    controller = CapacityController(CAPACITY, 0.0)
    for tick, count in enumerate(arriving):
        controller.decide(replace(quiet(tick * TICK_SECONDS, count), is_wanted=False))
    assert controller.capacity == CAPACITY


def test_an_origin_that_is_away_says_nothing() -> None:
    """Nothing arrives, and requests wait: that is no queue."""
    controller = CapacityController(CAPACITY, 0.0)
    for tick in range(100):
        controller.decide(SeenTraffic(tick * TICK_SECONDS, 0.0, False, 3.0, 0.04, is_starved=True))
    assert controller.capacity == CAPACITY


def test_what_arrives_beyond_what_was_found_is_borne() -> None:
    """Four times as much is found within five seconds, where it arrives as it is let pass."""
    controller = CapacityController(CAPACITY / 4, 0.0)
    rates = [CAPACITY / 4] * 4
    for tick in range(50):
        rates.append(min(controller.decide(quiet(tick * TICK_SECONDS, rates[-4])), CAPACITY))
    assert controller.capacity is not None
    assert controller.capacity >= 0.9 * CAPACITY


def test_a_probe_that_finds_nothing_leaves_a_short_queue() -> None:
    """What passes beyond what the link bears is less than a tenth of a second's worth, over any time."""
    controller, queue, longest = CapacityController(CAPACITY, 0.0), 0.0, 0.0
    for tick in range(600):
        rate = controller.decide(quiet(tick * TICK_SECONDS, CAPACITY if queue else controller.rate))
        queue = max(0.0, queue + (rate - CAPACITY) * TICK_SECONDS)
        longest = max(longest, queue)
    assert 0 < longest < 0.1 * CAPACITY


def test_who_is_asked_to_slow_down_does() -> None:
    """A tenth less, once in a second, and nothing more is tried for five; not where next to nothing passes."""
    controller = CapacityController(CAPACITY, 0.0)
    controller.decide(replace(quiet(10.0, CAPACITY / 10), is_slowed=True))
    assert controller.capacity == CAPACITY
    controller.decide(replace(quiet(11.0), is_slowed=True))
    slowed = controller.capacity
    assert slowed is not None
    assert slowed <= 0.9 * CAPACITY
    controller.decide(replace(quiet(11.5, slowed), is_slowed=True))
    assert controller.capacity == slowed
    for tick in range(44):
        assert controller.decide(quiet(11.5 + tick * TICK_SECONDS, slowed * CRUISE_SHARE)) <= slowed


def test_long_bodies_without_answers_tell_what_the_link_bears() -> None:
    """All transfers wait for bytes, and less arrives than may."""
    controller = CapacityController(CAPACITY, 0.0)
    for tick in range(20):
        controller.decide(SeenTraffic(tick * TICK_SECONDS, CAPACITY / 4, False, None, 0.04, is_starved=True))
    assert controller.capacity == CAPACITY / 4


def test_a_delay_that_is_not_ours_takes_nothing_back_for_long() -> None:
    """Answers are later by as much, whatever is let pass."""
    controller = CapacityController(CAPACITY, 0.0)
    rates = [CAPACITY] * 4
    for tick in range(300):
        arriving = min(rates[-2], CAPACITY)
        rates.append(controller.decide(replace(quiet(tick * TICK_SECONDS, arriving), delay_seconds=0.1)))
    assert sum(rates) / len(rates) >= 0.85 * CAPACITY


SLOWER_SECONDS = 0.2


def accepted() -> tuple[CapacityController, float]:
    """One that has accepted a delay of SLOWER_SECONDS, and when."""
    controller, now, rates = CapacityController(CAPACITY, 0.0), 0.0, [CAPACITY] * 4
    while now < 3.0:
        now += TICK_SECONDS
        rates.append(controller.decide(replace(quiet(now, min(rates[-2], CAPACITY)), delay_seconds=SLOWER_SECONDS)))
    assert controller.capacity == CAPACITY
    return controller, now


def test_a_request_without_an_answer_is_no_timely_one() -> None:
    """It is late by so much at least: what was accepted stays accepted, however short it has waited."""
    controller, now = accepted()
    for tick in range(100):
        now += TICK_SECONDS
        waits = tick % 2 == 0
        controller.decide(
            replace(quiet(now), delay_seconds=0.02 * (tick % 8) if waits else SLOWER_SECONDS, is_at_least=waits)
        )
        assert controller.capacity == CAPACITY


def test_a_timely_answer_now_and_then_does_not_end_what_is_accepted() -> None:
    """Only when all were earlier for a while, a later one counts again."""
    controller, now = accepted()
    for tick in range(100):
        now += TICK_SECONDS
        delay = 0.0 if 0 < tick % 40 <= 30 else SLOWER_SECONDS
        controller.decide(replace(quiet(now), delay_seconds=delay))
        assert controller.capacity == CAPACITY
    for _ in range(60):
        now += TICK_SECONDS
        controller.decide(quiet(now))
    controller.decide(replace(quiet(now + TICK_SECONDS), delay_seconds=SLOWER_SECONDS))
    assert controller.rate < 0.9 * CAPACITY


def test_what_was_taken_back_is_given_back_when_the_delay_is_not_ours() -> None:
    """Less arrives, whatever may pass, and answers are late by as much: what was found before the first stays."""
    for capacity in (CAPACITY, CAPACITY / 2):
        controller, slower = CapacityController(capacity, 0.0), CAPACITY / 20
        for tick in range(40):
            arriving = min(controller.rate, slower)
            seen = replace(quiet(tick * TICK_SECONDS, arriving), is_wanted=controller.rate < slower)
            controller.decide(replace(seen, delay_seconds=SLOWER_SECONDS))
        assert controller.capacity == capacity


def test_a_drain_that_drained_nothing_proves_nothing() -> None:
    """The link bears less than half of what arrived: while it was thought to be drained, nothing waited here, so the
    queue stood. What was found does not rise again for that."""
    controller = CapacityController(CAPACITY, 0.0)
    for tick in range(40):
        arriving = max(CAPACITY * (1 - tick / 5), CAPACITY / 20)
        seen = replace(quiet(tick * TICK_SECONDS, arriving), is_wanted=False, delay_seconds=SLOWER_SECONDS)
        controller.decide(seen)
    assert controller.capacity is not None
    assert controller.capacity < CAPACITY / 2
