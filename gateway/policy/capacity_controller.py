"""What the link to the origin bears, found out while it is used: decisions from what is seen ten times a second.

A link that is full has a queue, and a queue shows as delay. What arrives through a link that is full is what it bears.
So the controller lets pass a little less than that (CRUISING), and the queue is here, where shares are kept, and not in
the network. Now and then, while more is wanted, it lets pass more for a moment (PROBING): if more arrives, the link
bears more, and so on at once; if not, a little less passes for as long (SETTLING). When answers are late, it lets pass
much less until the queue is gone (DRAINING), and learns meanwhile what arrives. More can never arrive than the link
bears: what was found is raised to that at any time.

A delay may be none of ours: other traffic, or an origin that has become slower. That shows after a drain that lets
pass half of what arrives: if answers are as late as before, the delay is accepted, and what was taken back since the
first of them is given back. It stays accepted for its time, though some answers are earlier: an origin that is slow may
be so now and then. A request that has no answer yet shows that its answer is late, and never that it is not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum, auto

TICK_SECONDS = 0.1
"""From one decision to the next."""

UNLIMITED_BYTES_PER_SECOND = 1e12
"""The rate before any queue was seen: beyond every link, and small enough that sums of it stay exact."""

FLOOR_BYTES_PER_SECOND = 64 * 2**10
"""The least rate, as the least that can be configured: with less, connections look dead to origins and clients."""

FIRST_BYTES_PER_SECOND = 2**20
"""What is found first is no less: a few small requests say little about the link."""

CRUISE_SHARE = 0.97
"""Of what the link bears, so much is let pass: what bursts bring into its queue is gone in a moment."""

_CRUISE_SECONDS = 1.2
"""From one probe to the next; twice as long while nothing is known of delays."""

_PROBE_SECONDS = 0.5
_PROBE_SECONDS_MAX = 1.0
"""A probe lasts so long at least, and longer where answers take long: until what it brings was counted."""

_PROBE_QUEUE_SECONDS = 0.075
"""A probe that fails leaves a queue of so long at most; but one that follows a probe that has found more."""

_PROBE_GAIN_MAX = 1.25
_RISE_AT_MOST = 1.5
"""At once: what was held up somewhere, and then comes all together, is not taken for more than this."""

_WORTH_A_PROBE = 1.03
"""What arrives when so many times more does than was thought possible is likely not all yet: that is tried at once."""

_SETTLE_SHARE = 0.85
"""After a probe in which no more has arrived, so much is let pass for as long as it took."""

_FALL_AT_LEAST = 0.95
_FALL_AT_MOST = 0.25
"""A late answer takes back between a twentieth and three quarters."""

_DRAIN_SECONDS = 0.4
"""A queue is drained in so long, if it is short enough."""

_DRAIN_SECONDS_MAX = 4.0
_DRAIN_SHARE_MIN = 0.25
_DRAIN_SHARE_OF_TEST = 0.5
"""Of what arrives, so much is let pass at most when it is to be seen whether the queue is ours."""

_LONG_SECONDS = 0.5
"""While a queue that is longer is drained, what arrives is what the link bears."""

_EMPTY = 1.15
"""While a queue of ours is drained, more arrives than this many times what is let pass."""

_OURS = 0.7
"""A delay of which so much is left when our queue should be gone is not ours."""

_STARVED_SECONDS = 0.8
"""While nothing is known of delays: so long transfers get less than they may, until that is what the link bears."""

_ACCEPTED_SECONDS = 20.0
"""So long a delay that is not ours is accepted. Then it is looked at again."""

_JUDGED_SECONDS = 2.0
"""So long after a drain it is waited for answers that show whether the queue was ours, while requests wait for them."""

_LOWER_SECONDS = 5.0
"""What is accepted is no more than the latest that answers were in so long."""

_PASSED_SECONDS = 3.0
"""Before a queue was seen, what has passed in so long before the first late answer is what the link has borne."""

_DOUBTED_FALLS = 2
"""After so many falls without a timely answer between, it is doubted that the queue is ours."""

_SLOWED_SHARE = 0.9
_SLOWED_SECONDS = 1.0
_SLOWED_NO_PROBE_SECONDS = 5.0
"""When the origin asks for less (SlowDown): so much is left, once in so long, and nothing is tried for so long."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What all processes have seen of one direction.

    `arriving`: bytes per second through the link, lately. `is_wanted`: pieces wait for the link, so more would be
    taken. `delay_seconds`: by how much even the timeliest of the last answers were later than without a queue; None:
    not known. `slack_seconds`: a delay up to this is nothing. `usual_seconds`: how long an answer takes without a
    queue. `is_slowed`: the origin has asked for less. `is_starved`: nearly all transfers wait for bytes to arrive.
    `is_at_least`: the delay is that of requests which have no answer yet, so it may become longer.
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
    """One direction. `decide` is to be asked every TICK_SECONDS."""

    def __init__(self, capacity: float | None, now: float) -> None:
        """`capacity`: bytes per second, where it was found already; None: no queue was seen yet."""
        self.capacity = capacity
        self.heard_since = now
        """Answers that came before say nothing any more."""

        self._phase = _Phase.CRUISING
        self._since = self._seen_at = now
        self._until = now + _CRUISE_SECONDS
        self._gain = self._probe_seconds = 0.0
        self._accepted_seconds = self._accepted_until = 0.0
        self._delays = deque[tuple[float, float]]()
        """When a delay was accepted: those seen in the last _LOWER_SECONDS."""

        self._falls = 0
        self._before_falls: float | None = None
        """The capacity before the first fall since the last timely answer."""

        self._slowed_until = 0.0
        self._arrived_lately = deque([0.0], maxlen=2)
        self._arrived_before = deque[float](maxlen=round(_PASSED_SECONDS / TICK_SECONDS))
        self._starved_since: float | None = None
        self._starved_bytes = 0.0
        self._before: float | None = None
        """The capacity before a drain that is to show whether the queue is ours; None: that is not asked."""

        self._judged: tuple[float, float] | None = None
        """After a drain that was to show it: what the delay was before, and the capacity."""

        self._drained_ticks = self._wanted_ticks = 0
        """Of a drain, and those of them in which pieces waited here."""

        self._queue_seconds = self._best = 0.0
        self._passing = UNLIMITED_BYTES_PER_SECOND if capacity is None else CRUISE_SHARE * capacity

    @property
    def rate(self) -> float:
        """Bytes per second that may pass now."""
        return max(FLOOR_BYTES_PER_SECOND, self._passing)

    def decide(self, seen: Seen) -> float:
        """The rate from now on, in bytes per second."""
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

    def _without_guesses(self, seen: Seen) -> Seen:
        """A request that has no answer, and is not late yet, says nothing of when it comes."""
        if not seen.is_at_least or seen.delay_seconds is None:
            return seen
        is_late = seen.delay_seconds - self._accepted(seen.now) > seen.slack_seconds
        return seen if is_late else replace(seen, delay_seconds=None, is_at_least=False)

    def _delay(self, seen: Seen) -> float | None:
        accepted = self._accepted(seen.now)
        return None if seen.delay_seconds is None else seen.delay_seconds - accepted

    def _is_late(self, seen: Seen) -> bool:
        delay = self._delay(seen)
        if delay is None or seen.delay_seconds is None:
            return False
        if delay > seen.slack_seconds:
            return True
        self._falls, self._before_falls = 0, None
        if self._accepted_seconds:
            self._lower_accepted(seen.now, seen.delay_seconds)
        return False

    def _accept(self, seen: Seen, delay: float) -> None:
        self._accepted_seconds, self._accepted_until = delay, seen.now + _ACCEPTED_SECONDS
        self._delays.clear()
        self._delays.append((seen.now, delay))

    def _lower_accepted(self, now: float, delay: float) -> None:
        """To the latest that was seen lately."""
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

    def _cruise(self, seen: Seen, capacity: float) -> None:
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

    def _rise(self, seen: Seen, capacity: float) -> None:
        """More arrives than was thought possible; it cannot be more than the link bears."""
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

    def _is_excused(self, seen: Seen) -> bool:
        """Whether answers are as late as before, though next to nothing of ours was under way a moment ago: then the
        delay is not ours, and is accepted. Or whether that is not to be known before there are answers."""
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

    def _begin_probe(self, seen: Seen, capacity: float) -> None:
        self._probe_seconds = min(_PROBE_SECONDS + seen.usual_seconds, _PROBE_SECONDS_MAX)
        careful = min(_PROBE_GAIN_MAX, 1 + _PROBE_QUEUE_SECONDS / self._probe_seconds)
        self._gain = _PROBE_GAIN_MAX if self._phase is _Phase.PROBING else careful
        self._phase, self._since, self._until = _Phase.PROBING, seen.now, seen.now + self._probe_seconds
        self._passing = self._gain * capacity

    def _probe(self, seen: Seen, capacity: float) -> None:
        if self._is_late(seen):
            self._drain(seen, capacity, is_doubted=False)
        elif seen.now >= self._until - TICK_SECONDS / 2:
            self._phase, self._since, self._until = _Phase.SETTLING, seen.now, seen.now + self._probe_seconds
            self._passing = _SETTLE_SHARE * capacity

    def _starve(self, seen: Seen, capacity: float) -> None:
        """No answers tell of a queue, and transfers get less than they may: the link bears no more, most likely. Should
        it be the origin that gives no more, then little is lost: probes go on from there."""
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

    def _fall(self, seen: Seen, capacity: float) -> None:
        """Answers are late though the rate should have been borne."""
        if seen.arriving <= 0:  # the origin is away: that says nothing about the link
            return
        self._falls += 1
        self._before_falls = max(self._before_falls or 0.0, capacity)
        arriving = self._arriving(seen)
        fallen = max(min(arriving, _FALL_AT_LEAST * capacity), _FALL_AT_MOST * capacity, FLOOR_BYTES_PER_SECOND)
        is_doubted = fallen < 0.9 * capacity or self._falls > _DOUBTED_FALLS
        self._drain(seen, fallen, is_doubted=is_doubted, before=self._before_falls)
        self.capacity = fallen

    def _drain(self, seen: Seen, capacity: float, *, is_doubted: bool, before: float | None = None) -> None:
        delay = max(self._delay(seen) or 0.0, TICK_SECONDS / 2)
        share = max(_DRAIN_SHARE_MIN, 1 - delay / _DRAIN_SECONDS)
        if is_doubted:
            share = min(share, _DRAIN_SHARE_OF_TEST)
        seconds = max(delay / (1 - share), _DRAIN_SECONDS if is_doubted else 0.0)
        self._phase, self._since = _Phase.DRAINING, seen.now
        self._until = seen.now + min(seconds, _DRAIN_SECONDS_MAX)
        self._before = before if is_doubted else None
        self._queue_seconds, self._best = (seen.delay_seconds or 0.0), 0.0
        if is_doubted:  # half of what arrives now; between bursts, next to nothing does
            capacity = min(max(seen.arriving, _FALL_AT_MOST * capacity), capacity)
        self._passing = share * capacity
        self._drained_ticks = self._wanted_ticks = 0

    def _arriving(self, seen: Seen) -> float:
        """In the last moments: what comes in bursts is not taken for less."""
        return max(seen.arriving, *self._arrived_lately)

    def _empty(self, seen: Seen, capacity: float) -> None:
        """Until the queue is gone."""
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

    def _slow_down(self, seen: Seen) -> None:
        """The origin has asked for less; where next to nothing passes, less of it is no help, and where the link was
        never full, it is requests that are too many."""
        if self.capacity is None or seen.arriving < self.capacity / 2:
            return
        now = seen.now
        self.capacity = max(_SLOWED_SHARE * min(seen.arriving, self.capacity), FLOOR_BYTES_PER_SECOND)
        self._begin_cruise(now, self.capacity, _SLOWED_NO_PROBE_SECONDS)
        self._slowed_until = now + _SLOWED_SECONDS
        self._before_falls = self._judged = None
