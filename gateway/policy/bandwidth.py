"""Keeps traffic to and from the origin below its ceilings, and shares the link fairly among slots, over all processes.

A piece passes the ceiling of its slot, then the link. Before its ceiling a process has one piece in the queue, and goes
to its end after that; fair_shares.py decides whose turn at the link it is. In one process the pieces of a slot and
direction pass by rank, the better first, and those of a rank in order of arrival; one that has waited for
PATIENCE_SECONDS goes before all, so that none waits for ever. Slots wait beside each other: one at its own ceiling
keeps no other from the link, and does not count as waiting for it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.core.clock import Clock
from gateway.origin.client import Direction
from gateway.origin.traffic_meter import AnswerKind, Traffic
from gateway.policy.capacity_controller import UNLIMITED_BYTES_PER_SECOND
from gateway.policy.fair_shares import HOLD_SECONDS, LOOK_SECONDS, FairShares, QueueEntry, rows_of
from gateway.policy.link_capacity import ROWS_OF_LEADERSHIP, ROWS_OF_LINK_CAPACITY, Leadership, LinkCapacity
from gateway.policy.token_bucket import ROWS_OF_BUCKET, TokenBucket
from gateway.shared.arena import Numbering, SharedCells

PATIENCE_SECONDS = 1.0
"""Seconds that a piece waits for better ones of its slot. Then one such piece passes in each span of this length."""

_FINEST_SLEEP_SECONDS = 0.001
"""Shorter waits cost more than they shape: pieces that come due meanwhile pass together."""

_DIRECTIONS: tuple[Direction, ...] = ("read", "write")


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The most `bytes_per_second` in one direction, over all processes: for one slot, or (None) for the whole link.

    For the link, None stands for its capacity, which the gateway finds out.
    """

    direction: Direction
    slot: str | None
    bytes_per_second: float | None


@dataclass(frozen=True, slots=True)
class BandwidthShare:
    """A slot's share of a contended link in one direction: by weight, but at least its guarantee."""

    direction: Direction
    slot: str
    weight: int = 1
    guaranteed_bytes_per_second: float | None = None


class Waited(NamedTuple):
    """A piece's waits: for its slot's own ceiling, then for the link."""

    ceiling_seconds: float
    link_seconds: float


NOT_WAITED = Waited(0.0, 0.0)


@dataclass(eq=False, slots=True)
class _BandwidthPiece:
    count: int
    rank: Callable[[], int]
    since: float
    until: float
    """The end of its patience."""

    passed: asyncio.Future[Waited | None]
    """None: its patience has ended."""


