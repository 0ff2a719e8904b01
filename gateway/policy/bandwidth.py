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
from gateway.origin.traffic_meter import AnswerKind, CeilingsReplaced, Traffic
from gateway.policy.fair_shares import HOLD_SECONDS, LOOK_SECONDS, FairShares, QueueEntry, rows_of
from gateway.policy.leadership import ROWS_OF_LEADERSHIP, Leadership
from gateway.policy.link_capacity import ROWS_OF_LINK_CAPACITY, LinkCapacity, unlimited_bucket
from gateway.policy.token_bucket import (
    ROWS_OF_ADJUSTABLE_BUCKET,
    ROWS_OF_BUCKET,
    AdjustableBucket,
    SharedCells,
    TokenBucket,
)

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
        """Wait until `count` bytes may pass. Raises CeilingsReplaced, TimeoutError at most `HOLD_SECONDS` late.

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
        except CeilingsReplaced:
            raise
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

    def release(self) -> None:
        """End the wait of all pieces, as other ceilings apply, and give back what was reserved."""
        now, at_link_since = self._clock.monotonic(), self._at_link_since
        waiting, self._waiting = self._waiting, []
        self._advance()
        for piece in waiting:
            if not piece.passed.done():
                at_link = max(at_link_since, piece.since) if at_link_since is not None else now
                piece.passed.set_exception(CeilingsReplaced(at_link - piece.since, now - at_link))

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
        if piece not in self._waiting and _is_let_go(piece):
            return
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


def _is_let_go(piece: _BandwidthPiece) -> bool:
    """Return whether the piece ended with the ceilings, even if its caller was cancelled at once."""
    passed = piece.passed
    return passed.cancelled() or (passed.done() and isinstance(passed.exception(), CeilingsReplaced))


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
        if at_link and self.shares.link is not None:
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
    ) -> None:
        self._is_alone = cells is None
        cells = cells or SharedCells.of_one_process(cells_for(ceilings, shares), clock.monotonic())
        self._clock = clock
        self._slots = {slot: number for number, slot in enumerate(_slots(ceilings, shares))}
        buckets, row = dict[tuple[Direction, str | None], TokenBucket](), 0
        adjustable = dict[Direction, AdjustableBucket]()
        for one in ceilings:
            if one.bytes_per_second is not None:
                buckets[one.direction, one.slot] = cells.bucket(row, one.bytes_per_second)
                row += ROWS_OF_BUCKET
            else:
                adjustable[one.direction] = buckets[one.direction, one.slot] = unlimited_bucket(cells, row)
                row += ROWS_OF_ADJUSTABLE_BUCKET
        guarantees = dict[tuple[Direction, int], TokenBucket]()
        for share in shares:
            if share.guaranteed_bytes_per_second is not None:
                bucket = cells.bucket(row, share.guaranteed_bytes_per_second)
                guarantees[share.direction, self._slots[share.slot]] = bucket
                row += ROWS_OF_BUCKET
        self._ceilings = buckets
        self._links = dict[Direction, Link]()
        for direction in _DIRECTIONS:
            weights = [1] * len(self._slots)
            for share in shares:
                if share.direction == direction:
                    weights[self._slots[share.slot]] = share.weight
            guaranteed = {slot: bucket for (of, slot), bucket in guarantees.items() if of == direction}
            of_link = FairShares(cells, row, weights, guaranteed, buckets.get((direction, None)))
            self._links[direction] = Link(of_link, clock, random.Random(cells.own))
            row += rows_of(len(self._slots))
        self.found = dict[Direction, LinkCapacity]()
        """The capacity of the link, in the directions in which the gateway finds it out."""

        for direction, link_bucket in adjustable.items():
            shares_of_link = self._links[direction].shares
            kinds = [kind for kind in AnswerKind if kind.direction == direction]
            self.found[direction] = LinkCapacity(cells, row, link_bucket, shares_of_link, kinds)
            row += ROWS_OF_LINK_CAPACITY
        self._leadership = Leadership(cells, row) if adjustable else None
        self._limiters: dict[tuple[Direction, str], RateLimiter | None] = {}

    def limiter(self, direction: Direction, slot: str) -> RateLimiter | None:
        """Return the passage of a slot's bytes; None: nothing limits them."""
        if slot not in self._slots:
            slot = _OTHER
        key = (direction, slot)
        if key not in self._limiters:
            ceiling, link = self._ceilings.get(key), self._links[direction]
            is_limited = ceiling is not None or link.shares.link is not None
            limiter = RateLimiter(self._slots[slot], ceiling, link, self._clock) if is_limited else None
            self._limiters[key] = limiter
        return self._limiters[key]

    def release(self) -> None:
        """Send pieces that wait under these settings to the new ones."""
        for limiter in self._limiters.values():
            if limiter is not None:
                limiter.release()

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
        if self._leadership is None:
            return
        now = self._clock.monotonic()
        for direction, found in self.found.items():
            found.tell(traffic[direction], now, late_seconds)
        if self._leadership.leads(now):
            for found in self.found.values():
                found.decide(now, self._leadership)

    def window_bytes(self) -> int | None:
        """Return the bytes that may be under way from the origin on each connection; None: nothing limits it."""
        found = self.found.get("read")
        return found.window_bytes(self._clock.monotonic()) if found is not None else None

    def begin_as(self, before: Bandwidth) -> None:
        """Start with the levels of the ceilings of `before`. No process may use these yet."""
        now = self._clock.monotonic()
        for bucket, of_before in self._in_both(before):
            bucket.begin_as(of_before, now)

    def _in_both(self, before: Bandwidth) -> list[tuple[TokenBucket, TokenBucket]]:
        of_before = before._ceilings
        return [(bucket, of_before[key]) for key, bucket in self._ceilings.items() if key in of_before]

    def continue_from(self, before: Bandwidth) -> None:
        """Follow `before` after a change of settings: end its waits, count here its bytes, keep the capacity found."""
        now = self._clock.monotonic()
        before.release()
        if self._is_alone:
            self.begin_as(before)
        for bucket, of_before in self._in_both(before):
            bucket.continue_from(of_before)
        for direction, found in self.found.items():
            if direction in before.found:
                found.continue_from(before.found[direction], now)


_OTHER = ""
"""Stands for the slots without settings."""


def cells_for(ceilings: Sequence[Ceiling], shares: Sequence[BandwidthShare]) -> int:
    guarantees = sum(share.guaranteed_bytes_per_second is not None for share in shares)
    of_slots = len(_DIRECTIONS) * rows_of(len(_slots(ceilings, shares)))
    found = sum(one.bytes_per_second is None for one in ceilings)
    of_found = found * (ROWS_OF_ADJUSTABLE_BUCKET + ROWS_OF_LINK_CAPACITY)
    of_leadership = ROWS_OF_LEADERSHIP if found else 0
    return ROWS_OF_BUCKET * (len(ceilings) - found + guarantees) + of_slots + of_found + of_leadership


def _slots(ceilings: Sequence[Ceiling], shares: Sequence[BandwidthShare]) -> list[str]:
    """Return the names of slots, in the same order in all processes."""
    named = (one.slot for group in (ceilings, shares) for one in group)
    return list(dict.fromkeys((_OTHER, *(name for name in named if name is not None))))
