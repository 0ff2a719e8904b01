"""Clause 3.17 of docs/semantics.md: slots that keep an index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.core.model import Homes
from gateway.jobs.indexing.indexes import Indexes, IndexPlan
from gateway.jobs.job import JobDependencies
from gateway.policy.slots import Prefix, Slots
from gateway.s3.requests import Operation
from tests.support.asgi import call
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.listing_scenarios import LIST, ask, keys, source, write
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.faults import Unreachable, on
from tests.support.slots import Slot
from tests.support.snapshots import freeze
from tests.support.waiting import until

PREFIX = Prefix.parse("s3://bucket/")
TTL = Slot("t", PREFIX, "read-write", "ttl", 60.0)
IMMUTABLE = Slot("i", PREFIX, "read-write", "immutable")


@dataclass(frozen=True)
class Kept:
    """A gateway, and the indexes that are kept beside it."""

    gateway: GatewayApp
    indexes: Indexes
    clock: ManualClock

    async def crawled(self, times: int) -> None:
        """Wait until so many crawls are over; time stands still."""
        await until(lambda: self._is_over(times))

    def _is_over(self, times: int) -> bool:
        document = self.indexes.documents()[0]
        return bool(document.crawls >= times and document.state == "waiting")

    async def pass_seconds(self, seconds: float) -> None:
        """Let time pass, a second at a time: whoever sleeps does what is due."""
        for _ in range(round(seconds)):
            await self.clock.advance(1.0)
            await asyncio.sleep(0.005)


def tools_of(gateway: GatewayApp, slots: Slots, clock: ManualClock) -> JobDependencies:
    return JobDependencies(
        gateway.origin, gateway.catalog, gateway.blocks, slots, clock, gateway.snapshots, Homes("memory")
    )


@asynccontextmanager
async def playing(directory: Path, slot: Slot, refresh_seconds: float | None) -> AsyncIterator[Kept]:
    clock = ManualClock()
    async with gateway_app(directory, slots=[slot], clock=clock, allow_unsigned=True) as gateway:
        for key in ("a/1", "a/2", "b", "c/1"):
            gateway.origin.put("bucket", key, b"old")
        tools = tools_of(gateway, Slots([slot]), clock)
        indexes = Indexes.open(tools, [IndexPlan(slot.name, refresh_seconds, 2)])
        try:
            yield Kept(gateway, indexes, clock)
        finally:
            await indexes.close()


async def test_3_17_list_needs_no_origin_behind_a_crawl(tmp_path: Path) -> None:
    """3.17 Nobody has listed anything: whatever is asked for is answered from the index, for as long as it is kept."""
    async with playing(tmp_path, TTL, 30.0) as kept:
        await kept.crawled(1)
        for _ in range(3):
            asked = kept.gateway.origin.count(Operation.LIST_OBJECTS_V2)
            for query in ("list-type=2", "list-type=2&prefix=a/", "delimiter=/"):
                assert source(await ask(kept.gateway, f"/bucket?{query}")) == "hit"
            assert kept.gateway.origin.count(Operation.LIST_OBJECTS_V2) == asked
            crawls = kept.indexes.documents()[0].crawls
            await kept.pass_seconds(31)
            await kept.crawled(crawls + 1)


async def test_3_17_nothing_listed_is_older_than_the_bound(tmp_path: Path) -> None:
    """3.17 A crawl that does not come about makes nothing older: the origin is asked, as without an index."""
    async with playing(tmp_path, TTL, 30.0) as kept:
        await kept.crawled(1)
        down = kept.gateway.origin.inject(on(Operation.LIST_OBJECTS_V2), Unreachable(), times=None)
        kept.gateway.origin.put("bucket", "new", b"x")
        await kept.pass_seconds(59)
        assert source(await ask(kept.gateway, LIST)) == "hit"
        await kept.pass_seconds(2)
        assert (await ask(kept.gateway, LIST)).status == 503
        assert not kept.indexes.documents()[0].complete
        down.times = 0
        assert "new" in await keys(kept.gateway)


async def test_3_17_own_writes_are_listed_at_once(tmp_path: Path) -> None:
    """3.17 Between crawls, and whatever a crawl finds."""
    async with playing(tmp_path, TTL, 30.0) as kept:
        await kept.crawled(1)
        await write(kept.gateway, "PUT", "/bucket/own", b"x")
        await write(kept.gateway, "DELETE", "/bucket/b")
        expected = ["a/1", "a/2", "c/1", "own"]
        assert await keys(kept.gateway) == expected
        await kept.pass_seconds(31)
        await kept.crawled(2)
        answer = await ask(kept.gateway, LIST)
        assert source(answer) == "hit"
        assert await keys(kept.gateway) == expected


async def test_3_17_what_others_changed_is_found_in_an_immutable_slot_too(tmp_path: Path) -> None:
    """3.17 Within the period and a crawl: GET has the new version, and what is gone is gone."""
    async with playing(tmp_path, IMMUTABLE, 30.0) as kept:
        gateway = kept.gateway
        await kept.crawled(1)
        for key in ("a/1", "b"):
            assert (await call(gateway.app, "GET", f"/bucket/{key}", sign=False)).body == b"old"
        await gateway.blocks.settle()
        await gateway.catalog.settle()
        gateway.origin.put("bucket", "a/1", b"new")
        gateway.origin.buckets["bucket"].remove("b")
        assert (await call(gateway.app, "GET", "/bucket/a/1", sign=False)).body == b"old"
        await kept.pass_seconds(31)
        await kept.crawled(2)
        assert (await call(gateway.app, "GET", "/bucket/a/1", sign=False)).body == b"new"
        assert (await call(gateway.app, "GET", "/bucket/b", sign=False)).status == 404
        assert await keys(gateway) == ["a/1", "a/2", "c/1"]


async def test_3_14_a_crawl_around_a_frozen_slot_leaves_its_blocks_alone(tmp_path: Path) -> None:
    """3.14 What a snapshot holds stays cached, though the index of the slot around it finds it changed."""
    frozen = Slot("f", Prefix.parse("s3://bucket/a/"), "read-only", "snapshot", snapshot="old")
    clock = ManualClock()
    async with gateway_app(tmp_path, slots=[TTL, frozen], clock=clock, allow_unsigned=True) as gateway:
        gateway.origin.put("bucket", "a/1", b"old")
        gateway.origin.put("bucket", "b", b"old")
        await freeze(gateway, "old", "s3://bucket/a/")
        tools = tools_of(gateway, Slots([TTL, frozen]), clock)
        indexes = Indexes.open(tools, [IndexPlan(TTL.name, 30.0, 2)])
        kept = Kept(gateway, indexes, clock)
        try:
            await kept.crawled(1)
            for key in ("a/1", "b"):
                assert (await ask(gateway, f"/bucket/{key}")).body == b"old"
                gateway.origin.put("bucket", key, b"new")
            await kept.pass_seconds(31)
            await kept.crawled(2)
            asked = gateway.origin.count(Operation.GET_OBJECT)
            assert (await ask(gateway, "/bucket/a/1")).body == b"old"
            assert gateway.origin.count(Operation.GET_OBJECT) == asked
            assert (await ask(gateway, "/bucket/b")).body == b"new"
        finally:
            await indexes.close()
