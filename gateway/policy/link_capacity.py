"""The capacity of the link in one direction, found by all processes together: each reports what it sees, one decides.

Every TICK_SECONDS each process writes into cells of its own, for each direction:

    arrived, at         all bytes that came through the link, and when they were counted
    unacknowledged      bytes handed over for sending that the origin's machine has not acknowledged
    base[kind]          the least recent time from the last byte of a request to an answer of a kind
    jitter              the difference of that between one tick and the next
    late[n]: at, by, of the last SAMPLES ticks with answers: when, the delay of the earliest, their number
    waiting, by         the requests without an answer that are late already, and their least delay
    bodies, starved     the transfers under way, and those of them that wait for bytes
    slowed              the number of times that the origin has asked for less
    found, delay, at    the last decision of this process, and when it was made

The process that leads (`Leadership`) adds it up, asks its `CapacityController`, and changes the rate of the bucket
that all share. A new leader goes on from the last decision.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.origin.traffic_meter import AnswerKind, Traffic
from gateway.policy.capacity_controller import TICK_SECONDS, CapacityController, SeenTraffic
from gateway.policy.fair_shares import FairShares
from gateway.policy.token_bucket import TokenBucket
from gateway.shared.arena import SharedCells

BASE_SECONDS = 30.0
"""The least time of an answer is taken over one to two spans of this length that had answers."""

SLACK_SECONDS_MIN = 0.04
SLACK_SECONDS_MAX = 0.08
_SLACK_JITTERS = 2.0
"""Shorter delays do not count, nor ones below this many times the jitter."""

_JITTER_PART = 1 / 16
"""The weight of a new difference, as RFC 3550 (6.4.1) smooths the jitter of packets."""

ARRIVING_SECONDS = 0.3
"""Arrivals are averaged over this time."""

BUSY_SECONDS = 0.3
"""The most that a busy process's reports are late; a later one moves nothing."""

_ARRIVALS_KEPT = 10

_STANDING_SECONDS = 0.3
"""A queue is no burst when all answers of this time were late (as CoDel takes the least of a span, RFC 8289)."""

_ANSWERS_MIN = 3
"""The fewest late answers that count; two suffice if twice as late, one if three times and less arrives than may."""

_IDLE_SHARE = 0.75

_ANSWERS_SECONDS = 1.0
"""Older answers say nothing."""

_FRESH_SECONDS = 3.0
"""Reports of a process without newer ones expire after this time."""

_UNACKNOWLEDGED_BASE_SECONDS_MAX = 0.05
"""Before a shorter time was seen, sending without a queue is taken to last at most this long."""

_UNACKNOWLEDGED_BYTES_MIN = 128 * 1024
"""Less than this is no queue of bodies."""

SENDING_SECONDS = 0.1
"""Bytes handed over in pieces wait this long in the connections' own buffers, which are no queue of the link."""

_STARVED_PART = 0.7
"""If this part of the transfers waits for bytes, they wait for the link or for the origin."""

WINDOW_QUEUE_SECONDS = 0.08
WINDOW_BYTES_MIN = 16 * 1024
"""All connections together may have as many bytes under way as the link carries in the time of an answer and this time
more; each has at least this minimum."""

SAMPLES = 4

_FIRST_ROWS = 13
(
    _ARRIVED,
    _ARRIVED_AT,
    _UNACKNOWLEDGED,
    _JITTER,
    _SLOWED,
    _FOUND,
    _DELAY,
    _FOUND_AT,
    _NEXT_SAMPLE,
    _WAITING,
    _WAITING_LATE,
    _BODIES,
    _STARVED,
) = range(_FIRST_ROWS)
_FIRST_BASE = _FIRST_ROWS
_LATE = _FIRST_BASE + len(AnswerKind)
ROWS_OF_LINK_CAPACITY = _LATE + 3 * SAMPLES
"""Rows for one direction."""


ROWS_OF_LEADERSHIP = 1
"""The beats: of `Clock.monotonic`, a cell for each process."""

BEAT_SECONDS = 0.1
"""Seconds within which every process must call `leads` again."""

LOST_SECONDS = 0.6
"""A process without a beat for this long does not lead. It is several beats, so that a busy event loop does not lose
its place, and short enough that a lost process is replaced within a second."""