class RateLimiter:
    """The passage of one slot in one direction: its own ceiling, if it has one, and the link."""

    def __init__(self, slot: int, ceiling: TokenBucket | None, link: Link, clock: Clock) -> None:
        self.slot = slot
        self._ceiling = ceiling
        self._link = link
        self._clock = clock
        self._waiting: list[_BandwidthPiece] = []
        self._reserved = 0
        """Bytes of the ceiling that the first piece has taken."""

        self._reserving: asyncio.Task[None] | None = None
        self._at_link_since: float | None = None
        self._impatient_at = 0.0
        """The last time that an impatient piece passed before better ones."""

        self._late_at = math.inf
        """When the patience of the first piece ends."""

    async def take(self, count: int, rank: Callable[[], int], wait_seconds_max: float = math.inf) -> Waited:
        """Wait until `count` bytes may pass. Raises TimeoutError, at most `HOLD_SECONDS` late.

        A caller that was cancelled, or has waited too long, has taken nothing.
        """
        if self.passes(count, rank):
            return NOT_WAITED
        now = self._clock.monotonic()
        piece = _BandwidthPiece(count, rank, now, now + wait_seconds_max, asyncio.get_running_loop().create_future())
        self._waiting.append(piece)
        self._late_at = min(self._late_at, piece.until)
        self._advance()
        self._link.enter(self)
        try:
            waited = await piece.passed
        except BaseException:
            self._leave(piece)
            raise
        if waited is None:
            raise TimeoutError
        return waited

    def passes(self, count: int, rank: Callable[[], int]) -> bool:
        """Let `count` bytes pass if nothing holds them up; otherwise take nothing, and return False."""
        if self._waiting:
            return False
        now, ceiling = self._clock.monotonic(), self._ceiling
        if ceiling is not None and ceiling.delay_seconds(now) > 0:
            return False
        if not self._link.shares.passes(self.slot, rank, count, now):
            return False
        if ceiling is not None:
            ceiling.take(count)
        return True

    def charge(self, count: int) -> None:
        """Let `count` bytes pass without waiting: later ones wait for both."""
        if self._ceiling is not None:
            self._ceiling.take(count)
        self._link.shares.charge(self.slot, count, self._clock.monotonic())

    def apply_settings(self, ceiling: TokenBucket | None) -> None:
        """Let pieces, also those that wait, wait for this ceiling from now on, and for the link as it is now."""
        now = self._clock.monotonic()
        if self._reserving is not None:
            self._reserving.cancel()
        self._reserve(0)
        self._reserving = None
        if ceiling is not None:
            self._at_link_since = None
        elif self._waiting and self._at_link_since is None:
            self._at_link_since = now  # until now the pieces have waited for a ceiling
        self._ceiling = ceiling
        if self._waiting:
            self._advance()
            self._link.enter(self)
            while self.let_pass(now):
                pass

    # For the link

    @property
    def is_at_link(self) -> bool:
        """Return whether its own ceiling lets a piece pass."""
        return self._at_link_since is not None

    def best_rank(self, now: float) -> int:
        return self._rank(self._best(now), now)

    def give_up(self, now: float) -> None:
        """End the wait of pieces that have waited too long."""
        if now < self._late_at:
            return
        for piece in [one for one in self._waiting if one.until <= now and not one.passed.done()]:
            self._waiting.remove(piece)
            piece.passed.set_result(None)
        self._late_at = min((one.until for one in self._waiting), default=math.inf)
        self._advance_without(now)

    def let_pass(self, now: float) -> bool:
        """Let one piece pass, if it is its turn."""
        since = self._at_link_since
        if since is None:
            return False
        piece = self._best(now)
        rank = self._rank(piece, now)
        if piece.passed.cancelled():  # it is about to leave, and then lets the next one pass
            return False
        if not self._link.shares.passes(self.slot, lambda: rank, piece.count, now):
            return False
        if rank < piece.rank():
            self._impatient_at = now
        if self._ceiling is not None:
            self._reserve(piece.count)
            self._ceiling.passed(piece.count, now)
            self._reserved, self._at_link_since = 0, None
        self._waiting.remove(piece)
        at_link_since = max(since, piece.since)
        piece.passed.set_result(Waited(at_link_since - piece.since, now - at_link_since))
        self._advance()
        return True

    # Its own ceiling

    def _advance(self) -> None:
        if not self._waiting:
            if self._reserving is not None:
                self._reserving.cancel()
            self._reserve(0)
            self._reserving = self._at_link_since = None
            self._link.leave(self)
            return
        if self._ceiling is None:
            self._at_link_since = self._waiting[0].since if self._at_link_since is None else self._at_link_since
        elif not self.is_at_link and self._reserving is None:
            self._reserving = asyncio.create_task(self._await_ceiling(self._ceiling), name="bandwidth ceiling")

    async def _await_ceiling(self, ceiling: TokenBucket) -> None:
        now = self._clock.monotonic()
        while self._link.shares.is_outranked(self.slot, self.best_rank(now), now):
            await self._clock.sleep(LOOK_SECONDS)
            now = self._clock.monotonic()
        delay_seconds = ceiling.delay_seconds(now)
        self._reserve(self._best(now).count)
        if delay_seconds > 0:
            await self._clock.sleep(max(delay_seconds, _FINEST_SLEEP_SECONDS))
        self._reserving, self._at_link_since = None, self._clock.monotonic()
        if not self.let_pass(self._at_link_since):
            self._link.enter(self)

    def _reserve(self, count: int) -> None:
        if self._ceiling is not None:
            self._ceiling.take(count - self._reserved)
            self._reserved = count

    def _leave(self, piece: _BandwidthPiece) -> None:
        if piece.passed.done() and not piece.passed.cancelled():  # it had passed before its caller was cancelled
            if piece.passed.result() is None:
                return
            if self._ceiling is not None:
                self._ceiling.release(piece.count)
            self._link.shares.release(self.slot, piece.count)
            return
        self._waiting.remove(piece)
        self._advance_without(self._clock.monotonic())
        self.let_pass(self._clock.monotonic())

    def _advance_without(self, now: float) -> None:
        if self._waiting and self._reserved:
            self._reserve(self._best(now).count)
        self._advance()

    # Which piece is the first

    def _best(self, now: float) -> _BandwidthPiece:
        best, least = self._waiting[0], math.inf
        for piece in self._waiting:
            rank = self._rank(piece, now)
            if rank < least:
                best, least = piece, rank
                if not rank:  # none can be better
                    break
        return best

    def _rank(self, piece: _BandwidthPiece, now: float) -> int:
        is_impatient = min(now - piece.since, now - self._impatient_at) >= PATIENCE_SECONDS
        return 0 if is_impatient else piece.rank()


