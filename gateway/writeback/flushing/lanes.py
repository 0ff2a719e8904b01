"""Bounds the writes of a bucket that are under way at once, and pauses requests to an origin that is not working.

    a lane is a bucket in a slot: none waits for another
    in a lane each priority has its own places: small ones do not wait for large ones, nor new ones for failed ones

When several writes of a priority fail in a row, it tries one at a time, with pauses of seconds; all such priorities of
a lane take turns, so that a bucket that is away gets no more requests than that. But keys may fail alone while others
succeed (S3 throttles by prefix, and a part of a Ceph cluster may be down): once a write has succeeded beside failures,
more must fail in a row, and pauses stay short while the lane gets any answer. A slow write yields its place to the
next, up to a bound.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from gateway.writeback.journal.records import Priority

AWAY_AFTER = 4
"""Failures in a row after which a priority counts as away."""

AWAY_AFTER_AMONG_OTHERS = 32
AMONG_OTHERS_SECONDS = 60.0
"""The failures in a row that it takes when a write has succeeded beside failing ones in the last minute."""

_OTHERS_BEFORE_A_RETRY = 3
"""Turns of other priorities before a retry: what has failed before will probably fail again."""

FIRST_AWAY_SECONDS = 0.5
LONGEST_AWAY_SECONDS = 2.0

BESIDE_ANSWERS_SECONDS = 0.25
"""The longest pause if the origin has answered anything of the lane in the last `ANSWERED_SECONDS`."""

ANSWERED_SECONDS = 10.0

SLOW_SECONDS = 5.0
"""A write under way for longer may hang: others do not wait for it."""

PARTS_PER_LANE = 8
"""Parts under way at once, of all objects of a lane."""

RETRIED_PARTS_PER_LANE = 4
"""Parts under way at once, of objects that have failed."""

HURRIED_PARTS_PER_LANE = 4
"""Additional ones, for objects that a request waits for."""

PLACES = {
    Priority.URGENT: 8,
    Priority.SMALL: 8,
    Priority.LARGE: 2,
    Priority.RETRY: 4,
    Priority.UPLOAD: 2,
    Priority.ABORT: 2,
    Priority.REFUSED: 2,
}
"""Writes of a lane under way at once, without slow ones."""

PLACES_MAX = {Priority.SMALL: 64, Priority.RETRY: 32}
"""The most places of priorities whose number grows while the origin keeps up."""

UNDER_WAY_MAX = {**PLACES, **PLACES_MAX, Priority.URGENT: 64, Priority.ABORT: 16}
"""The most writes under way, slow ones included."""


class _Fare:
    """The recent results of writes of one priority."""

    def __init__(self, places: int) -> None:
        self.under_way: dict[int, float] = {}
        """Start times by id."""

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
    """The writes of a slot and bucket that are under way. Times are monotonic."""

    def __init__(self) -> None:
        self._fares = {one: _Fare(PLACES[one]) for one in Priority}
        self._parts = PartPlaces(PARTS_PER_LANE, HURRIED_PARTS_PER_LANE)
        self._retried_parts = PartPlaces(RETRIED_PARTS_PER_LANE, HURRIED_PARTS_PER_LANE)
        self._failures = 0
        self._asked_at = -math.inf
        """The last attempt of any priority that is away."""

        self._answered_at = -math.inf
        """The last time that the origin has carried out or refused a request of the lane."""

        self._begun = 0

    @property
    def is_away(self) -> bool:
        return self._failures >= AWAY_AFTER

    def prioritise(self) -> None:
        self._asked_at = -math.inf

    @asynccontextmanager
    async def part(self, is_hurried: Callable[[], bool], *, has_failed: bool) -> AsyncIterator[None]:
        """Wait for a part's place; failed objects have fewer, so that they leave some to others."""
        async with AsyncExitStack() as places:
            if has_failed:
                await places.enter_async_context(self._retried_parts.place(is_hurried))
            await places.enter_async_context(self._parts.place(is_hurried))
            yield

    def prioritise_parts(self) -> None:
        """Give places anew: a request has begun to wait for an object whose parts may be queued."""
        self._retried_parts.give()
        self._parts.give()

    def priorities(self) -> Sequence[Priority]:
        """Return the priorities in order; those that are away take turns."""
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
        """Return whether the first writes may fail or hang while later ones would not: then those are tried too."""
        fare = self._fares[priority]
        return fare.failures > 0 or fare.away_after > AWAY_AFTER or fare.active(now) < len(fare.under_way)

    def begin(self, priority: Priority, write_id: int, now: float) -> None:
        fare = self._fares[priority]
        fare.under_way[write_id] = now
        if fare.is_away:
            self._asked_at = now
        self._begun += 1
        fare.asked = self._begun + (_OTHERS_BEFORE_A_RETRY - 1 if priority is Priority.RETRY else 0)

    def end(self, priority: Priority, write_id: int) -> None:
        self._fares[priority].under_way.pop(write_id, None)

    def answered(self, priority: Priority, now: float, *, is_done: bool) -> None:
        """Note that the origin works."""
        fare, self._failures, self._answered_at = self._fares[priority], 0, now
        if fare.is_away:
            self.prioritise()  # other priorities that are away may succeed, too
        if fare.failures:
            fare.failures, fare.away_after, fare.mixed_at = 0, AWAY_AFTER_AMONG_OTHERS, now
        elif now - fare.mixed_at > AMONG_OTHERS_SECONDS:
            fare.away_after = AWAY_AFTER
        most, places = PLACES_MAX.get(priority), int(fare.places)
        # More are under way right after places were lost: their success tells nothing of the places left.
        if is_done and most is not None and places - 1 <= fare.active(now) <= places:
            fare.places = min(most, fare.places + 0.5)

    def unanswered(self, priority: Priority, write_id: int, now: float, rng: random.Random) -> None:
        """Note a request that the origin has not carried out."""
        fare = self._fares[priority]
        self._failures += 1
        if fare.is_away and fare.under_way[write_id] < fare.away_since:
            return  # requests from before tell nothing more
        fare.failures += 1
        if priority in PLACES_MAX:
            least = PLACES[priority] / 2 if fare.away_after > AWAY_AFTER else 1.0
            fare.places = max(least, fare.places / 2)
        if fare.is_away:
            more = fare.failures - fare.away_after
            if not more:
                fare.away_since = self._asked_at = now
            pause_seconds = min(LONGEST_AWAY_SECONDS, FIRST_AWAY_SECONDS * 2.0 ** min(more, 10))
            fare.pause_seconds = pause_seconds * rng.uniform(0.5, 1.0)


