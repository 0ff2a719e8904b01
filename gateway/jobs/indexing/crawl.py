"""A crawl: listers list parts of a slot's key space at the origin, and store them in the listing index.

    range of the key space ─▶ LIST ─▶ records ─▶ ListingIndex.land ─▶ changed versions ─▶ catalog, blocks

A lister holds one page in memory. A page in the index stays, so the next crawl continues an interrupted one: it gets
the ranges that are still missing. A crawl yields to readers: while workers fetch blocks for them, only
LISTERS_WHILE_BUSY listers ask.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import lmdb

from gateway.api import documents as to
from gateway.blocks.cache import BlockCache
from gateway.core.errors import ForebayError, OriginAnswered, store_errors
from gateway.core.model import ObjectKey, ObjectVersion
from gateway.jobs.indexing.key_ranges import CrawlRange, CrawlRanges, KeyRange, SplitPoints, key_before
from gateway.jobs.job import JobDependencies
from gateway.jobs.listing import failure_text, fetch_page, with_retries
from gateway.metadata.catalog import Catalog
from gateway.metadata.listing.pages import key_successor
from gateway.metadata.listing.ranges import Batch, QueryStamp
from gateway.metadata.listing.records import PackedPage, packed_page, unpack
from gateway.origin.client import Purpose
from gateway.policy.slots import Prefix
from gateway.s3.list_result import PageChain
from gateway.telemetry import metrics

State = Literal["starting", "inventory", "crawling", "waiting", "failing"]


@dataclass(slots=True)
class IndexStatus:
    """Times are seconds since 1970.

    `complete`: LIST of the slot's prefix is answered from the index, all of it being known since `known_since` at
    least, until that is `fresh_seconds` ago. `keys` are those that the crawl under way, or the last one, has listed,
    and those that it need not list, being known from one that was broken off; `pages` are what it asked for, and
    `keys_before` the keys of the last crawl that came to its end: about what there is to list. `changed` counts what
    crawls have found changed or gone since the gateway started, `crawls` those that came to their end. `inventory` is
    where to begin from, and `inventory_error` why that could not be done. `refreshing`: a refresh that was asked for is
    not over.
    """

    slot: str
    prefix: str
    fresh_seconds: float
    refresh_seconds: float | None
    state: State = "starting"
    complete: bool = False
    known_since: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    next_at: float | None = None
    keys: int = 0
    pages: int = 0
    keys_before: int | None = None
    crawls: int = 0
    changed: int = 0
    error: str | None = None
    inventory: str | None = None
    inventory_error: str | None = None
    refreshing: bool = False

    def document(self, now: float) -> to.Index:
        """Return the answer of the admin port; `now` is in seconds since 1970."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "fresh_seconds"}
        age_seconds = None if self.known_since is None else max(0.0, now - self.known_since)
        complete = self.complete and (age_seconds is None or age_seconds < self.fresh_seconds)
        return to.Index.model_validate(fields | {"complete": complete, "age_seconds": age_seconds})


LISTERS_WHILE_BUSY = 2

_BUSY_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class CrawlPlan:
    """The key ranges of a crawl, the number of listers, and how far apart in time neighbouring ranges may be joined.

    `finds_changes`: the catalog and the blocks forget keys that the index knew differently.
    """

    slot: str
    prefix: Prefix
    listers: int
    merge_seconds: float
    finds_changes: bool = True


