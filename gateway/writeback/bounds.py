"""Bounds on the data that only this node has: a size for each slot, and an age.

The size counts bodies as clients know them; the disk also needs room for their checksums.

A body's length is reserved, where all workers see it, before any of it is read, and until the journal counts its write.
So neither many bodies at once nor many workers exceed the size. A body without room waits in line while the flush may
make some; the caller decides what happens to it then.

Reserved bytes take room before they arrive, so credentials share it: where several write to a slot, the arriving bodies
of one take no more than they leave free.

While the buffer fills, acknowledgements wait, so that writers slow to the speed of the flush. The flush sends the
oldest writes first. So it empties a buffer of `used` bytes, the oldest `age` seconds old, at about `used / age` bytes a
second, and needs a body's length over that rate for the body. (In a burst's first seconds nothing is old, and the rate
seems too high: hence FLUSH_BYTES_PER_SECOND.) From BACKPRESSURE_FROM on, a write waits for its own flush time, times a
factor that grows as the room shrinks: where the factor is the number of writers, the buffer fills as fast as it
empties.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

import structlog

from gateway.core import cancellation
from gateway.core.clock import Clock, Moment
from gateway.core.errors import BufferUnavailable, ClientDisconnected
from gateway.policy.slots import Slot
from gateway.telemetry import metrics
from gateway.telemetry.metric_kinds import GONE
from gateway.writeback.journal.files import Usage
from gateway.writeback.journal.journal import Journal
from gateway.writeback.room import MARGIN_BYTES, DiskRoom, Reservations, on_disk

_log = structlog.get_logger("forebay.writeback")

LOOK_SECONDS = 0.02
"""Seconds between two attempts to give waiting bodies room."""

EXPOSURE_SECONDS = 1.0
"""Seconds between two exposure reports."""

LOCAL_SECONDS = 1.0
"""Seconds between two attempts to make room from local objects, or from uploads that the origin has ended."""

STAYS_SECONDS = 60.0
"""Seconds for which local objects are not removed for room: they may be half of a checkpoint that is being saved."""

TROUBLE_SECONDS = 5.0
"""Seconds for which bodies do not try the disk again after it has failed."""

BACKPRESSURE_FROM = 0.75
"""The fill of the buffer, or of the allowed exposure, from which on acknowledgements wait."""

FLUSH_BYTES_PER_SECOND = 100e6
"""No flush is expected to be faster: an origin's usual share for one node, and near enough for any."""

DELAY_SECONDS_MAX = 5.0
"""Clients give up after some 60 seconds without an answer."""

RETRY_SECONDS_MAX = 30


def delay_seconds(size_bytes: int, used_bytes: int, allowed_bytes: int, age_seconds: float | None) -> float:
    """Return the seconds for which an acknowledgement waits.

    `age_seconds` None: nothing is on its way to the origin, so waiting would make no room.
    """
    fill = used_bytes / allowed_bytes
    if age_seconds is None or fill < BACKPRESSURE_FROM or used_bytes <= 0:
        return 0.0
    strength = min(0.999, (fill - BACKPRESSURE_FROM) / (1 - BACKPRESSURE_FROM))
    backlog_seconds = max(0.0, age_seconds) / used_bytes
    flush_seconds = size_bytes * max(backlog_seconds, 1 / FLUSH_BYTES_PER_SECOND)
    return min(DELAY_SECONDS_MAX, flush_seconds * strength / (1 - strength))


def retry_after_seconds(size_bytes: int, used_bytes: int, age_seconds: float | None) -> int:
    """Return after how many seconds to retry a refused write: when the flush will probably have made room."""
    if age_seconds is None or used_bytes <= 0:
        return RETRY_SECONDS_MAX // 3
    return max(1, min(RETRY_SECONDS_MAX, round(size_bytes * age_seconds / used_bytes)))