class PartPlaces:
    """Places for parts, in order of arrival.

    Parts that a request waits for get the first free place, and some of their own: other parts may keep theirs for long
    while their bytes wait for the urgent ones'.
    """

    def __init__(self, places: int, hurried_places: int) -> None:
        self._free = places
        self._hurried_free = hurried_places
        self._waiting: dict[asyncio.Future[bool], Callable[[], bool]] = {}
        """Futures in order of arrival; their result is True for one of the hurried places."""

    @asynccontextmanager
    async def place(self, is_hurried: Callable[[], bool]) -> AsyncIterator[None]:
        """Wait for a place; `is_hurried` returns at any time whether a request waits for the part."""
        told = asyncio.get_running_loop().create_future()
        self._waiting[told] = is_hurried
        self.give()
        try:
            is_hurried_place = await told
        except BaseException:
            if not told.cancelled():  # it was just given a place
                self._take_back(is_hurried_place=told.result())
            self._waiting.pop(told, None)
            raise
        try:
            yield
        finally:
            self._take_back(is_hurried_place=is_hurried_place)

    def give(self) -> None:
        """Hand out places, after one was freed or a part became hurried."""
        waiting = {told: one for told, one in self._waiting.items() if not told.done()}  # others are about to leave
        asked = [(is_hurried(), told) for told, is_hurried in waiting.items()]
        for is_hurried, told in sorted(asked, key=lambda pair: not pair[0]):  # stable: keeps the order of arrival
            if self._free:
                self._free -= 1
                told.set_result(False)
            elif is_hurried and self._hurried_free:
                self._hurried_free -= 1
                told.set_result(True)
        self._waiting = {told: one for told, one in waiting.items() if not told.done()}

    def _take_back(self, *, is_hurried_place: bool) -> None:
        if is_hurried_place:
            self._hurried_free += 1
        else:
            self._free += 1
        self.give()
