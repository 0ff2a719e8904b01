"""How many writes of a bucket are on their way at once, and when an origin that does not do its work is left alone.

    a lane is a bucket in a slot: none waits for another
    in a lane each priority has places of its own: what is small for what is large, what is new for what has failed

A priority of which several in a row fail is asked with one write at a time, some seconds apart; all such of a lane
take turns, so that a bucket that is away is asked no oftener than that. Keys may fail alone, though, while others are
well (S3 throttles by prefix, and a part of a Ceph cluster may be down): what gets through beside failures says so, and
then more have to fail in a row, and the pauses are short as long as anything of the lane is answered. What takes long
gives its place to the next, up to a bound.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from gateway.writeback.journal.records import Priority

AWAY_AFTER = 4
"""So many requests in a row that the origin has not carried out: it is away."""

AWAY_AFTER_AMONG_OTHERS = 32
AMONG_OTHERS_SECONDS = 60.0
"""The same where something has got through beside others that failed, in the last minute."""

_OTHERS_BEFORE_A_RETRY = 3
"""Of what is left alone: what has failed before most likely fails again."""

FIRST_AWAY_SECONDS = 0.5
LONGEST_AWAY_SECONDS = 2.0

BESIDE_ANSWERS_SECONDS = 0.25
"""The pause at most where the origin has answered something of the lane in the last `ANSWERED_SECONDS`."""

ANSWERED_SECONDS = 10.0

SLOW_SECONDS = 5.0
"""What is on its way for longer than this may hang: others do not wait for it."""

PARTS_PER_LANE = 8
"""On their way at once, of all objects of a lane."""

RETRIED_PARTS_PER_LANE = 4
"""Of those, of objects that have failed."""

HURRIED_PARTS_PER_LANE = 4
"""Besides, of objects that somebody waits for."""

PLACES = {
    Priority.URGENT: 8,
    Priority.SMALL: 8,
    Priority.LARGE: 2,
    Priority.RETRY: 4,
    Priority.UPLOAD: 2,
    Priority.ABORT: 2,
    Priority.REFUSED: 2,
}
"""How many writes of a lane are on their way at once, slow ones left out."""

PLACES_MAX = {Priority.SMALL: 64, Priority.RETRY: 32}
"""Those whose number grows as long as the origin keeps up."""

UNDER_WAY_MAX = {**PLACES, **PLACES_MAX, Priority.URGENT: 64, Priority.ABORT: 16}
"""How many are, slow ones included."""


class _Fare:
    """How writes of one priority have fared."""

    def __init__(self, places: int) -> None:
        self.under_way: dict[int, float] = {}
        """Since when, by id."""

        self.failures = 0
        self.away_after = AWAY_AFTER
        self.away_since = 0.0
        self.pause_seconds = 0.0
        self.mixed_at = 0.0
        self.places = float(places)
        self.asked = 0

    @property
    def is_away(self) -> bool:
        return self.failures >= self.away_after

    def active(self, now: float) -> int:
        return sum(now - began < SLOW_SECONDS for began in self.under_way.values())


class Lane:
    """What of a slot and bucket is on its way. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self._fares = {one: _Fare(PLACES[one]) for one in Priority}
        self._parts = PartPlaces(PARTS_PER_LANE, HURRIED_PARTS_PER_LANE)
        self._retried_parts = PartPlaces(RETRIED_PARTS_PER_LANE, HURRIED_PARTS_PER_LANE)
        self._failures = 0
        self._asked_at = -math.inf
        """When something of what is left alone was last tried."""

        self._answered_at = -math.inf
        """When the origin has done anything of the lane, or refused it."""

        self._begun = 0

    @property
    def is_away(self) -> bool:
        return self._failures >= AWAY_AFTER

    def prioritise(self) -> None:
        self._asked_at = -math.inf

    @asynccontextmanager
    async def part(self, is_hurried: Callable[[], bool], *, has_failed: bool) -> AsyncIterator[None]:
        """A place for a part, which parts of objects that have failed do not take from all others."""
        async with AsyncExitStack() as places:
            if has_failed:
                await places.enter_async_context(self._retried_parts.place(is_hurried))
            await places.enter_async_context(self._parts.place(is_hurried))
            yield

    def hurry_parts(self) -> None:
        """Somebody has begun to wait for an object whose parts may wait for their places."""
        self._retried_parts.give()
        self._parts.give()

    def priorities(self) -> Sequence[Priority]:
        """In their order, where each has places; those that are left alone take turns."""
        return sorted(Priority, key=lambda one: self._fares[one].asked if self._fares[one].is_away else 0)

    def room(self, priority: Priority, now: float) -> int:
        fare = self._fares[priority]
        left = UNDER_WAY_MAX[priority] - len(fare.under_way)
        if fare.is_away:
            are_asked = any(one.active(now) for one in self._fares.values() if one.is_away)
            does_answer = now < self._answered_at + ANSWERED_SECONDS
            pause_seconds = min(fare.pause_seconds, BESIDE_ANSWERS_SECONDS) if does_answer else fare.pause_seconds
            return 0 if now < self._asked_at + pause_seconds or are_asked else min(left, 1)
        return min(left, int(fare.places) - fare.active(now))

    def is_mixed(self, priority: Priority, now: float) -> bool:
        """Whether what is first may fail, or hang, and what comes behind it not: that is tried as well."""
        fare = self._fares[priority]
        return fare.failures > 0 or fare.away_after > AWAY_AFTER or fare.active(now) < len(fare.under_way)

    def begin(self, priority: Priority, write_id: int, now: float) -> None:
        """A write is on its way."""
        fare = self._fares[priority]
        fare.under_way[write_id] = now
        if fare.is_away:
            self._asked_at = now
        self._begun += 1
        fare.asked = self._begun + (_OTHERS_BEFORE_A_RETRY - 1 if priority is Priority.RETRY else 0)

    def end(self, priority: Priority, write_id: int) -> None:
        """It is no more."""
        self._fares[priority].under_way.pop(write_id, None)

    def answered(self, priority: Priority, now: float, *, is_done: bool) -> None:
        """The origin does its work."""
        fare, self._failures, self._answered_at = self._fares[priority], 0, now
        if fare.is_away:
            self.prioritise()  # the others that are left alone may get through, too
        if fare.failures:
            fare.failures, fare.away_after, fare.mixed_at = 0, AWAY_AFTER_AMONG_OTHERS, now
        elif now - fare.mixed_at > AMONG_OTHERS_SECONDS:
            fare.away_after = AWAY_AFTER
        most, places = PLACES_MAX.get(priority), int(fare.places)
        # More are under way where places have just gone: what was sent before that tells nothing of those left.
        if is_done and most is not None and places - 1 <= fare.active(now) <= places:
            fare.places = min(most, fare.places + 0.5)

    def unanswered(self, priority: Priority, write_id: int, now: float, dice: random.Random) -> None:
        """It does not."""
        fare = self._fares[priority]
        self._failures += 1
        if fare.is_away and fare.under_way[write_id] < fare.away_since:
            return  # what was under way at the time tells nothing more
        fare.failures += 1
        if priority in PLACES_MAX:
            least = PLACES[priority] / 2 if fare.away_after > AWAY_AFTER else 1.0
            fare.places = max(least, fare.places / 2)
        if fare.is_away:
            more = fare.failures - fare.away_after
            if not more:
                fare.away_since = self._asked_at = now
            pause_seconds = min(LONGEST_AWAY_SECONDS, FIRST_AWAY_SECONDS * 2.0 ** min(more, 10))
            fare.pause_seconds = pause_seconds * dice.uniform(0.5, 1.0)


