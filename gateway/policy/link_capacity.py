"""What the link bears in one direction, found out by all processes together: each tells what it sees, one decides.

Every TICK_SECONDS each process writes into cells of its own, for each direction:

    arrived, at         bytes that came through the link in all, and when that was counted
    unacknowledged      bytes handed over to be sent, of which the origin's machine has not said that it has them
    base[kind]          the least time that an answer of a kind has taken lately, from the last byte of its request on
    jitter              by how much that of one tick differs from that of the next
    late[n]: at, by, of the last SAMPLES ticks with answers: when, how late the timeliest was, how many there were
    waiting, by         the requests that have no answer and are late already, and by how much they are at least
    bodies, starved     how many transfers are under way, and how many of them wait for bytes
    slowed              how often the origin has asked for less
    found, delay, at    what this process has decided, when it did last

The process that leads (leadership.py) adds it up, asks its `CapacityController`, and changes the rate of the bucket
that all share. Who begins to lead goes on from what was decided last.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.origin.link_traffic import AnswerKind, Traffic
from gateway.policy.capacity_controller import TICK_SECONDS, UNLIMITED_BYTES_PER_SECOND, CapacityController, Seen
from gateway.policy.fair_shares import FairShares
from gateway.policy.leadership import Leadership
from gateway.policy.token_bucket import AdjustableBucket, SharedCells

BASE_SECONDS = 30.0
"""The least time of an answer is that of the last one to two spans of so long in which there were any."""

SLACK_SECONDS_MIN = 0.04
SLACK_SECONDS_MAX = 0.08
_SLACK_JITTERS = 2.0
"""What is late by less than this, or than so many times the jitter, is not late."""

_JITTER_PART = 1 / 16
"""Of a new difference, as RFC 3550 (6.4.1) smooths the jitter of packets."""

ARRIVING_SECONDS = 0.3
"""Over so long what arrives is averaged."""

BUSY_SECONDS = 0.3
"""A process that is busy tells things so late, at most; one that is later moves nothing."""

_ARRIVALS_KEPT = 10

_STANDING_SECONDS = 0.3
"""A queue is no burst when all answers of so long a time were late (as CoDel takes the least of a span, RFC 8289)."""

_ANSWERS_MIN = 3
"""So many answers, at least, must have been late; two where both were by twice as much, one by three times where less
arrives than may."""

_IDLE_SHARE = 0.75

_ANSWERS_SECONDS = 1.0
"""What is older says nothing."""

_FRESH_SECONDS = 3.0
"""What a process has told that has not told anything for so long is out of date."""

_UNACKNOWLEDGED_BASE_SECONDS_MAX = 0.05
"""What is on its way to the origin without a queue takes no longer to send, as long as nothing else is known."""

_UNACKNOWLEDGED_BYTES_MIN = 128 * 1024
"""Less than this is no queue of bodies."""

SENDING_SECONDS = 0.1
"""What is handed over in pieces waits so long in the connections' own buffers, which are no queue of the link."""

_STARVED_PART = 0.7
"""Where so many of the transfers wait for bytes, they wait for the link or for the origin."""

WINDOW_QUEUE_SECONDS = 0.08
WINDOW_BYTES_MIN = 16 * 1024
"""All connections together may have so much under way as the link carries in the time of an answer, and in so long
besides; none has less than this."""

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
"""For one direction."""


@dataclass(slots=True)
class _Answers:
    """Those of one kind since the last tick, and the least times before."""

    count: int = 0
    least: float = math.inf
    before: float = 0.0
    """The least time of the tick before that had any."""

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
        """Learn what is usual. Only to be asked where there are any."""
        if now >= self.span_until:
            self.of_span_before, self.of_span, self.span_until = self.of_span, math.inf, now + BASE_SECONDS
        self.of_span = min(self.of_span, self.least)


@dataclass(frozen=True, slots=True)
class Found:
    """What was found last: bytes per second that the link bears (None: no queue was seen yet), and how late answers
    were then (None: not known)."""

    capacity: float | None
    delay_seconds: float | None


