"""Finds out how many requests an origin takes before it refuses some for their number, and shares them among slots.

Until a request was refused for that, nothing is held back and nothing is counted. With the first refusal the prefix of
the bucket gets a *rate*, for reads and writes apart: for a moment the gateway measures how many requests the origin
takes, and from then on so many pass, from one slot after the other by their weights (fair_shares.py, with requests in
place of bytes). A further refusal cuts the rate, which then grows again: soon to nearly what was refused, slowly past
it, and ever faster beyond (the cubic curve of TCP, and of the adaptive retries of AWS's SDKs). A rate that no request
has had to wait for in KEPT_SECONDS is forgotten.

Some origins limit prefixes, some whole buckets, and none says which. When two prefixes of a bucket are refused within a
moment, the bucket gets a rate as a whole. From then on refusals under one prefix alone, while others send as well,
suggest a limit of that prefix, which then gets a rate of its own too; the bucket's is cut when several are refused.

All processes keep the rates together, in PLACES_MAX places, in cells that have one writer each (shared/arena.py). No
process decides for the others: a rate follows from its *course*, the last that any process has begun.

    told[p]        counts process p's changes of claims: others look at those again
    claim[n][p]    the rate that process p believes to be in place n, and since when; the latest counts
    family[n][p]   the bucket of that rate
    course[n][p]   a moment, and the rate that was refused then, or that holds from then on; the latest counts
    needed[n][p]   when a request has last waited in process p, or was refused
    sent[n][p], refused[n][p]  requests sent while it was measured, and refused since the course began
    refused_at[n][p], refused_of[n][p]  the time of the last refusal, and its prefix

A claim and a course are one word each, so none is ever half written. The cells of a process that is stopped or killed
stay true, or others overrule them within a moment.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b

import structlog

from gateway.core.clock import Clock
from gateway.core.errors import OriginBusy
from gateway.origin.client import Direction, OriginRequest, Purpose, turn_seconds
from gateway.origin.traffic_meter import rank_of
from gateway.policy.bandwidth import Link, RateLimiter
from gateway.policy.fair_shares import FairShares, rows_of
from gateway.policy.token_bucket import ROWS_OF_BUCKET, TokenBucket
from gateway.shared.arena import Numbering, SharedCells
from gateway.telemetry import metrics
from gateway.telemetry.logs import RateLimitedLog
from gateway.telemetry.metric_kinds import UNTOLD_BUCKETS

PLACES_MAX = 32
"""The most rates at a time."""

MEMORY_BYTES_MAX = 16 * 1024**2
"""The memory of all rates: with thousands of slots in dozens of processes there are fewer."""

MEASURED_SECONDS = 0.5
MEASURED_SECONDS_MAX = 1.5
"""After the first refusal, the gateway measures for this long what the origin takes; longer if it takes next to
nothing: it may count by the second, and begin anew with the next."""

SPAN_SECONDS = 0.5
"""A rate is cut at most once in this time: later refusals may be for requests sent before."""

KEPT = 0.8
"""The part of a rate that is left when it is cut."""

GROWTH_SECONDS = 8.0
"""Seconds from a cut until the rate is again what was refused. Four times as much takes 28 s, a hundred times 71 s."""

LULL_SECONDS = 1.0
"""A rate without waiting requests for this long does not grow beyond what the origin is known to take."""

KEPT_SECONDS = 60.0

REFUSED_MIN = 3
"""Fewer refusals say nothing: neither while the gateway measures, which then ends without a rate, nor about two
prefixes whose bucket may be at its limit, as each may have reached its own."""

REFUSED_SHARE_MIN = 0.001
"""The part of the requests sent since the last cut, or in GROWTH_SECONDS if fewer, that must be refused before a cut:
S3 refuses a request now and then at any rate."""

EVIDENCE_MIN = 7.0
"""The evidence that refusals hit one prefix not by chance, before they count as its own: the logarithm of one in a
thousand."""

TOGETHER_SECONDS = 2.0
"""Two prefixes that are refused within this time under the rate of their bucket are refused because of the bucket."""

OTHERS_SHARE_MIN = 0.1
"""If the other prefixes of a bucket send less than this part, refusals cannot show whose limit it is."""

RATE_MIN = 5.0
"""Requests per second that find out whether the origin takes more again."""

UNKNOWN_SHARE_MIN = 0.1
"""The least part of the measured requests. An origin that took less does not count requests: it fails."""

BACKGROUND_WAIT_FACTOR = 3.0
"""Background requests wait this many times as long as a client's."""