class PartPlaces:
    """Places for parts, in the order of arrival; but what somebody waits for has the first that is free, and some of
    its own: others keep theirs for long, where their bytes wait for those of what somebody waits for."""

    def __init__(self, places: int, hurried_places: int) -> None:
        self._free = places
        self._hurried_free = hurried_places
        self._waiting: list[_PartWaiter] = []

    @asynccontextmanager
    async def place(self, is_hurried: Callable[[], bool]) -> AsyncIterator[None]:
        """One, in one's turn; `is_hurried` says whether somebody waits for the part, whenever it is asked."""
        waiter = _PartWaiter(is_hurried, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self.give()
        try:
            is_hurried_place = await waiter.told
        except BaseException:
            if not waiter.told.cancelled():  # it has just been told
                self._take_back(is_hurried_place=waiter.told.result())
            self._waiting = [one for one in self._waiting if one is not waiter]
            raise
        try:
            yield
        finally:
            self._take_back(is_hurried_place=is_hurried_place)

    def give(self) -> None:
        """Have those go on for whom there is a place: one is free, or somebody waits for a part by now."""
        waiting = [one for one in self._waiting if not one.told.done()]  # else it is about to leave
        asked = [(one.is_hurried(), one) for one in waiting]
        for is_hurried, one in sorted(asked, key=lambda pair: not pair[0]):  # which keeps the order of arrival
            if self._free:
                self._free -= 1
                one.told.set_result(False)
            elif is_hurried and self._hurried_free:
                self._hurried_free -= 1
                one.told.set_result(True)
        self._waiting = [one for one in waiting if not one.told.done()]

    def _take_back(self, *, is_hurried_place: bool) -> None:
        if is_hurried_place:
            self._hurried_free += 1
        else:
            self._free += 1
        self.give()


@dataclass(frozen=True, slots=True, eq=False)
class _PartWaiter:
    is_hurried: Callable[[], bool]
    told: asyncio.Future[bool]
    """Whether its place is one of those for what somebody waits for."""