@dataclass(eq=False)
class Link:
    """The slots of this process at the link in one direction.

    A look now and then lets pieces pass whose turn it is, and tells the other processes which slots wait.
    """

    shares: FairShares
    clock: Clock
    rng: random.Random
    _present: dict[int, RateLimiter] = field(default_factory=dict)
    _look_at: float = 0.0
    _looking: asyncio.Task[None] | None = None

    def enter(self, limiter: RateLimiter) -> None:
        """Note that pieces of the slot wait."""
        now = self.clock.monotonic()
        self._present[limiter.slot] = limiter
        self.shares.tell(self._entry(limiter, now), now)
        self._look_again(now)

    def leave(self, limiter: RateLimiter) -> None:
        """Note that none wait. The other processes learn it at the next look: probably the next piece comes before."""
        self._present.pop(limiter.slot, None)

    def look(self) -> None:
        """Let pieces pass whose turn it is."""
        now = self.clock.monotonic()
        for limiter in list(self._present.values()):
            limiter.give_up(now)
        self.shares.tell_all((self._entry(limiter, now) for limiter in self._present.values()), now)
        at_link = [slot for slot, limiter in self._present.items() if limiter.is_at_link]
        for slot in self.shares.next_of(at_link, now):
            limiter = self._present[slot]
            while slot in self._present and limiter.let_pass(now):
                pass
        if self._present:
            self._look_again(now)

    def _entry(self, limiter: RateLimiter, now: float) -> QueueEntry:
        return QueueEntry(limiter.slot, limiter.best_rank(now), limiter.is_at_link and self.shares.link is not None)

    def _look_again(self, now: float) -> None:
        """Plan the next look: when a piece may pass, and before the other processes forget this one."""
        pause_seconds, link = HOLD_SECONDS / 2, self.shares.link
        if link is not None and any(limiter.is_at_link for limiter in self._present.values()):
            delay_seconds = link.delay_seconds(now)
            least_seconds = LOOK_SECONDS / 2 if delay_seconds > 0 else self.shares.interval_seconds
            # Processes that wait for the same moment have the same chance to be the first then.
            pause_seconds = min(pause_seconds, max(least_seconds, delay_seconds)) + self.rng.uniform(0, 0.001)
        if self._looking is None or now + pause_seconds < self._look_at:
            if self._looking is not None:
                self._looking.cancel()
            self._look_at = now + pause_seconds
            self._looking = asyncio.create_task(self._look_after(pause_seconds), name="bandwidth of the link")

    async def _look_after(self, seconds: float) -> None:
        await self.clock.sleep(seconds)
        self._looking = None
        self.look()


