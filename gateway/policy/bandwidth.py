"""Ceilings on what one process moves to and from the origin: one per slot and direction, one for the whole link.

A piece passes when every ceiling over it has room. Pieces of one slot and direction pass in the order in which they
came; slots wait beside each other, so that one at its own ceiling keeps no other from the link.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.clock import Clock
from gateway.origin.client import Direction
from gateway.policy.token_bucket import TokenBucket

_FINEST_SLEEP_SECONDS = 0.001
"""Finer waits cost more than they shape: what comes due meanwhile passes together."""

_HEADROOM = 1.25
"""Who got all it asked for is expected to ask for this much of it next."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """At most `bytes_per_second` in one direction, over all processes: for one slot, or (None) for the whole link."""

    direction: Direction
    slot: str | None
    bytes_per_second: float


class _Limit:
    """A ceiling's part that this process may use now."""

    def __init__(self, ceiling: Ceiling, rate: float, now: float) -> None:
        self.ceiling = ceiling
        self.bucket = TokenBucket(rate, now)
        self._used = 0
        self._short = False

    def delay_seconds(self, now: float) -> float:
        delay = self.bucket.delay_seconds(now)
        self._short = self._short or delay > 0
        return delay

    def take(self, count: int) -> None:
        self._used += count
        self.bucket.take(count)

    def give_back(self, count: int) -> None:
        self._used -= count
        self.bucket.give_back(count)

    def demand(self, seconds: float) -> float:
        """What was used in the last `seconds`, with headroom; all there is when anybody had to wait."""
        used, short = self._used, self._short
        self._used, self._short = 0, False
        return self.ceiling.bytes_per_second if short else max(0.0, _HEADROOM * used / seconds)


@dataclass(eq=False, slots=True)
class _Waiter:
    arrival: int
    count: int
    passed: asyncio.Future[None]


class Gate:
    """Where the pieces of one slot pass in one direction."""

    def __init__(self, link: _Link, limits: Sequence[_Limit]) -> None:
        self._link = link
        self._limits = limits
        self.waiting: deque[_Waiter] = deque()

    async def take(self, count: int) -> float:
        """Wait until `count` bytes may pass; returns the seconds waited. Who is cancelled has taken nothing."""
        if self.passes(count):
            return 0.0
        link, now = self._link, self._link.clock.monotonic()
        waiter = link.enqueue(self, count)
        try:
            await waiter.passed
        except asyncio.CancelledError:
            link.leave(self, waiter)
            raise
        return link.clock.monotonic() - now

    def passes(self, count: int) -> bool:
        """Let `count` bytes pass if nothing keeps them; False, and nothing taken, when they must wait."""
        if self._link.anybody_waits or self.delay_seconds(self._link.clock.monotonic()) > 0:
            return False
        self.charge(count)
        return True

    def charge(self, count: int) -> None:
        """`count` bytes pass without having waited: those behind them wait for both."""
        for limit in self._limits:
            limit.take(count)

    def give_back(self, count: int) -> None:
        for limit in self._limits:
            limit.give_back(count)

    def delay_seconds(self, now: float) -> float:
        """Until every ceiling over this gate has room. Each that has none remembers that it was short."""
        return max([limit.delay_seconds(now) for limit in self._limits])


class _Link:
    """One direction: all who wait, and the timer that lets them pass."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._gates: set[Gate] = set()
        self._arrivals = 0
        self._timer: asyncio.Task[None] | None = None
        self._due = math.inf

    @property
    def anybody_waits(self) -> bool:
        return bool(self._gates)

    def enqueue(self, gate: Gate, count: int) -> _Waiter:
        self._arrivals += 1
        waiter = _Waiter(self._arrivals, count, asyncio.get_running_loop().create_future())
        gate.waiting.append(waiter)
        if len(gate.waiting) == 1:
            self._gates.add(gate)
            self.serve()
        return waiter

    def leave(self, gate: Gate, waiter: _Waiter) -> None:
        """Its taker was cancelled: before its turn, or when that had come and it did not know yet."""
        if not waiter.passed.cancelled():
            gate.give_back(waiter.count)
        elif waiter in gate.waiting:
            gate.waiting.remove(waiter)
            if not gate.waiting:
                self._gates.discard(gate)
        self.serve()

    def serve(self) -> None:
        """Let pass whoever may; wake up when the next one may."""
        now = self.clock.monotonic()
        delays = {gate: gate.delay_seconds(now) for gate in self._gates}
        while ready := [gate for gate, delay in delays.items() if delay <= 0]:
            self._pass(_next_of(ready))
            delays = {gate: gate.delay_seconds(now) for gate in self._gates}
        self._wake_up_at(now + max(min(delays.values()), _FINEST_SLEEP_SECONDS) if delays else math.inf, now)

    def _wake_up_at(self, due: float, now: float) -> None:
        """A timer that rings too soon is left alone: it does no harm, and making another for every piece does."""
        if self._timer is not None and (due == math.inf or due < self._due):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and due < math.inf:
            self._due = due
            self._timer = asyncio.create_task(self._serve_after(due - now))

    def _pass(self, gate: Gate) -> None:
        waiter = gate.waiting.popleft()
        if not gate.waiting:
            self._gates.discard(gate)
        if not waiter.passed.cancelled():
            gate.charge(waiter.count)
            waiter.passed.set_result(None)

    async def _serve_after(self, seconds: float) -> None:
        await self.clock.sleep(seconds)
        self._timer = None
        self.serve()


def _next_of(ready: Iterable[Gate]) -> Gate:
    """Which slot's turn it is on the link: whoever has waited longest."""
    return min(ready, key=lambda gate: gate.waiting[0].arrival)


class Bandwidth:
    """All ceilings, as one process has to keep them. `rates` are its own parts of `ceilings`, in their order."""

    def __init__(self, ceilings: Sequence[Ceiling], rates: Sequence[float], clock: Clock) -> None:
        now = clock.monotonic()
        self._limits = [_Limit(one, rate, now) for one, rate in zip(ceilings, rates, strict=True)]
        self._links: dict[Direction, _Link] = {"read": _Link(clock), "write": _Link(clock)}
        self._gates: dict[tuple[Direction, str], Gate | None] = {}
        self._clock = clock
        self._demands_at = now

    def gate(self, direction: Direction, slot: str) -> Gate | None:
        """Where the slot's bytes pass; None: nothing limits them."""
        key = (direction, slot)
        if key not in self._gates:
            over = [one for one in self._limits if one.ceiling.direction == direction]
            over = [one for one in over if one.ceiling.slot in (None, slot)]
            self._gates[key] = Gate(self._links[direction], over) if over else None
        return self._gates[key]

    def demands(self) -> list[float]:
        """What this process could use of each ceiling, in bytes per second, by what went on since the last call."""
        now = self._clock.monotonic()
        seconds, self._demands_at = max(now - self._demands_at, _FINEST_SLEEP_SECONDS), now
        return [limit.demand(seconds) for limit in self._limits]

    def set_rates(self, rates: Sequence[float]) -> None:
        """The parts of this process from now on; who waits is looked at anew."""
        now, changed = self._clock.monotonic(), False
        for limit, rate in zip(self._limits, rates, strict=True):
            if rate != limit.bucket.rate:
                limit.bucket.set_rate(rate, now)
                changed = True
        if changed:
            for link in self._links.values():
                link.serve()
