"""Who may begin, without anybody who does."""

from __future__ import annotations

import asyncio
import random

import pytest

from gateway.writeback.flushing.lanes import (
    ANSWERED_SECONDS,
    AWAY_AFTER,
    AWAY_AFTER_AMONG_OTHERS,
    BESIDE_ANSWERS_SECONDS,
    FIRST_AWAY_SECONDS,
    HURRIED_PARTS_PER_LANE,
    PARTS_PER_LANE,
    PLACES,
    RETRIED_PARTS_PER_LANE,
    SLOW_SECONDS,
    UNDER_WAY_MAX,
    Lane,
    PartPlaces,
)
from gateway.writeback.journal.records import Priority


def fails(lane: Lane, priority: Priority, now: float, times: int = 1) -> None:
    """So many, one after the other."""
    for number in range(times):
        lane.begin(priority, number, now)
        lane.unanswered(priority, number, now, random.Random(1))
        lane.end(priority, number)


def gets_through(lane: Lane, priority: Priority, now: float) -> None:
    lane.begin(priority, 0, now)
    lane.answered(priority, now, is_done=True)
    lane.end(priority, 0)


def test_what_fails_leaves_other_priorities_alone() -> None:
    """What has failed before, and fails again, says nothing of what is new."""
    lane = Lane()
    fails(lane, Priority.RETRY, 100.0, AWAY_AFTER)
    assert lane.room(Priority.RETRY, 100.0) == 0
    assert lane.room(Priority.SMALL, 100.0) == PLACES[Priority.SMALL]


def test_what_is_left_alone_takes_turns() -> None:
    """One write is on its way of all of them, and of those that have failed before one in four."""
    lane, now, asked = Lane(), 100.0, list[Priority]()
    both = (Priority.SMALL, Priority.RETRY)
    for one in both:
        fails(lane, one, now, AWAY_AFTER)
    while len(asked) < 12:
        now += 10.0
        [*found] = [one for one in lane.priorities() if one in both and lane.room(one, now)]
        asked.append(found[0])
        lane.begin(found[0], 0, now)
        assert not any(lane.room(one, now) for one in both)
        lane.unanswered(found[0], 0, now, random.Random(1))
        lane.end(found[0], 0)
    assert asked.count(Priority.RETRY) == 3


def test_what_is_left_alone_beside_answers_is_asked_more_often() -> None:
    """As long as the origin answers anything of the lane; one write at a time all the same."""
    lane, now = Lane(), 100.0
    fails(lane, Priority.RETRY, now, 4 * AWAY_AFTER)
    assert lane.room(Priority.RETRY, now + BESIDE_ANSWERS_SECONDS) == 0
    gets_through(lane, Priority.SMALL, now)
    assert lane.room(Priority.RETRY, now + BESIDE_ANSWERS_SECONDS) == 1
    now += ANSWERED_SECONDS
    fails(lane, Priority.RETRY, now)
    assert lane.room(Priority.RETRY, now + BESIDE_ANSWERS_SECONDS) == 0


def test_what_was_under_way_already_makes_no_pause_longer() -> None:
    """Eight that fail at once tell no more than four."""
    lane = Lane()
    for number in range(8):
        lane.begin(Priority.SMALL, number, 100.0)
    for number in range(8):
        lane.unanswered(Priority.SMALL, number, 101.0, random.Random(1))
        lane.end(Priority.SMALL, number)
    assert lane.room(Priority.SMALL, 101.0) == 0
    assert lane.room(Priority.SMALL, 101.0 + FIRST_AWAY_SECONDS) == 1


def test_what_gets_through_beside_failures_has_more_be_tried() -> None:
    """For a minute; then a few failures in a row say again that the origin is away."""
    lane = Lane()
    fails(lane, Priority.SMALL, 100.0)
    gets_through(lane, Priority.SMALL, 101.0)
    fails(lane, Priority.SMALL, 102.0, AWAY_AFTER_AMONG_OTHERS - 1)
    assert lane.room(Priority.SMALL, 102.0) > 1
    fails(lane, Priority.SMALL, 103.0)
    assert lane.room(Priority.SMALL, 103.0) == 0
    gets_through(lane, Priority.SMALL, 110.0)
    gets_through(lane, Priority.SMALL, 171.0)
    fails(lane, Priority.SMALL, 172.0, AWAY_AFTER)
    assert lane.room(Priority.SMALL, 172.0) == 0


