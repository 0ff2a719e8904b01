"""Keeping slots' indexes complete and fresh: look at what the index knows, crawl what is missing or too old.

No record of a crawl is kept on disk: the index says of each part of the key space when the origin was asked about it.
What a crawl had listed when its process was killed is young enough when it comes back, and is not listed again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import lmdb
import structlog

from gateway.api import documents as to
from gateway.core.errors import ForebayError, store_errors
from gateway.jobs.indexing.crawl import Crawl, CrawlPlan, IndexStatus, said
from gateway.jobs.indexing.inventory import InventoryStart
from gateway.jobs.indexing.key_ranges import LISTED, KeyRange, gaps, ranges_of
from gateway.jobs.job import JobDependencies
from gateway.metadata.entries import ObservedAt
from gateway.metadata.listing.pages import prefix_end
from gateway.metadata.listing.ranges import Interval, KeyBound, bound_of, without
from gateway.metadata.listing.store import UNKNOWN_BOOT
from gateway.policy.slots import Prefix, Slot
from gateway.telemetry import metrics

LOOK_SECONDS = 5.0
"""Seconds between two checks of an index for voided ranges."""

_PAUSE_SECONDS_MAX = 60.0
_REST_SECONDS_MIN = 1.0
_LOOK_SECONDS_MIN = 0.1
_REST_PART = 4
_DONE_PART = 2
_COUNTED_AT_ONCE = 10_000
_UNREADABLE = "the listing index cannot be read"
_log = structlog.get_logger("forebay.index")


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """The index settings of a slot. `refresh_seconds` None: each range is listed once.

    `inventory` names the manifest.json of an S3 Inventory to start from. It is sorted below `scratch`.
    """

    slot: str
    refresh_seconds: float | None
    listers: int = 32
    inventory: str | None = None
    scratch: Path = Path()


@dataclass(frozen=True, slots=True)
class _IndexLook:
    """The state of a slot's index at a moment."""

    known: Sequence[Interval]
    now: ObservedAt

    def within(self, usable: Callable[[ObservedAt], bool]) -> list[Interval]:
        return [one for one in self.known if usable(one.observed_at)]


