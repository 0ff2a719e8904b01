"""Finds the capacity of the link to the origin while it is used, by decisions ten times a second.

A full link has a queue, and a queue shows as delay. What arrives through a full link is its capacity. So the controller
lets pass a little less than that (CRUISING), and the queue is here, where shares are kept, and not in the network. Now
and then, while more is wanted, it lets pass more for a moment (PROBING): if more arrives, the capacity is higher, and
it probes on at once; if not, it lets pass a little less for as long (SETTLING). When answers are late, it lets pass
much less until the queue is gone (DRAINING), and learns meanwhile what arrives. More can never arrive than the link
carries: the capacity found is raised to what arrives at any time.

A delay may have other causes: other traffic, or an origin that has become slower. That shows after a drain that lets
pass half of what arrives: if answers are as late as before, the delay is accepted, and what was taken back since the
first late answer is restored. It stays accepted for its time, though some answers are earlier: a slow origin may be so
now and then. A request without an answer yet can show that its answer is late, and never that it is not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum, auto

TICK_SECONDS = 0.1
"""Seconds between two decisions."""

UNLIMITED_BYTES_PER_SECOND = 1e12
"""The rate before any queue was seen: beyond every link, and small enough that sums of it stay exact."""

FLOOR_BYTES_PER_SECOND = 64 * 2**10
"""The least rate, as the least that can be configured: with less, connections look dead to origins and clients."""

FIRST_BYTES_PER_SECOND = 2**20
"""The first capacity found is at least this: a few small requests say little about the link."""

CRUISE_SHARE = 0.97
"""The part of the capacity that may pass: the queue of a burst is gone in a moment."""

_CRUISE_SECONDS = 1.2
"""Seconds between two probes; twice as long while delays are unknown."""

_PROBE_SECONDS = 0.5
_PROBE_SECONDS_MAX = 1.0
"""The least and the longest probe; longer where answers take long, so that its effect is counted."""

_PROBE_QUEUE_SECONDS = 0.075
"""The longest queue that a failed probe leaves, unless it follows a successful one."""

_PROBE_GAIN_MAX = 1.25
_RISE_AT_MOST = 1.5
"""The most growth in one step, as bytes held up somewhere may arrive together."""

_WORTH_A_PROBE = 1.03
"""When arrivals exceed the supposed capacity by this factor, there is probably more: probe at once."""

_SETTLE_SHARE = 0.85
"""The part of the capacity that may pass after a probe without more arrivals, for as long as the probe took."""

_FALL_AT_LEAST = 0.95
_FALL_AT_MOST = 0.25
"""A late answer takes back between a twentieth and three quarters."""

_DRAIN_SECONDS = 0.4
"""Seconds in which a short queue is drained."""

_DRAIN_SECONDS_MAX = 4.0
_DRAIN_SHARE_MIN = 0.25
_DRAIN_SHARE_OF_TEST = 0.5
"""The most that passes, as part of what arrives, in a drain that tests whether the queue is ours."""

_LONG_SECONDS = 0.5
"""While a longer queue is drained, arrivals are the capacity."""

_EMPTY = 1.15
"""While a queue of ours is drained, more arrives than this many times what is let pass."""

_OURS = 0.7
"""If more than this part of a delay remains when our queue should be gone, the delay is not ours."""

_STARVED_SECONDS = 0.8
"""While delays are unknown: seconds of starved transfers after which arrivals count as the capacity."""

_ACCEPTED_SECONDS = 20.0
"""Seconds for which a delay that is not ours is accepted, until the next test."""

_JUDGED_SECONDS = 2.0
"""Seconds after a drain to wait for answers that show whether the queue was ours, while requests are open."""

_LOWER_SECONDS = 5.0
"""The accepted delay is at most the longest of the answers in this many seconds."""

_PASSED_SECONDS = 3.0
"""Before a queue was seen, what passed in this many seconds before the first late answer was within capacity."""

_DOUBTED_FALLS = 2
"""After more falls than this without a timely answer, the queue may not be ours."""

_SLOWED_SHARE = 0.9
_SLOWED_SECONDS = 1.0
_SLOWED_NO_PROBE_SECONDS = 5.0
"""When the origin asks for less (SlowDown): the part left, once in so many seconds, and seconds without probes."""


@dataclass(frozen=True, slots=True)
class SeenTraffic:
    """The observations of all processes in one direction.

    `arriving`: recent bytes per second through the link. `is_wanted`: pieces wait for the link, so more would be taken.
    `delay_seconds`: by how much even the earliest of the last answers were later than without a queue; None: unknown.
    `slack_seconds`: shorter delays do not count. `usual_seconds`: the time of an answer without a queue. `is_slowed`:
    the origin has asked for less. `is_starved`: nearly all transfers wait for bytes. `is_at_least`: the delay is that
    of requests without an answer yet, so it may grow.
    """

    now: float
    arriving: float
    is_wanted: bool
    delay_seconds: float | None
    slack_seconds: float
    usual_seconds: float = 0.0
    is_slowed: bool = False
    is_starved: bool = False
    is_at_least: bool = False


class _Phase(Enum):
    CRUISING = auto()
    PROBING = auto()
    SETTLING = auto()
    DRAINING = auto()


class CapacityController:
    """The controller of one direction. Call `decide` every TICK_SECONDS."""

    def __init__(self, capacity: float | None, now: float) -> None:
        """`capacity`: bytes per second, if found already; None: no queue was seen yet."""
        self.capacity = capacity
        self.heard_since = now
        """Earlier answers say nothing any more."""

        self._phase = _Phase.CRUISING
        self._since = self._seen_at = now
        self._until = now + _CRUISE_SECONDS
        self._gain = self._probe_seconds = 0.0
        self._accepted_seconds = self._accepted_until = 0.0
        self._delays = deque[tuple[float, float]]()
        """Since a delay was accepted: the delays of the last _LOWER_SECONDS."""

        self._falls = 0
        self._before_falls: float | None = None
        """The capacity before the first fall since the last timely answer."""

        self._slowed_until = 0.0
        self._arrived_lately = deque([0.0], maxlen=2)
        self._arrived_before = deque[float](maxlen=round(_PASSED_SECONDS / TICK_SECONDS))
        self._starved_since: float | None = None
        self._starved_bytes = 0.0
        self._before: float | None = None
        """The capacity before a drain that tests whether the queue is ours; None: no test."""

        self._judged: tuple[float, float] | None = None
        """After such a test: the delay and the capacity before it."""

        self._drained_ticks = self._wanted_ticks = 0
        """The ticks of a drain, and those with pieces waiting here."""

        self._queue_seconds = self._best = 0.0
        self._passing = UNLIMITED_BYTES_PER_SECOND if capacity is None else CRUISE_SHARE * capacity

    @property
    def rate(self) -> float:
        """Return the bytes per second that may pass now."""
        return max(FLOOR_BYTES_PER_SECOND, self._passing)

    def decide(self, seen: SeenTraffic) -> float:
        """Return the rate from now on, in bytes per second."""
        seen = self._without_guesses(seen)
        if seen.is_slowed and seen.now >= self._slowed_until:
            self._slow_down(seen)
        elif self.capacity is None:
            if self._is_late(seen) and seen.arriving > 0:
                passed = max(seen.arriving, FIRST_BYTES_PER_SECOND, *self._arrived_before)
                self.capacity = max(self._arriving(seen), FIRST_BYTES_PER_SECOND, _FALL_AT_MOST * passed)
                self._before_falls = passed
                self._drain(seen, self.capacity, is_doubted=True, before=passed)
            elif seen.is_starved and seen.delay_seconds is None:
                self._starve(seen, UNLIMITED_BYTES_PER_SECOND)
            else:
                self._starved_since = None
        elif min(seen.arriving, self._arrived_lately[-1]) > self.capacity and not self._is_late(seen):
            self._rise(seen, self.capacity)
        elif self._phase is _Phase.CRUISING:
            self._cruise(seen, self.capacity)
        elif self._phase is _Phase.PROBING:
            self._probe(seen, self.capacity)
        elif self._phase is _Phase.SETTLING:
            if seen.now >= self._until:
                self._begin_cruise(seen.now, self.capacity)
        else:
            self._empty(seen, self.capacity)
        self._seen_at = seen.now
        self._arrived_lately.append(seen.arriving)
        self._arrived_before.append(seen.arriving)
        return self.rate

    # Whether there is a queue

    def _accepted(self, now: float) -> float:
        if now >= self._accepted_until:
            self._accepted_seconds = 0.0
        return self._accepted_seconds

    def _without_guesses(self, seen: SeenTraffic) -> SeenTraffic:
        """Drop the delay of a request without an answer that is not late yet: it says nothing."""
        if not seen.is_at_least or seen.delay_seconds is None:
            return seen
        is_late = seen.delay_seconds - self._accepted(seen.now) > seen.slack_seconds
        return seen if is_late else replace(seen, delay_seconds=None, is_at_least=False)

    def _delay(self, seen: SeenTraffic) -> float | None:
        accepted = self._accepted(seen.now)
        return None if seen.delay_seconds is None else seen.delay_seconds - accepted

    def _is_late(self, seen: SeenTraffic) -> bool:
        delay = self._delay(seen)
        if delay is None or seen.delay_seconds is None:
            return False
        if delay > seen.slack_seconds:
            return True
        self._falls, self._before_falls = 0, None
        if self._accepted_seconds:
            self._lower_accepted(seen.now, seen.delay_seconds)
        return False

    def _accept(self, seen: SeenTraffic, delay: float) -> None:
        self._accepted_seconds, self._accepted_until = delay, seen.now + _ACCEPTED_SECONDS
        self._delays.clear()
        self._delays.append((seen.now, delay))

    def _lower_accepted(self, now: float, delay: float) -> None:
        """Lower the accepted delay to the longest of the last _LOWER_SECONDS."""
        while self._delays and self._delays[-1][1] <= delay:
            self._delays.pop()
        self._delays.append((now, delay))
        while self._delays[0][0] <= now - _LOWER_SECONDS:
            self._delays.popleft()
        self._accepted_seconds = min(self._accepted_seconds, self._delays[0][1])

    # What to do

    def _begin_cruise(self, now: float, capacity: float, seconds: float = _CRUISE_SECONDS) -> None:
        self._phase, self._since, self._until = _Phase.CRUISING, now, now + seconds
        self._passing = CRUISE_SHARE * capacity

    def _cruise(self, seen: SeenTraffic, capacity: float) -> None:
        if self._is_late(seen):
            if not self._is_excused(seen):
                self._fall(seen, capacity)
            return
        if seen.delay_seconds is not None:
            self._judged = None
        if seen.is_starved and not seen.is_wanted and seen.delay_seconds is None:
            self._starve(seen, capacity)
            return
        self._starved_since = None
        until = self._until if seen.delay_seconds is not None else self._until + _CRUISE_SECONDS
        if seen.is_wanted and seen.now >= max(until, self._slowed_until):
            self._begin_probe(seen, capacity)

    def _rise(self, seen: SeenTraffic, capacity: float) -> None:
        """Raise the capacity to arrivals above it: no more can arrive than the link carries."""
        if self._phase is _Phase.DRAINING:
            self._empty(seen, capacity)
            return
        self.capacity = min(seen.arriving, self._arrived_lately[-1], _RISE_AT_MOST * capacity)
        if seen.is_wanted and seen.now >= self._slowed_until and self.capacity > _WORTH_A_PROBE * capacity:
            self._begin_probe(seen, self.capacity)
        elif self._phase is _Phase.PROBING:
            self._probe(seen, self.capacity)
        else:
            self._begin_cruise(seen.now, self.capacity)

    def _is_excused(self, seen: SeenTraffic) -> bool:
        """Tell whether the delay is excused: it is not ours, or the test has no answers yet.

        It is not ours if answers are as late as before, though we had next to nothing under way a moment ago.
        """
        if self._judged is None or seen.delay_seconds is None:
            return False
        delay, before = self._judged
        if seen.delay_seconds < _OURS * delay and seen.is_at_least and seen.now < self.heard_since + _JUDGED_SECONDS:
            return True
        self._judged = None
        if seen.delay_seconds < _OURS * delay:
            return False
        self._accept(seen, seen.delay_seconds)
        self.capacity = before
        self._falls, self._before_falls = 0, None
        self._begin_cruise(seen.now, self.capacity)
        return True

    def _begin_probe(self, seen: SeenTraffic, capacity: float) -> None:
        self._probe_seconds = min(_PROBE_SECONDS + seen.usual_seconds, _PROBE_SECONDS_MAX)
        careful = min(_PROBE_GAIN_MAX, 1 + _PROBE_QUEUE_SECONDS / self._probe_seconds)
        self._gain = _PROBE_GAIN_MAX if self._phase is _Phase.PROBING else careful
        self._phase, self._since, self._until = _Phase.PROBING, seen.now, seen.now + self._probe_seconds
        self._passing = self._gain * capacity

    def _probe(self, seen: SeenTraffic, capacity: float) -> None:
        if self._is_late(seen):
            self._drain(seen, capacity, is_doubted=False)
        elif seen.now >= self._until - TICK_SECONDS / 2:
            self._phase, self._since, self._until = _Phase.SETTLING, seen.now, seen.now + self._probe_seconds
            self._passing = _SETTLE_SHARE * capacity

    def _starve(self, seen: SeenTraffic, capacity: float) -> None:
        """Take arrivals for the capacity while no answers show a queue, and transfers starve: the link is likely full.

        If the origin gives no more instead, little is lost: probes go on from there.
        """
        if self._starved_since is None:
            self._starved_since, self._starved_bytes = seen.now, 0.0
            return
        self._starved_bytes += seen.arriving * (seen.now - self._seen_at)
        seconds = seen.now - self._starved_since
        if seconds < _STARVED_SECONDS:
            return
        arriving, self._starved_since = self._starved_bytes / seconds, None
        if 0 < arriving < capacity:
            least = FIRST_BYTES_PER_SECOND if self.capacity is None else _FALL_AT_MOST * capacity
            self.capacity = max(arriving, least, FLOOR_BYTES_PER_SECOND)
            self._begin_cruise(seen.now, self.capacity)

    def _fall(self, seen: SeenTraffic, capacity: float) -> None:
        """React to late answers at a rate that the link should carry."""
        if seen.arriving <= 0:  # the origin is away, which says nothing about the link
            return
        self._falls += 1
        self._before_falls = max(self._before_falls or 0.0, capacity)
        arriving = self._arriving(seen)
        fallen = max(min(arriving, _FALL_AT_LEAST * capacity), _FALL_AT_MOST * capacity, FLOOR_BYTES_PER_SECOND)
        is_doubted = fallen < 0.9 * capacity or self._falls > _DOUBTED_FALLS
        self._drain(seen, fallen, is_doubted=is_doubted, before=self._before_falls)
        self.capacity = fallen

    def _drain(self, seen: SeenTraffic, capacity: float, *, is_doubted: bool, before: float | None = None) -> None:
        delay = max(self._delay(seen) or 0.0, TICK_SECONDS / 2)
        share = max(_DRAIN_SHARE_MIN, 1 - delay / _DRAIN_SECONDS)
        if is_doubted:
            share = min(share, _DRAIN_SHARE_OF_TEST)
        seconds = max(delay / (1 - share), _DRAIN_SECONDS if is_doubted else 0.0)
        self._phase, self._since = _Phase.DRAINING, seen.now
        self._until = seen.now + min(seconds, _DRAIN_SECONDS_MAX)
        self._before = before if is_doubted else None
        self._queue_seconds, self._best = (seen.delay_seconds or 0.0), 0.0
        if is_doubted:  # half of what arrives now; between bursts, next to nothing
            capacity = min(max(seen.arriving, _FALL_AT_MOST * capacity), capacity)
        self._passing = share * capacity
        self._drained_ticks = self._wanted_ticks = 0

    def _arriving(self, seen: SeenTraffic) -> float:
        """Return the latest arrivals, or the greater ones just before: bursts are not taken for less."""
        return max(seen.arriving, *self._arrived_lately)

    def _empty(self, seen: SeenTraffic, capacity: float) -> None:
        """Drain until the queue is gone."""
        passing, drained_seconds = self.rate, seen.now - self._since
        self._drained_ticks += 1
        self._wanted_ticks += seen.is_wanted
        is_queue = seen.arriving > _EMPTY * passing
        if drained_seconds >= 4 * TICK_SECONDS and is_queue:
            self._best = max(self._best, seen.arriving)
        if seen.now < self._until - TICK_SECONDS / 2:
            return
        if is_queue and drained_seconds < _DRAIN_SECONDS_MAX and passing < 0.7 * capacity:
            return
        is_less = 2 * self._wanted_ticks >= self._drained_ticks  # than would pass without us
        self._judged = None
        if self._before is not None and is_less and not is_queue:
            self._judged = self._queue_seconds, self._before
        if self._best and self._queue_seconds > _LONG_SECONDS:
            capacity = self._best
        self.capacity = capacity
        self.heard_since = seen.now + 1.5 * TICK_SECONDS + seen.usual_seconds
        self._begin_cruise(seen.now, capacity)

    def _slow_down(self, seen: SeenTraffic) -> None:
        """Lower the capacity, as the origin has asked for less. Not while little passes.

        That would not help, and if the link was never full, it is requests that are too many.
        """
        if self.capacity is None or seen.arriving < self.capacity / 2:
            return
        now = seen.now
        self.capacity = max(_SLOWED_SHARE * min(seen.arriving, self.capacity), FLOOR_BYTES_PER_SECOND)
        self._begin_cruise(now, self.capacity, _SLOWED_NO_PROBE_SECONDS)
        self._slowed_until = now + _SLOWED_SECONDS
        self._before_falls = self._judged = None