class LinkCapacity:
    """One direction, as one process sees it. The cells begin at row `first_row` of `cells`."""

    def __init__(
        self,
        cells: SharedCells,
        first_row: int,
        bucket: AdjustableBucket,
        shares: FairShares,
        kinds: Sequence[AnswerKind],
    ) -> None:
        self._cells = cells
        self._own = cells.own
        self._first_row = first_row
        self._bucket = bucket
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
        """An answer has begun so long after the last byte of its request."""
        self._answers[kind].add(seconds)

    def slowed(self) -> None:
        """The origin has asked for less."""
        self._slowed += 1

    def tell(self, traffic: Traffic, now: float, late_seconds: float = 0.0) -> None:
        """Write down what was seen since the last time; this process has been busy for `late_seconds` of it, by which
        answers look later than they were."""
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
        self._numbers(row)[self._own] = 0.0  # nobody takes it for whole meanwhile
        self._numbers(row + 1)[self._own] = late
        self._whole(row + 2)[self._own] = count
        self._numbers(row)[self._own] = now
        self._whole(_NEXT_SAMPLE)[self._own] = number + 1

    # What all have seen

    def slack_seconds(self, now: float) -> float:
        """An answer that is late by less is not late."""
        jitter = max(self._fresh(_JITTER, now), default=0.0)
        return min(max(SLACK_SECONDS_MIN, _SLACK_JITTERS * jitter), SLACK_SECONDS_MAX)

    def _base(self, kind: AnswerKind, now: float) -> float:
        """The least time of an answer; 0: not known."""
        return min(filter(None, self._fresh(_FIRST_BASE + kind, now)), default=0.0)

    def _fresh_whole(self, row: int, now: float) -> list[int]:
        told_at = self._numbers(_ARRIVED_AT)
        return [one for one, at in zip(self._whole(row), told_at, strict=True) if now - at < _FRESH_SECONDS]

    def _fresh(self, row: int, now: float) -> list[float]:
        told_at = self._numbers(_ARRIVED_AT)
        return [one for one, at in zip(self._numbers(row), told_at, strict=True) if now - at < _FRESH_SECONDS]

    def arriving(self, now: float) -> float:
        """Bytes per second, over ARRIVING_SECONDS until just now. To be asked every TICK_SECONDS.

        What the processes have told at different times is taken at the same: one that moves most of the bytes now, and
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
        """By how much even the timeliest of the last answers was late, and whether that is of a request which has none
        yet, so that it may become more; None: there were too few since `since`.

        `is_idle`: less arrives than may, though nothing waits here. Then one very late answer will do.
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
        if found < _ANSWERS_MIN:  # what has no answer yet is at least so late
            for count, by in zip(self._fresh_whole(_WAITING, now), self._fresh(_WAITING_LATE, now), strict=True):
                if count:
                    late, found = min(late, by), found + count
        if found >= _ANSWERS_MIN or (found == 2 and late > 2 * slack) or (found == 1 and is_idle and late > 3 * slack):
            return late, late < answered
        return None

    def _sending_delay(self, arriving: float) -> float | None:
        """By how much what is on its way takes longer than without a queue (Little's law); None: nothing is."""
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
        """Change the rate that all keep to. Only for the process that leads."""
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
            Seen(
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
        if rate != self._bucket.rate:
            self._bucket.change_rate(rate, now)

    def window_bytes(self, now: float) -> int | None:
        """How much may be on its way to each connection; None: nothing limits it.

        What this process does not read soon stays in the sender's and receiver's buffers, which hold many times what a
        link carries in the time that a byte takes: they would fill the link's queue, however slowly is read.
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

    def found(self, now: float) -> Found:
        times = self._numbers(_FOUND_AT).tolist()
        at = max(times)
        if not at:
            return Found(None, None)
        process = times.index(at)
        capacity, delay = self._numbers(_FOUND)[process], self._numbers(_DELAY)[process]
        return Found(capacity or None, None if delay < 0 or now - at > _FRESH_SECONDS else delay)

    def go_on_from(self, before: LinkCapacity, now: float) -> None:
        """The settings have changed, and with them the memory: what was found before counts still."""
        found = before.found(now)
        if found.capacity is None or self.found(now).capacity is not None:
            return
        own = self._own
        self._numbers(_FOUND)[own] = found.capacity
        self._numbers(_DELAY)[own] = -1.0 if found.delay_seconds is None else found.delay_seconds
        self._numbers(_FOUND_AT)[own] = now
        for kind, answers in before._answers.items():
            if kind in self._answers and math.isfinite(answers.base):
                self._answers[kind] = answers
                self._numbers(_FIRST_BASE + kind)[own] = answers.base
        self._bucket.change_rate(CapacityController(found.capacity, now).rate, now)

    def _numbers(self, row: int) -> memoryview[float]:
        return self._cells.numbers(self._first_row + row)

    def _whole(self, row: int) -> memoryview[int]:
        return self._cells.whole_numbers(self._first_row + row)


def _count_at(seen: Sequence[tuple[float, int]], at: float) -> float:
    """What was counted at a moment, as if it had come steadily between the times at which it was counted."""
    after = bisect_left(seen, at, key=lambda one: one[0])
    if after == 0:
        return seen[0][1]
    if after == len(seen):
        return seen[-1][1]
    (begin, before), (end, behind) = seen[after - 1], seen[after]
    return before + (behind - before) * (at - begin) / (end - begin)


def unlimited_bucket(cells: SharedCells, row: int) -> AdjustableBucket:
    """The bucket whose rate is found out: nothing is held back before anything was found."""
    return cells.adjustable_bucket(row, UNLIMITED_BYTES_PER_SECOND)