class Bound(StrEnum):
    """The reason why a write is not taken."""

    FULL = "full"
    SHARE = "share"
    """Its credential's arriving bodies leave too little to others."""

    DISK = "disk"
    """The file system has no room, or has just failed."""

    SIZE = "size"
    """It is larger than the whole buffer."""

    EXPOSURE_BYTES = "exposure-bytes"
    EXPOSURE_AGE = "exposure-age"

    @property
    def passes(self) -> bool:
        return self in (Bound.FULL, Bound.SHARE, Bound.DISK)


def _tell(
    name: str, usage: Usage, used_bytes: int = 0, oldest_seconds: float | None = None, slot: Slot | None = None
) -> None:
    """Set the metrics of a slot: `used_bytes` are pending, reserved and local. None: nothing is on its way."""
    metrics.WRITEBACK_BUFFER_BYTES.set((slot and slot.buffer_bytes) or 0, name)
    metrics.WRITEBACK_EXPOSURE_BYTES.set((slot and slot.unflushed_bytes_max) or 0, name)
    metrics.WRITEBACK_USED_BYTES.set(used_bytes, name)
    metrics.WRITEBACK_PENDING_BYTES.set(usage.unsent_bytes, name)
    metrics.WRITEBACK_PENDING_OBJECTS.set(usage.objects - usage.local_objects, name)
    metrics.WRITEBACK_LOCAL_BYTES.set(usage.local_bytes, name)
    metrics.WRITEBACK_LOCAL_OBJECTS.set(usage.local_objects, name)
    metrics.WRITEBACK_OLDEST_SECONDS.set(oldest_seconds or 0.0, name)


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts that the bounds of all slots share in a process."""

    journal: Journal
    reservations: Reservations
    disk: DiskRoom
    clock: Clock

    def age_seconds(self, slot: str) -> float | None:
        """Return the age of a slot's oldest write that is on its way to the origin; None: there is none."""
        at = self.journal.read(lambda tx: tx.writes.oldest(slot))
        return None if at is None else max(0.0, Moment.of(self.clock).since(at)[0])


SHARED_SECONDS = 600.0
"""Seconds after its last write for which a credential counts among those that share a slot."""

_CREDENTIALS_MAX = 1024