def test_what_is_slow_gives_its_place_away_up_to_a_bound() -> None:
    lane, now = Lane(), 100.0
    begun = 0
    for _ in range(40):
        for _ in range(lane.room(Priority.SMALL, now)):
            lane.begin(Priority.SMALL, begun, now)
            begun += 1
        now += SLOW_SECONDS
    assert begun == UNDER_WAY_MAX[Priority.SMALL]
    assert lane.room(Priority.LARGE, now) == PLACES[Priority.LARGE]


async def test_parts_of_what_has_failed_leave_places_to_others() -> None:
    """However many of them hang; and one that is cancelled while it waits keeps no place."""
    lane, held = Lane(), asyncio.Event()
    sent = list[bool]()

    async def send(*, has_failed: bool) -> None:
        async with lane.part(lambda: False, has_failed=has_failed):
            sent.append(has_failed)
            await held.wait()

    async def begin(count: int, *, has_failed: bool) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(send(has_failed=has_failed)) for _ in range(count)]
        for _ in range(5):
            await asyncio.sleep(0)
        return tasks

    failed = await begin(2 * PARTS_PER_LANE, has_failed=True)
    assert sent.count(True) == RETRIED_PARTS_PER_LANE
    others = await begin(PARTS_PER_LANE, has_failed=False)
    assert sent.count(False) == PARTS_PER_LANE - RETRIED_PARTS_PER_LANE
    for one in failed:
        one.cancel()
    await asyncio.gather(*failed, return_exceptions=True)
    assert sent.count(False) == PARTS_PER_LANE
    held.set()
    await asyncio.gather(*others)
    again = await begin(PARTS_PER_LANE, has_failed=True)
    await asyncio.gather(*again)


@pytest.mark.parametrize("has_failed", [False, True])
async def test_parts_that_somebody_waits_for_wait_for_none_that_nobody_waits_for(has_failed: bool) -> None:
    """They have places of their own, also where somebody begins to wait while they are in the row, which they leave."""
    lane, held = Lane(), asyncio.Event()
    hurried, sent = set[str](), list[str]()

    async def send(name: str) -> None:
        async with lane.part(lambda: name in hurried, has_failed=has_failed):
            sent.append(name)
            await held.wait()

    async def settle() -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    places = RETRIED_PARTS_PER_LANE if has_failed else PARTS_PER_LANE
    tasks = [asyncio.create_task(send(f"other{number}")) for number in range(2 * places)]
    tasks += [asyncio.create_task(send(f"mine{number}")) for number in range(2 * HURRIED_PARTS_PER_LANE)]
    await settle()
    assert sent == [f"other{number}" for number in range(places)]
    hurried |= {f"mine{number}" for number in range(2 * HURRIED_PARTS_PER_LANE)}
    lane.prioritise_parts()
    await settle()
    assert sent[places:] == [f"mine{number}" for number in range(HURRIED_PARTS_PER_LANE)]
    tasks[0].cancel()  # the place of another is free: for those that somebody waits for
    await settle()
    assert sent[places + HURRIED_PARTS_PER_LANE :] == [f"mine{HURRIED_PARTS_PER_LANE}"]
    hurried.clear()  # nobody waits any more: they are in the row again, where they were
    tasks[1].cancel()
    await settle()
    assert sent[-1] == f"other{places}"
    for one in tasks[2 : places + 2]:
        one.cancel()
    held.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks = [asyncio.create_task(send(f"again{number}")) for number in range(places)]
    held.clear()
    await settle()
    assert sent[-places:] == [f"again{number}" for number in range(places)]
    held.set()
    await asyncio.gather(*tasks)


async def test_a_place_that_is_given_to_who_is_just_leaving_is_given_on() -> None:
    """Told and cancelled in the same moment."""
    places, leave = PartPlaces(1, 0), asyncio.Event()

    async def hold() -> None:
        async with places.place(lambda: False):
            await leave.wait()

    first, second, third = (asyncio.create_task(hold()) for _ in range(3))
    await asyncio.sleep(0)
    leave.set()
    await asyncio.sleep(0)
    second.cancel()
    third_went = await asyncio.gather(first, second, third, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in third_went] == [False, True, False]
    async with asyncio.timeout(5), places.place(lambda: False):
        """It is free."""
