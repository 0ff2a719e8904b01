"""One crawl: parts of a slot's key space are listed at the origin by many at once, and landed in the listing index.

    share of the key space ─▶ LIST ─▶ records ─▶ ListingIndex.land ─▶ what was known otherwise ─▶ catalog, blocks

A lister holds one page. What has landed is known for good, so a crawl that is broken off is gone on with by the next,
which is given what is missing still. Yields to whoever waits for bytes now: while the workers fill blocks for readers,
only LISTERS_WHILE_BUSY ask.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import lmdb

from gateway.errors import OriginAnswered, StoreUnavailable
from gateway.jobs.indexing.changes import drop_changed
from gateway.jobs.indexing.landmarks import Landmarks
from gateway.jobs.indexing.parts import Part, key_before
from gateway.jobs.indexing.progress import IndexObserver, Progress
from gateway.jobs.indexing.shares import Share, Shares
from gateway.jobs.patience import patiently
from gateway.jobs.tools import Tools
from gateway.metadata.listing.index import ListingIndex
from gateway.metadata.listing.page_parser import PackedPage, packed_page
from gateway.metadata.listing.pages import key_successor
from gateway.metadata.listing.ranges import Batch, QueryStamp
from gateway.origin.client import OriginRequest, Purpose
from gateway.policy.prefixes import Prefix
from gateway.s3.list_result import PAGE_SIZE_BYTES_MAX
from gateway.s3.xml_reader import error_code_of

LISTERS_WHILE_BUSY = 2

_BUSY_LOOK_SECONDS = 0.05
_ERROR_DOCUMENT_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class CrawlPlan:
    """What is crawled, by how many at once, and how far apart in time neighbours may be known as one.

    `finds_changes`: what the index knew otherwise is to be forgotten elsewhere too.
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
        tools: Tools,
        index: ListingIndex,
        plan: CrawlPlan,
        parts: Sequence[Part],
        landmarks: Sequence[bytes],
        progress: Progress,
        observer: IndexObserver,
    ) -> None:
        self._tools = tools
        self._index = index
        self._plan = plan
        self._progress = progress
        self._observer = observer
        key_prefix = plan.prefix.key_prefix
        shares = [Share(part.start, part.stop, key_before(part.start, key_prefix)) for part in parts]
        self._shares = Shares(shares, landmarks)
        self._moved = asyncio.Event()
        self._idle = 0
        self._asking = 0
        self._most_keys = 0
        self.landmarks = Landmarks()

    async def run(self) -> None:
        """List and land everything.

        Raises OriginError when the origin refuses or is down for long, StoreUnavailable when the disk does not take it.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._plan.listers):
                    group.create_task(self._lister(), name="index lister")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _lister(self) -> None:
        while self._shares.left:
            share = self._shares.take(self._idle + 1)
            if share is not None:
                await self._list(share)
                continue
            self._idle += 1
            await self._moved.wait()
            self._idle -= 1

    async def _list(self, share: Share) -> None:
        """All of it, or what others leave of it meanwhile."""
        is_done = False
        while not is_done:
            await self._turn()
            try:
                page, asked = await patiently(self._tools.clock, partial(self._told, share))
            finally:
                self._asking -= 1
            batch = self._batch(share, page, asked)
            is_done = self._shares.listed(share, [key for key, _ in batch.listed], batch.stop)
            moved, self._moved = self._moved, asyncio.Event()
            moved.set()
            await self._land(batch)

    async def _turn(self) -> None:
        """Wait until one page more may be asked for."""
        while self._asking >= LISTERS_WHILE_BUSY and self._tools.blocks.others_fill():
            await self._tools.clock.sleep(_BUSY_LOOK_SECONDS)
        self._asking += 1

    async def _told(self, share: Share) -> tuple[PackedPage, QueryStamp]:
        """The next page of a share, and when it was asked for. Pages without a key are followed by the next."""
        asked, token = self._index.asked(self._plan.prefix.bucket), None
        while True:
            page = await self._page(share, token)
            first = bisect_left(page.listed, (share.start, b""))
            if first < len(page.listed) or page.is_cut or page.next_token is None:
                return replace(page, listed=page.listed[first:]), asked
            token = page.next_token

    async def _page(self, share: Share, token: str | None) -> PackedPage:
        query = [("list-type", "2"), ("encoding-type", "url"), ("fetch-owner", "true")]  # version 1 tells owners
        query.append(("prefix", self._plan.prefix.key_prefix))
        if token is not None:
            query.append(("continuation-token", token))
        elif share.after:
            query.append(("start-after", share.after))
        request = OriginRequest(
            "GET", self._plan.prefix.bucket, None, query, purpose=Purpose.REFRESH, slot=self._plan.slot
        )
        async with await self._tools.origin.send(request) as response:
            if response.status != 200:
                document = await response.read(_ERROR_DOCUMENT_BYTES_MAX)
                raise OriginAnswered(response.status, list(response.headers.items()), document)
            body = await response.read(PAGE_SIZE_BYTES_MAX)
        return packed_page(body, share.stop)

    def _batch(self, share: Share, page: PackedPage, asked: QueryStamp) -> Batch:
        """What the page tells of the share as it is now: others may have taken its end meanwhile."""
        end = bisect_left(page.listed, (share.stop, b""))
        is_all = page.next_token is None or page.is_cut or end < len(page.listed)
        stop = share.stop if is_all else min(share.stop, key_successor(page.listed[-1][0]))
        self._most_keys = max(self._most_keys, end)
        if end and 2 * end >= self._most_keys:  # the ends of shares are short, and would be too near
            self.landmarks.add(page.listed[end - 1][0])
        return Batch(
            self._plan.prefix.bucket,
            share.start,
            stop,
            page.listed[:end],
            page.forms,
            asked,
            self._plan.merge_seconds,
        )

    async def _land(self, batch: Batch) -> None:
        try:
            changed = await self._index.land(batch)
        except lmdb.Error as error:
            raise StoreUnavailable(f"the listing index cannot be written: {error}") from error
        self._progress.keys += len(batch.listed)
        self._progress.pages += 1
        self._observer.crawled(self._plan.slot, len(batch.listed))
        if changed and self._plan.finds_changes:
            dropped = await drop_changed(self._tools.catalog, self._tools.blocks, batch, changed)
            self._progress.changed += dropped
            self._observer.found_changed(self._plan.slot, dropped)


def said(error: Exception) -> str:
    """Why a crawl has failed, for people."""
    if isinstance(error, OriginAnswered):
        return f"the origin answered {error.status} {error_code_of(error.body) or ''} to LIST".replace("  ", " ")
    return str(error)
