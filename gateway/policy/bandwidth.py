"""Ceilings on what moves to and from the origin: one per slot and direction, one for the whole link.

A piece passes the ceiling of its slot, then that of the link. In one process the pieces of a slot and direction pass
in the order in which they came; slots wait beside each other, so that one at its own ceiling keeps no other from the
link. Between processes, each has one piece in the row before each ceiling, and goes to its end after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.clock import Clock
from gateway.origin.client import Direction
from gateway.policy.token_bucket import SharedBuckets, TokenBucket

_FINEST_SLEEP_SECONDS = 0.001
"""Finer waits cost more than they shape: what comes due meanwhile passes together."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """At most `bytes_per_second` in one direction, over all processes: for one slot, or (None) for the whole link."""

    direction: Direction
    slot: str | None
    bytes_per_second: float


class _Queue:
    """This process's pieces before one ceiling: the first has taken its tokens and waits for its time."""

    def __init__(self, bucket: TokenBucket, clock: Clock) -> None:
        self.bucket = bucket
        self._clock = clock
        self._turn = asyncio.Lock()  # first come, first served
        self._waiting = 0

    def has_room(self, now: float) -> bool:
        """Whether a piece may pass now, without overtaking another."""
        return not self._waiting and self.bucket.delay_seconds(now) <= 0

    async def take(self, count: int) -> None:
        """Wait until `count` bytes may pass. Who is cancelled has taken nothing."""
        self._waiting += 1
        try:
            async with self._turn:
                delay_seconds = self.bucket.delay_seconds(self._clock.monotonic())
                self.bucket.take(count)
                try:
                    if delay_seconds > 0:
                        await self._clock.sleep(max(delay_seconds, _FINEST_SLEEP_SECONDS))
                except BaseException:
                    self.bucket.give_back(count)
                    raise
        finally:
            self._waiting -= 1


class RateLimiter:
    """Where the pieces of one slot pass in one direction: `queues` are those of the ceilings over it, in order."""

    def __init__(self, queues: Sequence[_Queue], clock: Clock) -> None:
        self._queues = queues
        self._clock = clock
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def take(self, count: int) -> float:
        """Wait until `count` bytes may pass; returns the seconds waited. Who is cancelled has taken nothing."""
        if self.passes(count):
            return 0.0
        began = self._clock.monotonic()
        self._waiting += 1
        try:
            async with self._turn:
                await self._take_of_each(count)
        finally:
            self._waiting -= 1
        return self._clock.monotonic() - began

    def passes(self, count: int) -> bool:
        """Let `count` bytes pass if nothing keeps them; False, and nothing taken, when they must wait."""
        now = self._clock.monotonic()
        if self._waiting or not all(queue.has_room(now) for queue in self._queues):
            return False
        self.charge(count)
        return True

    def charge(self, count: int) -> None:
        """`count` bytes pass without having waited: those behind them wait for both."""
        for queue in self._queues:
            queue.bucket.take(count)

    async def _take_of_each(self, count: int) -> None:
        passed: list[_Queue] = []
        try:
            for queue in self._queues:
                await queue.take(count)
                passed.append(queue)
            now = self._clock.monotonic()
            for queue in self._queues:
                queue.bucket.passed(count, now)
        except BaseException:
            for queue in passed:
                queue.bucket.give_back(count)
            raise


class Bandwidth:
    """All ceilings, as one process keeps them with the others that use `buckets`; without, it is alone."""

    def __init__(self, ceilings: Sequence[Ceiling], clock: Clock, buckets: SharedBuckets | None = None) -> None:
        buckets = buckets or SharedBuckets.of_one_process(len(ceilings), clock.monotonic())
        self._queues = [
            (ceiling, _Queue(buckets.bucket(number, ceiling.bytes_per_second), clock))
            for number, ceiling in enumerate(ceilings)
        ]
        self._limiters: dict[tuple[Direction, str], RateLimiter | None] = {}
        self._clock = clock

    def limiter(self, direction: Direction, slot: str) -> RateLimiter | None:
        """Where the slot's bytes pass; None: nothing limits them."""
        key = (direction, slot)
        if key not in self._limiters:
            over = [one for one in self._queues if one[0].direction == direction and one[0].slot in (None, slot)]
            over.sort(key=lambda one: one[0].slot is None)  # the link comes last
            queues = [queue for _, queue in over]
            self._limiters[key] = RateLimiter(queues, self._clock) if queues else None
        return self._limiters[key]