RATE_MAX = 1e5

DEBT_SECONDS_MAX = 2.0
"""Processes that change a rate in the same moment, from a much greater one, may disagree for ever about the flow until
then. A rate's debt beyond this is forgiven."""

_ADVANCE_SECONDS = 0.05
_WATCH_SECONDS = 1.0
_RATE_CHANGE_MIN = 0.01

_PROVEN_SECONDS = 10.0
_PREFIXES_MAX = 256
_SENT_MIN, _SENT_MAX = 20, 4096
"""The requests that show what part of them is under a prefix, the last ones most."""

_TOLD_ROWS = 1
_OWN_ROWS = 8
_CLAIM, _FAMILY, _COURSE, _SENT, _REFUSED, _REFUSED_OF, _NEEDED, _REFUSED_AT = range(_OWN_ROWS)
_ROWS_OF_PLACE = _OWN_ROWS + ROWS_OF_BUCKET

_NAME_BITS = 36
_NOBODY = 0
_RATE_BITS = 24
_RATE_STEPS = 2**18
"""Steps for a factor of two."""

_MEASURING = 2**_RATE_BITS - 1

_log = RateLimitedLog(structlog.get_logger("forebay.origin"))


def places_for(slots: int, processes: int) -> int:
    bytes_of_place = 8 * processes * (_ROWS_OF_PLACE + rows_of(slots))
    return max(2, min(PLACES_MAX, MEMORY_BYTES_MAX // bytes_of_place))


def rows_for(slots: int, processes: int) -> int:
    """Return the rows of cells for all rates; `slots` does not count the one of all unknown slots."""
    return _TOLD_ROWS + places_for(slots + 1, processes) * (_ROWS_OF_PLACE + rows_of(slots + 1))


def direction_of(request: OriginRequest) -> Direction:
    """Return the direction of a request: origins count reads and writes apart."""
    return "read" if request.method in ("GET", "HEAD") else "write"


def prefix_of(request: OriginRequest) -> str:
    """Return the first part, with `/`, of a key or listed prefix: origins may count by it. Empty if there is none."""
    text = request.key
    if text is None:
        text = next((value for name, value in request.query if name == "prefix" and value), "")
    first, slash, _ = text.partition("/")
    return first + slash if slash else ""


class RateCurve:
    """The course of a rate from a moment on, as one word: the same in all processes."""

    __slots__ = ("began", "top", "word")

    def __init__(self, word: int) -> None:
        self.word = word
        self.began = (word >> _RATE_BITS) / 1000
        code = word & _MEASURING
        self.top = math.inf if code == _MEASURING else 2.0 ** (code / _RATE_STEPS - 16)
        """The rate that was refused; infinite while unknown."""

    @classmethod
    def of(cls, began: float, top: float) -> RateCurve:
        code = _MEASURING
        if not math.isinf(top):
            code = min(_MEASURING - 1, max(0, round((math.log2(top) + 16) * _RATE_STEPS)))
        return cls(round(began * 1000) << _RATE_BITS | code)

    @property
    def is_measuring(self) -> bool:
        return math.isinf(self.top)

    def rate(self, now: float) -> float:
        """Return the requests per second, once known."""
        since = (now - self.began) / GROWTH_SECONDS
        return min(RATE_MAX, max(RATE_MIN, self.top * (1 + (1 - KEPT) * (since - 1) ** 3)))


class RequestRate:
    """One rate, as one process sees that of all."""

    def __init__(self, cells: SharedCells, first_row: int, weights: Sequence[int], clock: Clock) -> None:
        self._own = cells.own
        self.claims = cells.whole_numbers(first_row + _CLAIM)
        self._families = cells.whole_numbers(first_row + _FAMILY)
        self._courses = cells.whole_numbers(first_row + _COURSE)
        self._sent = cells.whole_numbers(first_row + _SENT)
        self._refused = cells.whole_numbers(first_row + _REFUSED)
        self._refused_of = cells.whole_numbers(first_row + _REFUSED_OF)
        self._needed = cells.numbers(first_row + _NEEDED)
        self._refused_at = cells.numbers(first_row + _REFUSED_AT)
        row = first_row + _OWN_ROWS
        self.bucket = TokenBucket(cells, row, RATE_MIN)
        shares = FairShares(cells, row + ROWS_OF_BUCKET, weights, {}, self.bucket)
        self._link = Link(shares, clock, random.Random(cells.own))
        self._clock = clock
        self._limiters: dict[int, RateLimiter] = {}
        self._adopt(RateCurve(0), 0.0)
        self._advance_at = 0.0
        self.label: tuple[str, Direction] | None = None
        """The bucket and direction under which metrics show it."""

    def limiter(self, slot: int) -> RateLimiter:
        found = self._limiters.get(slot)
        if found is None:
            found = self._limiters[slot] = RateLimiter(slot, None, self._link, self._clock)
        return found

    # Whose it is

    @property
    def name(self) -> int:
        return max(self.claims) & (1 << _NAME_BITS) - 1

    @property
    def family(self) -> int:
        claims = list(self.claims)
        return self._families[claims.index(max(claims))]

    def is_alive(self, now: float) -> bool:
        return self.name != _NOBODY and now - max(self._needed) < KEPT_SECONDS

    def is_over(self, now: float) -> bool:
        return max(self._refused_at) >= now - SPAN_SECONDS and sum(self._refused) - self._refused_before >= REFUSED_MIN

    def is_refused_beside(self, prefix: int, since: float) -> bool:
        """Return whether another process has seen another prefix refused since then."""
        last = zip(self._refused_of, self._refused_at, strict=True)
        return any(of != prefix and at >= since for of, at in last)

    @property
    def claimed_at(self) -> int:
        return max(self.claims) >> _NAME_BITS

    def is_needed(self, now: float) -> bool:
        return now - max(self._needed) <= LULL_SECONDS

    def claim(self, name: int, family: int, course: RateCurve, now: float) -> bool:
        """Make this the rate of `name`; return False if another process has just made it another's."""
        self._needed[self._own] = now
        self._families[self._own] = family
        self._courses[self._own] = course.word
        if not course.is_measuring:
            self.bucket.change_rate(course.rate(now), now)
        self._write_claim(name, now)
        return self.name == name

    def retire(self, now: float) -> None:
        self._write_claim(_NOBODY, now)

    def _write_claim(self, name: int, now: float) -> None:
        self.claims[self._own] = max(int(now), (max(self.claims) >> _NAME_BITS) + 1) << _NAME_BITS | name

    # What it is

    @property
    def is_measuring(self) -> bool:
        """Return whether everything passes, and is counted."""
        return RateCurve(max(self._courses)).is_measuring

    def count(self) -> None:
        """Count a request that is sent while the rate is measured."""
        self._sent[self._own] += 1

    def per_second(self, now: float) -> float:
        """Return the requests per second that the last change by any process has set."""
        self.bucket.level(now)  # learns the last change
        return self.bucket.rate

    def need(self, now: float) -> bool:
        """Note a waiting request; return whether it is the first after a lull: the rate grows on from where it was."""
        is_lull = not self.is_needed(now)
        if is_lull:
            self._advance(now)
            if not self._course.is_measuring and now - self._course.began > GROWTH_SECONDS:
                self._begin(RateCurve.of(now - GROWTH_SECONDS, self.per_second(now)), now)
        self._needed[self._own] = now
        return is_lull

    def refuse(self, prefix: int, sent_at: float, now: float, *, is_to_blame: bool = True) -> None:
        """Note a refusal of a request under a prefix, sent at `sent_at`; `is_to_blame`: it exceeded this rate."""
        self._refused_of[self._own], self._refused_at[self._own] = prefix, now
        self._advance(now)
        began = self._course.began
        if sent_at >= began:
            self._refused[self._own] += 1
        if is_to_blame:
            self._needed[self._own] = now
            sent = min(self.bucket.taken_bytes() - self._taken_before, GROWTH_SECONDS * self.bucket.rate)
            is_enough = sum(self._refused) - self._refused_before >= REFUSED_SHARE_MIN * sent
            if not self._course.is_measuring and is_enough and sent_at > began and now - began >= SPAN_SECONDS:
                self._begin(RateCurve.of(now, self.per_second(now)), now)

    def advance(self, now: float) -> None:
        if now >= self._advance_at:
            self._advance_at = now + _ADVANCE_SECONDS
            self._advance(now)

    def _advance(self, now: float) -> None:
        word = max(self._courses)
        if word != self._course.word:
            self._adopt(RateCurve(word), now)
        debt = -self.bucket.level(now)
        if debt > DEBT_SECONDS_MAX * self.bucket.rate + 1:
            self.bucket.release(int(debt))
        course = self._course
        if course.is_measuring:
            seconds = now - self._adopted_at
            sent = sum(self._sent) - self._sent_before
            taken, least = sent - (sum(self._refused) - self._refused_before), UNKNOWN_SHARE_MIN * sent
            if seconds >= (MEASURED_SECONDS if taken >= least else MEASURED_SECONDS_MAX):
                if sent - taken < REFUSED_MIN:
                    self.retire(now)
                else:
                    self._begin(RateCurve.of(now, max(max(taken, least) / seconds, RATE_MIN)), now)
        elif self.is_needed(now) or now - course.began <= GROWTH_SECONDS:
            self._keep_to(course, now)

    def _begin(self, course: RateCurve, now: float) -> None:
        self._courses[self._own] = course.word
        self._adopt(course, now)
        self._keep_to(course, now)

    def _keep_to(self, course: RateCurve, now: float) -> None:
        rate = course.rate(now)
        before = self.per_second(now)
        if abs(rate - before) > _RATE_CHANGE_MIN * before:
            self.bucket.change_rate(rate, now)

    def _adopt(self, course: RateCurve, now: float) -> None:
        self._course, self._adopted_at = course, now
        self._sent_before, self._refused_before = sum(self._sent), sum(self._refused)
        self._taken_before = self.bucket.taken_bytes()


class _Refusals:
    """The prefixes hit by refusals under the rate of a whole bucket, as this process sees them."""

    def __init__(self) -> None:
        self._sent = Counter[str]()
        self._total = 0
        self._refused_at: dict[str, float] = {}
        self._only, self._weight = "", 0.0

    def send(self, prefix: str) -> None:
        """Count a request that is sent."""
        if self._total >= _SENT_MAX or (len(self._sent) >= _PREFIXES_MAX and prefix not in self._sent):
            self._sent = Counter({of: count // 2 for of, count in self._sent.items() if count > 1})
            self._total = self._sent.total()
        self._sent[prefix] += 1
        self._total += 1

    def others_share(self, prefix: str) -> float:
        return 1 - self._sent[prefix] / self._total if self._total >= _SENT_MIN else 1.0

    def add(self, prefix: str, now: float) -> bool:
        """Add a refusal; return whether another prefix was refused at about the same time."""
        is_together = any(of != prefix and now - at <= TOGETHER_SECONDS for of, at in self._refused_at.items())
        self._refused_at = {of: at for of, at in self._refused_at.items() if now - at <= TOGETHER_SECONDS}
        self._refused_at[prefix] = now
        if prefix != self._only or is_together:
            self._only, self._weight = prefix, 0.0
        return is_together

    def are_of(self, prefix: str) -> bool:
        """Return whether the last refusals, with this one, can hardly all be under the prefix by chance."""
        share = 1 - self.others_share(prefix)
        if share > 0:
            self._weight -= math.log(share)
        if self._weight < EVIDENCE_MIN:
            return False
        self._weight = 0.0
        return True


class RequestRates:
    """All rates, as one process keeps them with the others that use `cells`; without cells, alone.

    Slots without a name share the weight 1. Event loop only.
    """

    def __init__(
        self,
        weights: Mapping[str, int],
        clock: Clock,
        cells: SharedCells | None = None,
        *,
        wait_seconds_max: float,
        buckets_told: Collection[str] = (),
        slots: Numbering | None = None,
    ) -> None:
        """Divide by the slots' `weights`. Metrics name only `buckets_told`. A client waits for `wait_seconds_max`.

        `slots` are the numbers of slots, for the most that there may be: the same in all processes.
        """
        slots = slots or Numbering(len(weights)).changed(weights)
        cells = cells or SharedCells.of_one_process(rows_for(slots.most, 1), clock.monotonic())
        self._cells = cells
        self._clock = clock
        self._wait_seconds_max = wait_seconds_max
        self._weights = [1] * (slots.most + 1)
        self.apply_settings(weights, slots, buckets_told)
        self._told = cells.whole_numbers(0)
        self._known = self._nothing_told = bytes(8 * cells.processes)
        self._places: dict[int, RequestRate] = {}
        self._live: dict[int, RequestRate] = {}

        self._refusals: dict[int, _Refusals] = {}
        """By the name of a bucket's rate."""

        self._labels: set[tuple[str, Direction]] = set()
        self._watching: asyncio.Task[None] | None = None

    def apply_settings(self, weights: Mapping[str, int], slots: Numbering, buckets_told: Collection[str]) -> None:
        """Divide by other weights from now on."""
        self._slots = slots.of
        self._weights[:] = [1] * len(self._weights)  # in place: all rates look there
        for slot, weight in weights.items():
            self._weights[slots.of[slot]] = weight
        self.buckets_told = buckets_told

    # What `origin.traffic_meter.RequestRates` asks for

    def passes(self, request: OriginRequest) -> bool:
        """Let a request pass if nothing holds it up; otherwise take nothing, and return False."""
        if self._told.tobytes() != self._known:
            self._read(self._clock.monotonic())
        if not self._live:
            return True
        rates = self._rates_of(request, is_new=True)
        if len(rates) > 1:  # they are passed one after the other
            return False
        return not rates or self._limiter(rates[0], request).passes(1, rank_of(request.purpose))

    async def wait(self, request: OriginRequest, waited_seconds: float = 0.0) -> None:
        """Wait until a request may pass; OriginBusy if too long, with `waited_seconds` of earlier tries or rates."""
        began = self._clock.monotonic()
        longest_seconds = self._wait_seconds_max
        if request.purpose not in (Purpose.LIVE, Purpose.FORWARD):
            longest_seconds *= BACKGROUND_WAIT_FACTOR
        deadline = began + turn_seconds(longest_seconds - waited_seconds)
        rank = rank_of(request.purpose)
        for rate in self._rates_of(request):
            limiter = self._limiter(rate, request)
            if not limiter.passes(1, rank):
                self._need(rate)
                try:
                    await limiter.take(1, rank, deadline - self._clock.monotonic())
                except TimeoutError:
                    metrics.ORIGIN_THROTTLED_IN_VAIN.add(1, request.slot)
                    raise OriginBusy(
                        f"the origin takes {rate.bucket.rate:.0f} requests per second there, and this one could not be "
                        "sent in time"
                    ) from None
                self._need(rate)
        throttled_seconds = self._clock.monotonic() - began
        if throttled_seconds > 0:
            metrics.ORIGIN_THROTTLED.add(1, request.slot)
            metrics.ORIGIN_THROTTLE_WAIT_SECONDS.add(throttled_seconds, request.slot)

    def charge(self, request: OriginRequest) -> None:
        """Charge for a request that is sent without waiting: later ones wait for it."""
        for rate in self._rates_of(request, is_new=True) if self._live else ():
            self._limiter(rate, request).charge(1)

    def refused(self, request: OriginRequest, sent_at: float) -> None:
        """Note that the origin has refused, for their number, a request that was sent at a monotonic time."""
        metrics.ORIGIN_SLOW_DOWN.add(1, request.slot)
        now = self._clock.monotonic()
        self._read(now)
        bucket, direction, prefix = request.bucket or "", direction_of(request), prefix_of(request)
        name = _name(bucket, prefix, direction)
        whole, rate = self._live.get(_name(bucket, None, direction)), self._live.get(name)
        if whole is not None and not whole.is_measuring:
            refusals = self._refusals_under(whole)
            is_together = refusals.add(prefix, now) or whole.is_refused_beside(name, now - TOGETHER_SECONDS)
            is_alone = refusals.others_share(prefix) < OTHERS_SHARE_MIN
            whole.refuse(name, sent_at, now, is_to_blame=whole.is_needed(now) and (is_together or is_alone))
            if rate is not None:
                rate.refuse(name, sent_at, now, is_to_blame=rate.is_needed(now) or not is_together)
            elif not is_together and refusals.are_of(prefix):
                self._claim(request, prefix, now)
            return
        if whole is not None:  # the rate of the bucket is being measured
            whole.refuse(name, sent_at, now)
            if rate is not None:
                rate.refuse(name, sent_at, now)
            return
        rate = rate or self._claim(request, prefix, now)
        if rate is None:
            _log.warning(
                "the origin refuses requests under more prefixes than Forebay can remember", bucket, bucket=bucket
            )
            return
        rate.refuse(name, sent_at, now)
        if rate.is_over(now):
            self._claim_whole(request, rate, now)

    # Which rates there are

    def rates(self) -> dict[tuple[str, Direction], float]:
        """Return the rates that the origin probably takes, by bucket and direction, where this process asked any."""
        now, found = self._clock.monotonic(), dict[tuple[str, Direction], float]()
        self._read(now)
        whole = {rate.family for name, rate in self._live.items() if _is_whole(name)}
        for name, rate in self._live.items():
            is_in_force = not rate.is_measuring and (_is_whole(name) or rate.family not in whole)
            if rate.label is not None and is_in_force:
                found[rate.label] = found.get(rate.label, 0.0) + rate.per_second(now)
        return found

    async def aclose(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    def _refusals_under(self, whole: RequestRate) -> _Refusals:
        found = self._refusals.get(whole.name)
        if found is None:
            self._refusals = {name: one for name, one in self._refusals.items() if name in self._live}
            found = self._refusals[whole.name] = _Refusals()
        return found

    def _need(self, rate: RequestRate) -> None:
        if rate.need(self._clock.monotonic()):
            self._told[self._cells.own] += 1  # others may have been about to forget it

    def _rates_of(self, request: OriginRequest, *, is_new: bool = False) -> tuple[RequestRate, ...]:
        """Return the rates that a request passes now, in this order; `is_new`: count it if they are measured."""
        now = self._clock.monotonic()
        bucket, direction = request.bucket or "", direction_of(request)
        prefix = prefix_of(request)
        whole = self._live.get(_name(bucket, None, direction))
        of_prefix = self._live.get(_name(bucket, prefix, direction))
        found = tuple(rate for rate in (of_prefix, whole) if rate is not None)
        for rate in found:
            rate.advance(now)
            if rate.label is None:
                rate.label = (bucket if bucket in self.buckets_told else UNTOLD_BUCKETS), direction
            if is_new and rate.is_measuring:
                rate.count()
        if is_new and whole is not None:
            self._refusals_under(whole).send(prefix)
        return tuple(rate for rate in found if not rate.is_measuring)

    def _limiter(self, rate: RequestRate, request: OriginRequest) -> RateLimiter:
        return rate.limiter(self._slots.get(request.slot, 0))

    def _read(self, now: float) -> None:
        """Read the claims of all processes."""
        self._known = self._told.tobytes()
        if self._known == self._nothing_told:
            return
        live = dict[int, RequestRate]()
        for number in range(places_for(len(self._weights), self._cells.processes)):
            rate = self._place(number)
            if rate.is_alive(now):
                live.setdefault(rate.name, rate)
        for name, rate in self._live.items():
            if live.get(name) is not rate:
                rate.label = None
        self._live = live
        if live and self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="request rates")

    def _claim(self, request: OriginRequest, prefix: str | None, now: float) -> RequestRate | None:
        """Find a place for a rate, and begin to measure it; None: all are in use."""
        bucket, direction = request.bucket or "", direction_of(request)
        name = _name(bucket, prefix, direction)
        rate = self._place_for(name, now)
        if rate is None or not rate.claim(name, _name(bucket, None, direction), RateCurve.of(now, math.inf), now):
            return None  # another process was faster, for another rate: the next refusal finds another place
        self._told[self._cells.own] += 1
        _log.warning(
            "the origin refuses requests because there are too many: Forebay holds them back",
            bucket,
            bucket=bucket,
            prefix="(all)" if prefix is None else prefix,
            requests=direction,
        )
        self._read(now)
        return rate

    def _claim_whole(self, request: OriginRequest, rate: RequestRate, now: float) -> None:
        """Give the bucket of a refused prefix a rate, if another prefix is refused as well."""
        others = [one for one in self._live.values() if one is not rate and one.family == rate.family]
        if any(one.is_over(now) for one in others) and self._claim(request, None, now) is not None:
            for one in (rate, *others):
                if now - one.claimed_at < _PROVEN_SECONDS:  # it was measured while the others were refused too
                    one.retire(now)
            self._told[self._cells.own] += 1
            self._read(now)

    def _place_for(self, name: int, now: float) -> RequestRate | None:
        """Return the place that a rate has, or may take; None: all are in use."""
        count = places_for(len(self._weights), self._cells.processes)
        places = (self._place((name + number) % count) for number in range(count))
        return next((place for place in places if not place.is_alive(now) or place.name == name), None)

    def _place(self, number: int) -> RequestRate:
        found = self._places.get(number)
        if found is None:
            row = _TOLD_ROWS + number * (_ROWS_OF_PLACE + rows_of(len(self._weights)))
            found = self._places[number] = RequestRate(self._cells, row, self._weights, self._clock)
        return found

    async def _watch(self) -> None:
        while self._live:
            await self._clock.sleep(_WATCH_SECONDS)
            now = self._clock.monotonic()
            for rate in self._live.values():
                rate.advance(now)
            self._tell(self.rates())
        self._watching = None

    def _tell(self, rates: dict[tuple[str, Direction], float]) -> None:
        for label in self._labels - rates.keys():
            metrics.ORIGIN_REQUEST_RATE.set(0.0, *label)
        for label, rate in rates.items():
            metrics.ORIGIN_REQUEST_RATE.set(rate, *label)
        self._labels = set(rates)


def _name(bucket: str, prefix: str | None, direction: Direction) -> int:
    text = f"{direction}\0{bucket}\0{prefix or ''}".encode("utf-8", "surrogatepass")
    found = int.from_bytes(blake2b(text, digest_size=8).digest(), "little") & (1 << _NAME_BITS) - 1
    return found | 1 if prefix is None else found & ~1


def _is_whole(name: int) -> bool:
    return bool(name & 1)