class Leadership:
    """Chooses the process that decides for all: the running one with the lowest number. `row` has the beats.

    There is no election and no lock: a process that finds no fresh beat of a lower number leads. So a leader that is
    stopped or killed is replaced LOST_SECONDS after its last beat. For a moment two may lead, when one comes back or a
    new one begins: a leader's decisions must do no harm when two make them.
    """

    def __init__(self, cells: SharedCells, row: int) -> None:
        self._beats = cells.numbers(row)
        self._own = cells.own
        self._led_at: float | None = None
        self.leads_since = 0.0
        """When this process began to lead, while it does. A leader that was away begins anew: what it remembers from
        before says nothing about now."""

    def leads(self, now: float) -> bool:
        """Return whether this process decides now. The call is its beat: only a process that decides counts."""
        self._beats[self._own] = now
        lost = now - LOST_SECONDS
        if any(beat > lost for beat in self._beats[: self._own]):
            self._led_at = None
            return False
        if self._led_at is None or self._led_at < lost:
            self.leads_since = now
        self._led_at = now
        return True


@dataclass(slots=True)
class _Answers:
    """The answers of one kind since the last tick, and the least times before."""

    count: int = 0
    least: float = math.inf
    before: float = 0.0
    """The least time of the previous tick with answers."""

    of_span: float = math.inf
    of_span_before: float = math.inf
    span_until: float = 0.0

    @property
    def base(self) -> float:
        return min(self.of_span, self.of_span_before)

    def add(self, seconds: float) -> None:
        self.count += 1
        if seconds < self.least:
            self.least = seconds

    def end_tick(self, now: float) -> None:
        """Learn the usual time; only call it after a tick with answers."""
        if now >= self.span_until:
            self.of_span_before, self.of_span, self.span_until = self.of_span, math.inf, now + BASE_SECONDS
        self.of_span = min(self.of_span, self.least)


@dataclass(frozen=True, slots=True)
class FoundCapacity:
    """The last decision: capacity in bytes per second (None: no queue seen), and delay of answers then (or None)."""

    capacity: float | None
    delay_seconds: float | None