class Crawl:
    """One pass over `parts`. Use `run` once; `progress` follows."""

    def __init__(
        self,
        dependencies: JobDependencies,
        plan: CrawlPlan,
        parts: Sequence[KeyRange],
        split_points: Sequence[bytes],
        progress: IndexStatus,
    ) -> None:
        self._dependencies = dependencies
        self._index = dependencies.catalog.listing
        self._plan = plan
        self._progress = progress
        key_prefix = plan.prefix.key_prefix
        ranges = [CrawlRange(part.start, part.stop, key_before(part.start, key_prefix)) for part in parts]
        self._ranges = CrawlRanges(ranges, split_points)
        self._moved = asyncio.Event()
        self._idle = 0
        self._asking = 0
        self._most_keys = 0
        self.split_points = SplitPoints()

    async def run(self) -> None:
        """List and land all. OriginError: the origin refuses, or is down for long; StoreUnavailable: the disk fails."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._plan.listers):
                    group.create_task(self._lister(), name="index lister")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _lister(self) -> None:
        while self._ranges.left:
            crawl_range = self._ranges.take(self._idle + 1)
            if crawl_range is not None:
                await self._list(crawl_range)
                continue
            self._idle += 1
            await self._moved.wait()
            self._idle -= 1

    async def _list(self, crawl_range: CrawlRange) -> None:
        """All of it, or what others leave of it meanwhile."""
        is_done = False
        while not is_done:
            await self._turn()
            try:
                page, asked = await with_retries(self._dependencies.clock, partial(self._told, crawl_range))
            finally:
                self._asking -= 1
            batch = self._batch(crawl_range, page, asked)
            is_done = self._ranges.listed(crawl_range, [key for key, _ in batch.listed], batch.stop)
            moved, self._moved = self._moved, asyncio.Event()
            moved.set()
            await self._land(batch)

    async def _turn(self) -> None:
        """Wait until one page more may be asked for."""
        while self._asking >= LISTERS_WHILE_BUSY and self._dependencies.blocks.others_fill():
            await self._dependencies.clock.sleep(_BUSY_LOOK_SECONDS)
        self._asking += 1

    async def _told(self, crawl_range: CrawlRange) -> tuple[PackedPage, QueryStamp]:
        """Return a range's next page with a key, skipping pages without one, and when it was asked for."""
        asked, token, chain = self._index.asked(self._plan.prefix.bucket), None, PageChain()
        while True:
            page = await self._page(crawl_range, token)
            first = bisect_left(page.listed, (crawl_range.start, b""))
            if first < len(page.listed) or page.is_cut or page.next_token is None:
                return replace(page, listed=page.listed[first:]), asked
            token = page.next_token
            chain.follow([key for key, _ in page.listed], token)

    async def _page(self, crawl_range: CrawlRange, token: str | None) -> PackedPage:
        told = await fetch_page(
            self._dependencies.origin,
            self._plan.prefix,
            slot=self._plan.slot,
            purpose=Purpose.REFRESH,
            start_after=crawl_range.after,
            token=token,
            with_owner=True,  # version 1 tells owners
        )
        return packed_page(told, crawl_range.stop)

    def _batch(self, crawl_range: CrawlRange, page: PackedPage, asked: QueryStamp) -> Batch:
        """Return the part of the page within the range, whose end another lister may have taken meanwhile."""
        end = bisect_left(page.listed, (crawl_range.stop, b""))
        is_all = page.next_token is None or page.is_cut or end < len(page.listed)
        stop = crawl_range.stop if is_all else min(crawl_range.stop, key_successor(page.listed[-1][0]))
        self._most_keys = max(self._most_keys, end)
        if end and 2 * end >= self._most_keys:  # the ends of ranges are short, and would be too near
            self.split_points.add(page.listed[end - 1][0])
        return Batch(
            self._plan.prefix.bucket,
            crawl_range.start,
            stop,
            page.listed[:end],
            page.templates,
            asked,
            self._plan.merge_seconds,
        )

    async def _land(self, batch: Batch) -> None:
        self._dependencies.catalog.listed_records(batch.bucket, batch.listed)
        with store_errors("the listing index cannot be written", lmdb.Error):
            changed = await self._index.land(batch)
        self._progress.keys += len(batch.listed)
        self._progress.pages += 1
        metrics.INDEX_CRAWLED_KEYS.add(len(batch.listed), self._plan.slot)
        if changed and self._plan.finds_changes:
            dropped = await _drop_changed(self._dependencies.catalog, self._dependencies.blocks, batch, changed)
            self._progress.changed += dropped
            metrics.INDEX_CHANGED_KEYS.add(dropped, self._plan.slot)


def said(error: ForebayError) -> str:
    """Why a crawl has failed, for people."""
    return f"{failure_text(error)} to LIST" if isinstance(error, OriginAnswered) else str(error)


async def _drop_changed(catalog: Catalog, blocks: BlockCache, batch: Batch, changed: Sequence[bytes]) -> int:
    """Drop what is cached of keys that `batch` lists differently than the index did. Return how many were dropped.

    Keys that the catalog knows as listed stay: this gateway wrote them or looked them up, so their blocks are current.
    """
    listed, dropped = dict(batch.listed), 0
    for raw in changed:
        key = ObjectKey(batch.bucket, raw.decode())
        record = listed.get(raw)
        if record is not None:
            entry = unpack(raw, record, batch.templates)
            if catalog.has_learned(ObjectVersion(key, entry.etag, entry.size_bytes)):
                continue
        catalog.forget(key)
        await blocks.invalidate(key)
        dropped += 1
    return dropped