class Bandwidth:
    """All ceilings and shares, as one process keeps them with the others that use `cells`; without cells, alone.

    Slots without settings share one number, with the weight 1.
    """

    def __init__(
        self,
        ceilings: Sequence[Ceiling],
        clock: Clock,
        cells: SharedCells | None = None,
        shares: Sequence[BandwidthShare] = (),
        slots: Numbering | None = None,
        generation: int = 0,
    ) -> None:
        """`slots` are the numbers of slots, for the most that there may be: the same in all processes."""
        slots = slots or numbering_of(ceilings, shares)
        self._cells = cells or SharedCells.of_one_process(rows_for(slots.most), clock.monotonic())
        self._clock = clock
        self._count = slots.most + 1
        self._buckets: dict[int, TokenBucket] = {}
        self._limiters: dict[tuple[Direction, int], RateLimiter] = {}
        self._links = dict[Direction, Link]()
        self._auto = dict[Direction, LinkCapacity]()
        for direction in _DIRECTIONS:
            row = self._link_row(direction) + 2 * ROWS_OF_BUCKET
            of_link = FairShares(self._cells, row, [1] * self._count, {}, None)
            self._links[direction] = Link(of_link, clock, random.Random(self._cells.own))
        self._leadership = Leadership(self._cells, rows_for(slots.most) - ROWS_OF_LEADERSHIP)
        self.apply_settings(ceilings, shares, slots, generation)

    def apply_settings(
        self,
        ceilings: Sequence[Ceiling],
        shares: Sequence[BandwidthShare],
        slots: Numbering,
        generation: int,
    ) -> None:
        """Keep to other settings from now on: what waits, waits for these. What has passed counts on."""
        self._slots = {name: slots.of[name] for name in _names(ceilings, shares)}
        self._passages: dict[tuple[Direction, int], RateLimiter | None] = {}
        self._ceilings = dict[tuple[Direction, int], TokenBucket]()
        self.found = dict[Direction, LinkCapacity]()
        """The capacity of the link, in the directions in which the gateway finds it out."""

        of_link = dict[Direction, TokenBucket]()
        for one in ceilings:
            if one.slot is not None and one.bytes_per_second is not None:
                number = self._slots[one.slot]
                row = _row_of(number, one.direction)
                self._ceilings[one.direction, number] = self._bucket(row, one.bytes_per_second, generation)
            elif one.bytes_per_second is not None:
                row = self._link_row(one.direction)
                of_link[one.direction] = self._bucket(row, one.bytes_per_second, generation)
            else:
                self.found[one.direction] = found = self._found(one.direction)
                of_link[one.direction] = found.bucket
        for direction, link in self._links.items():
            weights, guarantees = [1] * self._count, dict[int, TokenBucket]()
            for share in shares:
                if share.direction == direction:
                    number, rate = self._slots[share.slot], share.guaranteed_bytes_per_second
                    weights[number] = share.weight
                    if rate is not None:
                        row = _row_of(number, direction) + ROWS_OF_BUCKET
                        guarantees[number] = self._bucket(row, rate, generation)
            link.shares.weights, link.shares.guarantees = weights, guarantees
            link.shares.link = of_link.get(direction)
        for key, limiter in self._limiters.items():
            limiter.apply_settings(self._ceilings.get(key))

    def _bucket(self, row: int, rate: float, generation: int) -> TokenBucket:
        """Return the bucket in a row. The rates of the latest settings hold, which other processes may know before."""
        found = self._buckets.get(row)
        if found is None:
            found = self._buckets[row] = TokenBucket(self._cells, row, rate)
        if self._cells.is_latest(generation):
            found.set_rate(rate, self._clock.monotonic())
        return found

    def _found(self, direction: Direction) -> LinkCapacity:
        found = self._auto.get(direction)
        if found is None:
            row = self._link_row(direction) + ROWS_OF_BUCKET
            bucket = TokenBucket(self._cells, row, UNLIMITED_BYTES_PER_SECOND)
            row += ROWS_OF_BUCKET + rows_of(self._count)
            kinds = [kind for kind in AnswerKind if kind.direction == direction]
            found = LinkCapacity(self._cells, row, bucket, self._links[direction].shares, kinds)
            self._auto[direction] = found
        return found

    def _link_row(self, direction: Direction) -> int:
        return _row_of(self._count, "read") + _DIRECTIONS.index(direction) * _rows_of_link(self._count)

    def limiter(self, direction: Direction, slot: str) -> RateLimiter | None:
        """Return the passage of a slot's bytes by the present settings; None: nothing limits them."""
        key = direction, self._slots.get(slot, 0)
        if key in self._passages:
            return self._passages[key]
        ceiling, link, limiter = self._ceilings.get(key), self._links[direction], None
        if ceiling is not None or link.shares.link is not None:
            limiter = self._limiters.get(key) or RateLimiter(key[1], ceiling, link, self._clock)
            self._limiters[key] = limiter
        self._passages[key] = limiter
        return limiter

    def link(self, direction: Direction) -> TokenBucket | None:
        """Return the bucket of the whole link; None: nothing limits it."""
        return self._links[direction].shares.link

    def answered(self, kind: AnswerKind, seconds: float) -> None:
        """Note the seconds from the last byte of a request to the beginning of the origin's answer."""
        found = self.found.get(kind.direction)
        if found is not None:
            found.answered(kind, seconds)

    def slowed(self, direction: Direction) -> None:
        """Note that the origin has asked for less."""
        found = self.found.get(direction)
        if found is not None:
            found.slowed()

    def find_capacity(self, traffic: Mapping[Direction, Traffic], late_seconds: float = 0.0) -> None:
        """Report to the other processes what this one sees of the link, and decide for all if it leads.

        Call it every TICK_SECONDS while the gateway looks for the capacity; this call is `late_seconds` late.
        """
        now = self._clock.monotonic()
        for direction, found in self.found.items():
            found.tell(traffic[direction], now, late_seconds)
        if self.found and self._leadership.leads(now):
            for found in self.found.values():
                found.decide(now, self._leadership)

    def window_bytes(self) -> int | None:
        """Return the bytes that may be under way from the origin on each connection; None: nothing limits it."""
        found = self.found.get("read")
        return found.window_bytes(self._clock.monotonic()) if found is not None else None


def numbering_of(ceilings: Sequence[Ceiling], shares: Sequence[BandwidthShare]) -> Numbering:
    """Return the numbers of exactly these slots."""
    names = _names(ceilings, shares)
    return Numbering(len(names)).changed(names)


def _names(ceilings: Sequence[Ceiling], shares: Sequence[BandwidthShare]) -> list[str]:
    named = (one.slot for group in (ceilings, shares) for one in group)
    return list(dict.fromkeys(name for name in named if name is not None))


def rows_for(slots: int) -> int:
    """Return the rows of cells for as many slots, and for those without a number."""
    return _row_of(slots + 1, "read") + len(_DIRECTIONS) * _rows_of_link(slots + 1) + ROWS_OF_LEADERSHIP


def _row_of(slot: int, direction: Direction) -> int:
    """Return the first row of a slot's ceiling and guarantee in a direction."""
    return (slot * len(_DIRECTIONS) + _DIRECTIONS.index(direction)) * 2 * ROWS_OF_BUCKET


def _rows_of_link(slots: int) -> int:
    """Return the rows of a bucket with a rate from settings, one whose rate is found, the shares, and the capacity."""
    return 2 * ROWS_OF_BUCKET + rows_of(slots) + ROWS_OF_LINK_CAPACITY