class LinkCapacity:
    """One direction, as one process sees it. The cells begin at row `first_row` of `cells`."""

    def __init__(
        self,
        cells: SharedCells,
        first_row: int,
        bucket: TokenBucket,
        shares: FairShares,
        kinds: Sequence[AnswerKind],
    ) -> None:
        self._cells = cells
        self._own = cells.own
        self._first_row = first_row
        self.bucket = bucket
        self._shares = shares
        self._answers = {kind: _Answers() for kind in kinds}
        self._slowed = 0
        self._jitter = 0.0
        self._arrivals: list[deque[tuple[float, int]]] = [deque(maxlen=_ARRIVALS_KEPT) for _ in range(cells.processes)]
        self._unacknowledged: deque[float] = deque(maxlen=3)
        self._unacknowledged_base = _UNACKNOWLEDGED_BASE_SECONDS_MAX
        self._controller: CapacityController | None = None
        self._slowed_before = 0
        self._led_since = -1.0

    # What this process has seen

    def answered(self, kind: AnswerKind, seconds: float) -> None:
        """Note the seconds from the last byte of a request to the beginning of its answer."""
        self._answers[kind].add(seconds)

    def slowed(self) -> None:
        """Note that the origin has asked for less."""
        self._slowed += 1

    def tell(self, traffic: Traffic, now: float, late_seconds: float = 0.0) -> None:
        """Report traffic since the last call; this process was busy for `late_seconds`, so answers look later."""
        own = self._own
        self._numbers(_ARRIVED_AT)[own] = now
        self._whole(_ARRIVED)[own] = traffic.arrived_bytes
        self._whole(_UNACKNOWLEDGED)[own] = traffic.unacknowledged_bytes
        self._whole(_SLOWED)[own] = self._slowed
        self._whole(_BODIES)[own] = traffic.bodies + len(traffic.waiting)
        self._whole(_STARVED)[own] = traffic.starved_bodies
        late, count = math.inf, 0
        for kind, answers in self._answers.items():
            if answers.count:
                answers.end_tick(now)
                self._numbers(_FIRST_BASE + kind)[own] = answers.base
                late, count = min(late, answers.least - self._base(kind, now)), count + answers.count
                self._learn_jitter(answers)
        if count:
            self._write_sample(now, max(0.0, late - late_seconds), count)
        slack, waiting = self.slack_seconds(now), list[float]()
        for kind, seconds in traffic.waiting:
            base = self._base(kind, now)
            if base and seconds - base - late_seconds > slack:
                waiting.append(seconds - base - late_seconds)
        self._numbers(_WAITING_LATE)[own] = min(waiting, default=0.0)
        self._whole(_WAITING)[own] = len(waiting)

    def _learn_jitter(self, answers: _Answers) -> None:
        if answers.before:
            difference = min(abs(answers.least - answers.before), SLACK_SECONDS_MAX)
            self._jitter += (difference - self._jitter) * _JITTER_PART
            self._numbers(_JITTER)[self._own] = self._jitter
        answers.before, answers.count, answers.least = answers.least, 0, math.inf

    def _write_sample(self, now: float, late: float, count: int) -> None:
        number = self._whole(_NEXT_SAMPLE)[self._own] % SAMPLES
        row = _LATE + 3 * number
        self._numbers(row)[self._own] = 0.0  # so that no process takes the sample for whole meanwhile
        self._numbers(row + 1)[self._own] = late
        self._whole(row + 2)[self._own] = count
        self._numbers(row)[self._own] = now
        self._whole(_NEXT_SAMPLE)[self._own] = number + 1

    # What all have seen

    def slack_seconds(self, now: float) -> float:
        """Return the delay below which an answer is not late."""
        jitter = max(self._fresh(_JITTER, now), default=0.0)
        return min(max(SLACK_SECONDS_MIN, _SLACK_JITTERS * jitter), SLACK_SECONDS_MAX)

    def _base(self, kind: AnswerKind, now: float) -> float:
        """Return the least time of an answer; 0: unknown."""
        return min(filter(None, self._fresh(_FIRST_BASE + kind, now)), default=0.0)

    def _fresh_whole(self, row: int, now: float) -> list[int]:
        told_at = self._numbers(_ARRIVED_AT)
        return [one for one, at in zip(self._whole(row), told_at, strict=True) if now - at < _FRESH_SECONDS]

    def _fresh(self, row: int, now: float) -> list[float]:
        told_at = self._numbers(_ARRIVED_AT)
        return [one for one, at in zip(self._numbers(row), told_at, strict=True) if now - at < _FRESH_SECONDS]

    def arriving(self, now: float) -> float:
        """Return the bytes per second over the last ARRIVING_SECONDS. Call it every TICK_SECONDS.

        Reports from different times are brought to the same time: one process that moves most of the bytes now, and
        another that did a moment ago, are not added up.
        """
        counts, times = self._whole(_ARRIVED), self._numbers(_ARRIVED_AT)
        turning = []
        for process, seen in enumerate(self._arrivals):
            at, count = times[process], counts[process]
            if now - at > 2 * TICK_SECONDS + BUSY_SECONDS or (seen and count < seen[-1][1]):
                seen.clear()
                continue
            if not seen or at > seen[-1][0]:
                seen.append((at, count))
            if len(seen) > 1:
                turning.append(seen)
        if not turning:
            return 0.0
        end = min(seen[-1][0] for seen in turning)
        begin = end - ARRIVING_SECONDS
        total = sum(_count_at(seen, end) - _count_at(seen, begin) for seen in turning)
        return total / ARRIVING_SECONDS

    def delay_seconds(self, now: float, since: float, *, is_idle: bool) -> tuple[float, bool] | None:
        """Return the earliest of the last answers' delays; None: too few since `since`.

        True with it: it is that of a request without an answer, and may grow. `is_idle`: less arrives than may, though
        nothing waits here. Then one very late answer will do.
        """
        slack = self.slack_seconds(now)
        oldest, late, found = max(now - _ANSWERS_SECONDS, since), math.inf, 0
        samples = []
        for number in range(SAMPLES):
            row = _LATE + 3 * number
            rows = self._numbers(row), self._numbers(row + 1), self._whole(row + 2)
            samples += [one for one in zip(*rows, strict=True) if oldest < one[0] <= now + TICK_SECONDS]
        for at, by, count in sorted(samples, reverse=True):
            if found >= _ANSWERS_MIN and at < now - _STANDING_SECONDS:
                break
            late, found = min(late, by), found + count
        answered = late
        if found < _ANSWERS_MIN:  # requests without an answer are at least this late
            for count, by in zip(self._fresh_whole(_WAITING, now), self._fresh(_WAITING_LATE, now), strict=True):
                if count:
                    late, found = min(late, by), found + count
        if found >= _ANSWERS_MIN or (found == 2 and late > 2 * slack) or (found == 1 and is_idle and late > 3 * slack):
            return late, late < answered
        return None

    def _sending_delay(self, arriving: float) -> float | None:
        """Return by how much sending takes longer than without a queue (Little's law); None: nothing is under way."""
        total = sum(self._whole(_UNACKNOWLEDGED))
        if total < _UNACKNOWLEDGED_BYTES_MIN or arriving <= 0:
            self._unacknowledged.clear()
            return None
        self._unacknowledged.append(total / arriving)
        if len(self._unacknowledged) < 3:
            return None
        least = min(self._unacknowledged)
        self._unacknowledged_base = min(self._unacknowledged_base, least)
        return least - self._unacknowledged_base

    # What follows

    def decide(self, now: float, leadership: Leadership) -> None:
        """Change the rate for all processes. Only the process that leads may call it."""
        controller = self._controller
        if controller is None or self._led_since != leadership.leads_since:
            self._led_since, self._slowed_before = leadership.leads_since, sum(self._whole(_SLOWED))
            controller = self._controller = CapacityController(self.found(now).capacity, now)
            for seen in self._arrivals:
                seen.clear()
        arriving, slowed = self.arriving(now), sum(self._whole(_SLOWED))
        is_wanted = self._shares.is_contended(now)
        is_idle = not is_wanted and arriving < _IDLE_SHARE * controller.rate
        late = self.delay_seconds(now, controller.heard_since, is_idle=is_idle)
        delay, is_at_least = (None, False) if late is None else late
        sending = self._sending_delay(arriving)
        if sending is not None and sending > SENDING_SECONDS:
            sending -= SENDING_SECONDS
            if delay is None or sending > delay:
                delay, is_at_least = sending, False
        usual = max((self._base(kind, now) for kind in self._answers), default=0.0)
        rate = controller.decide(
            SeenTraffic(
                now,
                arriving,
                is_wanted,
                delay,
                self.slack_seconds(now),
                usual,
                slowed > self._slowed_before,
                self._is_starved(now),
                is_at_least,
            )
        )
        self._slowed_before = slowed
        own = self._own
        self._numbers(_FOUND)[own] = controller.capacity or 0.0
        self._numbers(_DELAY)[own] = -1.0 if delay is None else delay
        self._numbers(_FOUND_AT)[own] = now
        if rate != self.bucket.rate:
            self.bucket.change_rate(rate, now)

    def window_bytes(self, now: float) -> int | None:
        """Return the bytes that may be under way on each connection; None: nothing limits it.

        Unread bytes stay in the sender's and receiver's buffers, which hold many times what a link carries in the
        travel time of a byte: they would fill the link's queue, however slowly the process reads.
        """
        capacity = self.found(now).capacity
        usual = max((self._base(kind, now) for kind in self._answers), default=0.0)
        if capacity is None or not usual:
            return None
        bodies = max(1, sum(self._fresh_whole(_BODIES, now)))
        return max(WINDOW_BYTES_MIN, round(capacity * (usual + WINDOW_QUEUE_SECONDS) / bodies))

    def _is_starved(self, now: float) -> bool:
        bodies = sum(self._fresh_whole(_BODIES, now))
        return bodies > 0 and sum(self._fresh_whole(_STARVED, now)) >= _STARVED_PART * bodies

    def found(self, now: float) -> FoundCapacity:
        times = self._numbers(_FOUND_AT).tolist()
        at = max(times)
        if not at:
            return FoundCapacity(None, None)
        process = times.index(at)
        capacity, delay = self._numbers(_FOUND)[process], self._numbers(_DELAY)[process]
        return FoundCapacity(capacity or None, None if delay < 0 or now - at > _FRESH_SECONDS else delay)

    def _numbers(self, row: int) -> memoryview[float]:
        return self._cells.numbers(self._first_row + row)

    def _whole(self, row: int) -> memoryview[int]:
        return self._cells.whole_numbers(self._first_row + row)


def _count_at(seen: Sequence[tuple[float, int]], at: float) -> float:
    """Return the count at a moment, as if bytes had come steadily between the two counts around it."""
    after = bisect_left(seen, at, key=lambda one: one[0])
    if after == 0:
        return seen[0][1]
    if after == len(seen):
        return seen[-1][1]
    (begin, before), (end, behind) = seen[after - 1], seen[after]
    return before + (behind - before) * (at - begin) / (end - begin)