@dataclass(eq=False, slots=True)
class _Waiter:
    credential: str
    size_bytes: int
    deadline: float
    told: asyncio.Future[Bound | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SlotBounds:
    """The bounds of one slot in one process. Event loop only; BufferUnavailable when the journal cannot be read."""

    def __init__(self, slot: Slot, shared: Shared) -> None:
        self.trouble_until = 0.0
        self._look_at_uploads_at = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._shared = shared
        self._row = shared.reservations.row(slot.name)
        self._waiting: deque[_Waiter] = deque()
        self._looking_after: asyncio.Task[None] | None = None
        self._arriving: Counter[str] = Counter()
        self._seen: OrderedDict[str, float] = OrderedDict()
        self.apply_settings(slot)

    def apply_settings(self, slot: Slot) -> None:
        self.slot = slot
        given = (slot.buffer_bytes, slot.unflushed_bytes_max)
        self._allowed_bytes = min((one for one in given if one is not None), default=None)

    def used_bytes(self) -> int:
        """Return the bytes of acknowledged and arriving writes: never too few, for a moment too many.

        Reservations are read first: a body that moves to the journal in between is counted twice, not missed.
        """
        arriving_bytes = self._shared.reservations.total(self._row)
        return arriving_bytes + self.usage().staged_bytes

    def usage(self) -> Usage:
        return self._shared.journal.read(lambda tx: tx.files.usage(self.slot.name))

    def tell_exposure(self) -> None:
        _tell(self.slot.name, self.usage(), self.used_bytes(), self.age_seconds(), self.slot)

    def unused_bytes(self) -> int:
        """Return the bytes that the slot may still write to the disk."""
        return max(0, (self.slot.buffer_bytes or 0) - self.usage().staged_bytes)

    def age_seconds(self) -> float | None:
        return self._shared.age_seconds(self.slot.name)

    def now(self, size_bytes: int = 0) -> Bound | None:
        """Return why `size_bytes` more would not be taken now; None if they would."""
        used_bytes, limit_bytes = self.used_bytes() + size_bytes, self.slot.unflushed_bytes_max
        limit_seconds = self.slot.unflushed_age_seconds_max
        if limit_seconds is not None and (self.age_seconds() or 0.0) > limit_seconds:
            return Bound.EXPOSURE_AGE
        if limit_bytes is not None and used_bytes - self.usage().local_bytes > limit_bytes:
            return Bound.EXPOSURE_BYTES
        if self.slot.buffer_bytes is not None and used_bytes > self.slot.buffer_bytes:
            return Bound.FULL
        return None if self._disk_takes(size_bytes) else Bound.DISK

    async def take(self, credential: str, size_bytes: int, patience_seconds: float) -> Bound | None:
        """Reserve room for a body, waiting up to `patience_seconds`, or return why there is none."""
        if self.slot.buffer_bytes is not None and size_bytes > self.slot.buffer_bytes:
            return Bound.SIZE
        now = self._shared.clock.monotonic()
        self._note(credential, now)
        bound = self._try(credential, size_bytes) if not self._waiting else Bound.FULL
        if bound in (Bound.FULL, Bound.DISK) and not self._waiting and await self._remove_local(size_bytes):
            bound = self._try(credential, size_bytes) if not self._waiting else Bound.FULL
        if bound is not None:
            self.look_at_uploads()
        if bound is None or not bound.passes or patience_seconds <= 0:
            return bound
        waiter = _Waiter(credential, size_bytes, now + patience_seconds)
        self._waiting.append(waiter)
        if self._looking_after is None:
            self._looking_after = asyncio.create_task(self._look_after(), name=f"room of {self.slot.name}")
        try:
            with cancellation.turn():
                return await waiter.told
        except (asyncio.CancelledError, ClientDisconnected):
            self._forget(waiter)
            raise

    def look_at_uploads(self) -> None:
        """Ask the reconciler to look for uploads that the origin has ended, whose room a body needs."""
        now = self._shared.clock.monotonic()
        if now >= self._look_at_uploads_at:
            self._look_at_uploads_at = now + LOCAL_SECONDS
            self._asking = asyncio.create_task(self._ask_for_uploads(), name=f"uploads of {self.slot.name}")

    async def _ask_for_uploads(self) -> None:
        with suppress(BufferUnavailable):  # the journal's writers report it
            at = self._shared.clock.now()
            await self._shared.journal.change(lambda tx: tx.turns.look_at_uploads(self.slot.name, at))

    async def _remove_local(self, size_bytes: int) -> bool:
        """Remove local objects, oldest first, until `size_bytes` fit. Return whether any was removed.

        False if the journal cannot be written: its writers report that.
        """
        oldest = self._shared.journal.read(lambda tx: tx.local.oldest(self.slot.name))
        now = Moment.of(self._shared.clock)
        if oldest is None or now.passed_since(oldest) < STAYS_SECONDS:
            return False
        over_bytes = size_bytes
        if self.slot.buffer_bytes is not None:
            over_bytes = max(size_bytes, self.used_bytes() + size_bytes - self.slot.buffer_bytes)
        objects = removed_bytes = 0
        with suppress(BufferUnavailable):
            objects, removed_bytes = await self._shared.journal.change(
                lambda tx: tx.local.remove(self.slot.name, now, over_bytes, STAYS_SECONDS)
            )
        if objects:
            _log.info(
                "objects that were not to be sent were removed to make room",
                slot=self.slot.name,
                objects=objects,
                bytes=removed_bytes,
            )
        return objects > 0

    def give_back(self, credential: str, size_bytes: int) -> None:
        """Release the room of a body whose write is in the journal, or never will be."""
        self._shared.reservations.add(self._row, -size_bytes)
        self._arriving[credential] -= size_bytes
        if not self._arriving[credential]:
            del self._arriving[credential]

    @property
    def is_awaited(self) -> bool:
        return bool(self._waiting)

    def delay_seconds(self, size_bytes: int) -> float:
        """Return the seconds for which the acknowledgement of `size_bytes` waits."""
        if self._allowed_bytes is None:
            return 0.0
        used_bytes, from_bytes = self.used_bytes(), BACKPRESSURE_FROM * self._allowed_bytes
        if used_bytes >= from_bytes:
            used_bytes -= self.usage().local_bytes  # they give way at once
        if used_bytes < from_bytes:
            return 0.0
        return delay_seconds(size_bytes, used_bytes, self._allowed_bytes, self.age_seconds())

    def retry_after_seconds(self, size_bytes: int) -> int:
        return retry_after_seconds(size_bytes, self.used_bytes(), self.age_seconds())

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        if self._looking_after is not None:
            self._looking_after.cancel()
            for waiter in self._waiting:
                waiter.told.cancel()
            await asyncio.gather(self._looking_after, return_exceptions=True)

    def _try(self, credential: str, size_bytes: int) -> Bound | None:
        if not self._leaves_enough(credential, size_bytes):
            return Bound.SHARE
        self._shared.reservations.add(self._row, size_bytes)
        self._arriving[credential] += size_bytes
        bound: Bound | None = Bound.DISK
        try:
            bound = self.now()
        finally:
            if bound is not None:
                self.give_back(credential, size_bytes)
        return bound

    def _leaves_enough(self, credential: str, size_bytes: int) -> bool:
        """Return whether a credential's arriving bodies leave as much free as they take, where credentials share."""
        if self.slot.buffer_bytes is None or len(self._seen) < 2:
            return True
        return self._arriving[credential] + size_bytes <= self.slot.buffer_bytes - self.used_bytes() - size_bytes

    def _note(self, credential: str, now: float) -> None:
        self._seen[credential] = now
        self._seen.move_to_end(credential)
        while len(self._seen) > _CREDENTIALS_MAX or next(iter(self._seen.values())) < now - SHARED_SECONDS:
            self._seen.popitem(last=False)

    def _disk_takes(self, size_bytes: int) -> bool:
        now = self._shared.clock.monotonic()
        if now < self.trouble_until or self._shared.journal.has_failed:
            return False
        with suppress(OSError):  # then it takes nothing
            return self._shared.disk.takes(on_disk(self._shared.reservations.total_of_all() + size_bytes), now)
        return False

    async def _look_after(self) -> None:
        again_at = self._shared.clock.monotonic() + LOCAL_SECONDS
        try:
            while self._waiting:
                await self._shared.clock.sleep(LOOK_SECONDS)
                self._serve()
                if self._waiting and self._shared.clock.monotonic() >= again_at:
                    await self._remove_local(self._waiting[0].size_bytes)
                    self.look_at_uploads()
                    again_at = self._shared.clock.monotonic() + LOCAL_SECONDS
        finally:
            self._looking_after = None

    def _serve(self) -> None:
        """Serve waiters in order of arrival, but skip those whose credential has its share."""
        now, full, have_their_share = self._shared.clock.monotonic(), None, set[str]()
        waiters, self._waiting = self._waiting, deque()
        for waiter in waiters:
            if waiter.told.cancelled():
                continue
            bound: Bound | None = full
            if full is None:  # once full, do not ask the journal for each waiter
                bound = Bound.SHARE
                if waiter.credential not in have_their_share:
                    try:
                        bound = self._try(waiter.credential, waiter.size_bytes)
                    except BufferUnavailable as error:
                        waiter.told.set_exception(error)
                        continue
            if bound is Bound.SHARE:
                have_their_share.add(waiter.credential)
            elif bound is not None and bound.passes:
                full = bound
            if bound is not None and bound.passes and now < waiter.deadline:
                self._waiting.append(waiter)
            else:
                waiter.told.set_result(bound)

    def _forget(self, waiter: _Waiter) -> None:
        """Drop a waiter whose request is over, and release the room that it was just given."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        elif not waiter.told.cancelled() and waiter.told.exception() is None and waiter.told.result() is None:
            self.give_back(waiter.credential, waiter.size_bytes)


class Bounds:
    """The bounds of every slot that writes back, in one process."""

    def __init__(self, slots: Iterable[Slot], shared: Shared) -> None:
        self._shared = shared
        self._clock = shared.clock
        self._told_until = float("-inf")
        self._is_left_told = False
        self._of = {slot.name: SlotBounds(slot, shared) for slot in slots}
        self._gone: list[SlotBounds] = []

    def apply_settings(self, slots: Sequence[Slot]) -> None:
        """Set the slots that write back. Bodies that wait in another slot keep waiting, under its old bounds."""
        gone, self._of = self._of, {}
        for slot in slots:
            one = gone.get(slot.name)
            if one is None:
                one = SlotBounds(slot, self._shared)
            else:
                one.apply_settings(slot)
            self._of[slot.name] = one
        left = (one for name, one in gone.items() if name not in self._of)
        self._gone = [one for one in (*self._gone, *left) if one.is_awaited]

    def of(self, slot: str) -> SlotBounds | None:
        """Return the bounds of a slot; None if it no longer writes back."""
        return self._of.get(slot)

    async def tell_exposure(self) -> None:
        """Set the metrics of all slots every second, and log when the disk fills up; in one process of a gateway."""
        was_full, told = False, set[str]()
        while True:
            with suppress(BufferUnavailable):  # the journal's writers report it
                for one in self._of.values():
                    one.tell_exposure()
                for name in told - self._of.keys():
                    _tell(name, Usage())
                self._tell_left_behind()
                told |= self._of.keys()
            is_full = bool(self._of) and self._is_disk_full()
            metrics.WRITEBACK_DISK_FULL.set(is_full)
            if is_full and not was_full:
                _log.warning(
                    "the disk is full: writes are not acknowledged here, they go to the bucket",
                    room_needed_bytes=MARGIN_BYTES,
                )
            elif was_full and not is_full:
                _log.warning("the disk has room again: writes are acknowledged here")
            was_full = is_full
            await self._clock.sleep(EXPOSURE_SECONDS)

    def _tell_left_behind(self) -> None:
        """Tell what slots have here that do not write back any more, all of them together."""
        usages = self._shared.journal.read(lambda tx: tx.files.usages())
        left = {slot: usage for slot, usage in usages.items() if slot not in self._of}
        usage = Usage(*map(sum, zip(Usage(), *left.values(), strict=True)))
        if usage != Usage() or self._is_left_told:
            self._is_left_told = True
            oldest_seconds = max((self._shared.age_seconds(slot) or 0.0 for slot in left), default=0.0)
            _tell(GONE, usage, usage.staged_bytes, oldest_seconds)

    def _is_disk_full(self) -> bool:
        """Return whether the disk has no room even for an empty body; its other faults are reported elsewhere."""
        arriving_bytes = on_disk(self._shared.reservations.total_of_all())
        with suppress(OSError):
            return not self._shared.disk.takes(arriving_bytes, self._clock.monotonic())
        return False

    def unused_bytes(self) -> int:
        """Return the bytes of disk to keep for the buffers: their unwritten bytes, and twice the journal's margin.

        The journal's log and small files grow while the buffer fills; with one margin, the last body would wait until
        the cache has made room.
        """
        return 2 * MARGIN_BYTES + on_disk(sum(one.unused_bytes() for one in self._of.values()))

    def trouble(self, error: Exception) -> None:
        """Leave the disk alone for a moment after it has failed to take something. Log it once in that time."""
        now = self._clock.monotonic()
        if now >= self._told_until:
            self._told_until = now + TROUBLE_SECONDS
            _log.error("the disk has refused a write; nothing of it was acknowledged", error=str(error))
        for one in self._of.values():
            one.trouble_until = now + TROUBLE_SECONDS

    async def close(self) -> None:
        for one in (*self._of.values(), *self._gone):
            await one.close()
