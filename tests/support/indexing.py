"""Indexes of slots over an origin in memory, in this process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.core.model import Homes
from gateway.jobs.indexing.indexes import Indexes, IndexPlan
from gateway.jobs.job import JobDependencies
from gateway.metadata.listing.index import FoundPage, ListingIndex
from gateway.metadata.listing.pages import ListRequest
from gateway.metadata.listing.ranges import KeyBound
from gateway.origin.client import Origin, OriginRequest, OriginResponse
from gateway.policy.slots import Prefix, Slots
from gateway.s3.requests import Operation
from tests.support.blocks import BUCKET, TestClock
from tests.support.jobs import JobBench, job_bench
from tests.support.memory_origin import MemoryOrigin
from tests.support.slots import Slot

FOR_EVER = KeyBound(math.inf, math.inf)
TTL = Slot("data", Prefix.parse(f"s3://{BUCKET}/"), "read-write", "ttl", 100.0)
IMMUTABLE = Slot("data", Prefix.parse(f"s3://{BUCKET}/"), "read-write", "immutable")


@dataclass(frozen=True)
class IndexBench:
    """What a test needs to watch an index being kept."""

    indexes: Indexes
    bench: JobBench
    clock: TestClock
    slots: Slots

    @property
    def listing(self) -> ListingIndex:
        index = self.bench.catalog.listing
        assert isinstance(index, ListingIndex)
        return index

    async def crawled(self, times: int = 1) -> None:
        """Wait until so many crawls have come to their end, while time passes."""

        def is_over() -> bool:
            document = self.indexes.documents()[0]
            return bool(document.crawls >= times and document.state == "waiting")

        await self.until(is_over)

    async def until(self, holds: object) -> None:
        """Wait for what the indexes are about to bring about; the clock moves on while they sleep."""
        assert callable(holds)
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.002)
                self.clock.advance(0.5)

    def listed(self, bound: KeyBound = FOR_EVER, *, prefix: str = "", bucket: str = BUCKET) -> list[str] | None:
        """All keys as the index lists them, page by page; None: it cannot."""
        keys: list[str] = []
        wanted = ListRequest(prefix.encode(), limit=7)
        while True:
            found = self.listing.find(bucket, wanted, bound, with_owner=False)
            if not isinstance(found, FoundPage):
                return None
            keys += [key.decode() for key, _ in found.page.keys]
            if not found.page.is_truncated:
                return keys
            wanted = ListRequest(prefix.encode(), limit=7, after=found.page.last)


@asynccontextmanager
async def index_bench(
    directory: Path,
    origin: MemoryOrigin,
    slots: Sequence[Slot] = (TTL,),
    *,
    plans: Sequence[IndexPlan] = (IndexPlan("data", 50.0, listers=4),),
    through: Origin | None = None,
    clock: TestClock | None = None,
) -> AsyncIterator[IndexBench]:
    clock = clock or TestClock()
    async with job_bench(directory, origin, through=through, slots=slots, clock=clock) as bench:
        of_now = Slots(slots)
        tools = JobDependencies(
            through or origin, bench.catalog, bench.cache, of_now, clock, bench.snapshots, Homes("memory")
        )
        indexes = Indexes.open(tools, plans)
        try:
            yield IndexBench(indexes, bench, clock, of_now)
        finally:
            await indexes.close()


def lists(origin: MemoryOrigin) -> int:
    """How often the origin was asked for a page."""
    return sum(call.operation is Operation.LIST_OBJECTS_V2 for call in origin.calls)


def fill(origin: MemoryOrigin, keys: Collection[str], body: bytes = b"x") -> None:
    for key in keys:
        origin.put(BUCKET, key, body)


def pages_without_end(keys: int) -> bytes:
    """A page that is followed by itself."""
    entries = "".join(
        f"<Contents><Key>data/{number}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;{number}&quot;</ETag><Size>0</Size></Contents>"
        for number in range(keys)
    )
    truncated = "<IsTruncated>true</IsTruncated><NextContinuationToken>on</NextContinuationToken>"
    return f"<ListBucketResult><Name>{BUCKET}</Name>{truncated}{entries}</ListBucketResult>".encode()


class SmallPages:
    """Stands before an origin, and asks it for pages of a few keys only."""

    def __init__(self, origin: Origin, keys: int) -> None:
        self._origin = origin
        self._keys = keys

    async def send(self, request: OriginRequest) -> OriginResponse:
        if ("list-type", "2") in request.query:
            request = replace(request, query=[*request.query, ("max-keys", str(self._keys))])
        return await self._origin.send(request)

    async def aclose(self) -> None:
        await self._origin.aclose()