class SlotIndex:
    """One slot's. `run` never ends; `progress` says how it stands."""

    def __init__(self, dependencies: JobDependencies, slot: Slot, plan: IndexPlan, indexed: Collection[str]) -> None:
        self._dependencies = dependencies
        self._index = dependencies.catalog.listing
        self._slot = slot
        self._plan = plan
        self._parts = ranges_of(dependencies.slots, slot.prefix, indexed)
        self._bound = _bound(dependencies, slot)
        self._asked: Sequence[KeyRange] = ()
        """Ranges to list anew, however young they are."""

        self._is_asked = asyncio.Event()
        self._split_points: Sequence[bytes] = ()
        self._has_begun = False
        self._failures = 0
        self.progress = IndexStatus(
            slot.name, str(slot.prefix), self._bound.fresh_seconds, plan.refresh_seconds, inventory=plan.inventory
        )

    def is_same_as(self, other: SlotIndex) -> bool:
        """Return whether both keep the same keys with the same settings."""
        return self._aim == other._aim

    @property
    def _aim(self) -> object:
        return self._slot.prefix, self._plan, self._parts, self._bound

    @property
    def bucket(self) -> str:
        return self._slot.prefix.bucket

    def parts_in(self, wanted: KeyRange) -> list[KeyRange]:
        """Return what the index keeps of a range."""
        return [
            KeyRange(max(part.start, wanted.start), min(part.stop, wanted.stop))
            for part in self._parts
            if part.start < wanted.stop and wanted.start < part.stop
        ]

    def refresh(self, parts: Sequence[KeyRange]) -> None:
        """List these parts anew at once, or after the crawl under way; until then `progress.refreshing` is true."""
        self._asked = [*self._asked, *parts]
        self.progress.refreshing = True
        self._is_asked.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                rest_seconds = await self._keep()
                self._failures = 0
            except ForebayError as error:
                rest_seconds = self._failed(error)
                self._is_asked.clear()
            await self._rest(rest_seconds)

    async def _rest(self, seconds: float) -> None:
        """Wait until so much time is over, or a refresh is asked for."""
        waits = [asyncio.ensure_future(one) for one in (self._dependencies.clock.sleep(seconds), self._is_asked.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(waits)

    async def _keep(self) -> float:
        """Crawl what is due, and give the seconds until the next look."""
        self._is_asked.clear()
        asked = tuple(self._asked)
        look = await asyncio.to_thread(self._look)
        if asked or self._is_due(look):
            self._stand(look)
            await self._begin()
            look = await asyncio.to_thread(self._look)
            started = self._dependencies.clock.monotonic()
            done = look.within(lambda learned: self._is_done(learned, look.now, _DONE_PART))
            for part in asked:
                done = without(done, part.start, part.stop)
            await self._crawl(gaps(self._parts, done), look)
            took_seconds = self._dependencies.clock.monotonic() - started
            self._asked = self._asked[len(asked) :]
            self.progress.refreshing = bool(self._asked)
            self._warn_if_slow(took_seconds)
            look = await asyncio.to_thread(self._look)
            self._note(look)
            if self._is_due(look):  # voided meanwhile, or the crawl takes longer than the period
                return max(_REST_SECONDS_MIN, took_seconds / _REST_PART)
        self._note(look)
        return min(LOOK_SECONDS, max(_LOOK_SECONDS_MIN, self._seconds_until_due(look)))

    def _is_due(self, look: _IndexLook) -> bool:
        return bool(gaps(self._parts, look.within(lambda learned: self._is_done(learned, look.now, 1))))

    async def _begin(self) -> None:
        """Before the first crawl: what an inventory can tell."""
        if self._has_begun or self._plan.inventory is None:
            return
        self._has_begun = True
        self.progress.state = "inventory"
        plan = self._plan
        try:
            start = InventoryStart(self._dependencies, self._slot, self._plan.inventory, plan.scratch)
            self._split_points = await start.read(self._parts)
        except ForebayError as error:
            self.progress.inventory_error = said(error)
            _log.warning("an inventory cannot be used: the crawl begins without it", slot=plan.slot, error=said(error))

    async def _crawl(self, parts: Sequence[KeyRange], look: _IndexLook) -> None:
        progress = self.progress
        progress.state, progress.keys, progress.pages = "crawling", 0, 0
        progress.keys = await self._count(gaps(self._parts, parts))
        progress.started_at, progress.next_at = self._dependencies.clock.now(), None
        # What an inventory told is known with less detail, and nothing else has been learned from it.
        finds_changes = all(one.observed_at.boot != UNKNOWN_BOOT for one in look.known)
        plan = CrawlPlan(
            self._slot.name, self._slot.prefix, self._plan.listers, self._merge_seconds, finds_changes=finds_changes
        )
        crawl = Crawl(self._dependencies, plan, parts, self._split_points, progress)
        try:
            await crawl.run()
        except ForebayError:
            metrics.INDEX_CRAWLS.add(1, self._slot.name, "failed")
            raise
        metrics.INDEX_CRAWLS.add(1, self._slot.name, "done")
        progress.ended_at, progress.error = self._dependencies.clock.now(), None
        progress.crawls += 1
        progress.keys_before = progress.keys
        if list(parts) == self._parts:
            self._split_points = crawl.split_points.sorted()

    async def _count(self, parts: Sequence[KeyRange]) -> int:
        """Count the known keys of `parts`, from listings before this crawl."""
        bucket, keys = self._slot.prefix.bucket, 0
        for part in parts:
            start: bytes | None = part.start
            while start is not None:  # a little at a time: nobody waits for a thread that is at it when this ends
                with store_errors(_UNREADABLE, lmdb.Error):
                    count, start = await asyncio.to_thread(
                        self._index.count, bucket, start, part.stop, _COUNTED_AT_ONCE
                    )
                keys += count
        return keys

    def _look(self) -> _IndexLook:
        bucket = self._slot.prefix.bucket
        now = self._index.moment(bucket)
        with store_errors(_UNREADABLE, lmdb.Error):
            known = [one for part in self._parts for one in self._index.known(bucket, part.start, part.stop)]
        return _IndexLook(known, now)

    def _stand(self, look: _IndexLook) -> None:
        """Update the state that status shows."""
        progress = self.progress
        usable = look.within(lambda learned: self._bound.allows(learned, look.now))
        progress.complete = not gaps(self._parts, usable)
        progress.known_since = None
        if progress.complete and all(one.observed_at.boot == look.now.boot for one in usable):
            ages = [look.now.seconds - one.observed_at.seconds for one in usable]
            progress.known_since = self._dependencies.clock.now() - max(ages, default=0.0)

    def _note(self, look: _IndexLook) -> None:
        progress, wall = self.progress, self._dependencies.clock.now()
        self._stand(look)
        progress.state = "waiting"
        refresh = self._plan.refresh_seconds
        progress.next_at = None if refresh is None else wall + self._seconds_until_due(look)
        if progress.keys_before is not None:
            metrics.INDEX_KEYS.set(progress.keys_before, self._slot.name)
        metrics.INDEX_KNOWN_SINCE.set(progress.known_since or 0.0, self._slot.name)

    def _failed(self, error: ForebayError) -> float:
        """Seconds until the next try."""
        self._failures += 1
        self.progress.state, self.progress.error = "failing", said(error)
        if self._failures == 1:
            _log.warning("a crawl has failed: it is tried again later", slot=self._slot.name, error=said(error))
        return float(min(_PAUSE_SECONDS_MAX, 2.0**self._failures))

    def _is_done(self, learned: ObservedAt, now: ObservedAt, parts: int) -> bool:
        """Return whether a range is fresh: younger than this part of the refresh period."""
        if self._plan.refresh_seconds is None:
            return learned.boot != UNKNOWN_BOOT
        return learned.boot == now.boot and 0 <= now.seconds - learned.seconds < self._plan.refresh_seconds / parts

    def _seconds_until_due(self, look: _IndexLook) -> float:
        if self._plan.refresh_seconds is None:
            return math.inf
        oldest = min((one.observed_at.seconds for one in look.known), default=look.now.seconds)
        return max(0.0, oldest + self._plan.refresh_seconds - look.now.seconds)

    @property
    def _merge_seconds(self) -> float:
        refresh = math.inf if self._plan.refresh_seconds is None else self._plan.refresh_seconds
        return min(self._bound.merge_seconds, refresh / 8)

    def _warn_if_slow(self, took_seconds: float) -> None:
        fresh, refresh = self._bound.fresh_seconds, self._plan.refresh_seconds
        if refresh is not None and refresh + took_seconds > fresh:
            _log.warning(
                "a crawl takes so long that listings go to the origin: raise metadata_ttl or index_concurrency",
                slot=self._slot.name,
                seconds=round(took_seconds, 1),
            )


def _bound(dependencies: JobDependencies, slot: Slot) -> KeyBound:
    """Return the age bound of a LIST of the slot's prefix, without the slots inside it that the index never answers."""
    within = dependencies.slots.under(slot.prefix.bucket, slot.prefix.key_prefix)
    bound = bound_of(one for one in within if one.consistency in LISTED)
    if bound is None:
        raise ValueError("a bound without strict slots is one")
    return bound


class Indexes:
    """All of them. Use `open`, and `close` at the end: the next `open` goes on with what is missing then."""

    def __init__(self, dependencies: JobDependencies) -> None:
        self._dependencies = dependencies
        self._kept: list[tuple[SlotIndex, asyncio.Task[None]]] = []

    @classmethod
    def open(cls, dependencies: JobDependencies, plans: Sequence[IndexPlan]) -> Self:
        """Begin to keep them."""
        indexes = cls(dependencies)
        indexes._keep_all(indexes._planned(plans))
        return indexes

    async def apply_settings(self, plans: Sequence[IndexPlan]) -> None:
        """Keep these indexes from now on. Unchanged ones continue undisturbed."""
        wanted = self._planned(plans)
        going_on = [one for one in self._kept if not one[1].done() and any(one[0].is_same_as(new) for new in wanted)]
        over, self._kept = [one for one in self._kept if one not in going_on], going_on
        await _end([task for _, task in over])
        self._keep_all(wanted)

    def documents(self) -> list[to.Index]:
        return [index.progress.document(self._dependencies.clock.now()) for index, _ in self._kept]

    def refresh(self, prefix: Prefix) -> tuple[list[str], bool]:
        """List anew at once what indexes keep under a prefix.

        Return the names of their slots, and whether they are complete and keep all that is listed under it from here.
        """
        start = prefix.key_prefix.encode()
        wanted, kept = KeyRange(start, prefix_end(start)), list[KeyRange]()
        slots, is_complete = list[str](), True
        for index, _ in self._kept:
            parts = index.parts_in(wanted) if index.bucket == prefix.bucket else []
            if parts:
                is_complete &= index.progress.complete
                slots.append(index.progress.slot)
                kept += parts
                index.refresh(parts)
        return slots, is_complete and not gaps(self._remembered(prefix), sorted(kept))

    def _remembered(self, prefix: Prefix) -> list[KeyRange]:
        """Return the ranges under a prefix whose objects are remembered."""
        slots, key_prefix = self._dependencies.slots, prefix.key_prefix
        listed = [one.prefix for one in slots.under(prefix.bucket, key_prefix) if one.consistency in LISTED]
        inner = [one if one.bucket and len(one.key_prefix) > len(key_prefix) else prefix for one in listed]
        return [part for one in inner for part in ranges_of(slots, one, ())]

    async def close(self) -> None:
        """Break off the crawls."""
        await _end([task for _, task in self._kept])

    def _planned(self, plans: Sequence[IndexPlan]) -> list[SlotIndex]:
        names = {plan.slot for plan in plans}
        slots = {slot.name: slot for slot in self._dependencies.slots}
        return [SlotIndex(self._dependencies, slots[plan.slot], plan, names) for plan in plans]

    def _keep_all(self, wanted: Sequence[SlotIndex]) -> None:
        """Keep each of them, reusing a SlotIndex that already keeps the same keys."""
        kept = list(self._kept)
        self._kept = []
        for new in wanted:
            same = next((one for one in kept if one[0].is_same_as(new)), None)
            self._kept.append(same or (new, asyncio.create_task(self._keep(new), name="index")))

    async def _keep(self, index: SlotIndex) -> None:
        try:
            await index.run()
        except Exception as error:
            index.progress.state, index.progress.error = "failing", f"{type(error).__name__}: see the log"
            _log.error("an index is not crawled any more", slot=index.progress.slot, exc_info=error)
            raise


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
