"""Indexes that keep themselves: complete after a crawl, refreshed, going on when killed, taking back no own write."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.blocks.cache import BlockCache
from gateway.core.model import ObjectKey, ObjectVersion
from gateway.jobs.indexing.crawl import LISTERS_WHILE_BUSY
from gateway.jobs.indexing.indexes import IndexPlan
from gateway.metadata.catalog import HABITS_REREAD_SECONDS
from gateway.metadata.listing.ranges import KeyBound
from gateway.origin.client import OriginRequest, OriginResponse, Purpose
from gateway.policy.slots import Prefix
from gateway.s3.list_result import EMPTY_PAGES_MAX
from gateway.s3.requests import Operation
from gateway.telemetry import metrics
from tests.support.blocks import BUCKET, make_origin, read
from tests.support.counting import by_label, counted
from tests.support.indexing import (
    IMMUTABLE,
    TTL,
    IndexBench,
    SmallPages,
    fill,
    index_bench,
    lists,
    pages_without_end,
)
from tests.support.listing_model import KEY, KEYS
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import AlterBody, Answer, Hold, Unreachable, on
from tests.support.slots import Slot

ONCE = IndexPlan("data", None, listers=4)
EVERY_50_SECONDS = IndexPlan("data", 50.0, listers=4)
FRESH = KeyBound(100.0, 100.0)
LIST = on(Operation.LIST_OBJECTS_V2)


@asynccontextmanager
async def playing(
    directory: Path, *slots: Slot, plan: IndexPlan = EVERY_50_SECONDS, keys: set[str] | None = None, page: int = 5
) -> AsyncIterator[tuple[IndexBench, MemoryOrigin]]:
    """An index over an origin with these keys, in pages of a few."""
    origin = make_origin()
    origin.create_bucket(BUCKET)
    fill(origin, {f"k{number:03}" for number in range(60)} if keys is None else keys)
    through = SmallPages(origin, page)
    async with index_bench(directory, origin, slots or (TTL,), plans=[plan], through=through) as kept:
        yield kept, origin


def there(origin: MemoryOrigin) -> list[str]:
    return [key.decode() for key in origin.buckets[BUCKET].sorted_keys]


@pytest.mark.parametrize("keys", [0, 3])
async def test_a_crawl_ends_though_the_origins_pages_do_not(tmp_path: Path, keys: int) -> None:
    """Empty ones, or the same again and again: it fails, and is begun again as any that fails."""
    async with playing(tmp_path) as (kept, origin):
        origin.inject(LIST, Answer(200, body=pages_without_end(keys)), times=None)
        await kept.until(lambda: counted(metrics.INDEX_CRAWLS, outcome="failed") > 0)
        assert lists(origin) <= 2 * EMPTY_PAGES_MAX


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(KEYS, st.integers(1, 4))
async def test_a_crawl_makes_the_index_complete(keys: set[str], page: int) -> None:
    """Whatever the keys are, none and one included: LIST needs no origin any more, and lists what is there."""
    with tempfile.TemporaryDirectory() as directory:
        async with playing(Path(directory), keys=keys, page=page) as (kept, origin):
            await kept.crawled()
            asked = len(origin.calls)
            assert kept.listed(FRESH) == there(origin)
            assert len(origin.calls) == asked
            assert {call.purpose for call in origin.calls} == {Purpose.REFRESH}
            document = kept.indexes.documents()[0]
            assert (document.complete, document.keys, document.keys_before) == (True, len(keys), len(keys))


async def test_what_others_change_is_found_and_dropped(tmp_path: Path) -> None:
    """An object that was overwritten, or is gone: forgotten by the catalog, its blocks dropped, with the next crawl."""
    async with playing(tmp_path, IMMUTABLE) as (kept, origin):
        await kept.crawled()
        catalog, cache = kept.bench.catalog, kept.bench.cache
        for key in ("k001", "k002", "k003"):
            await read(cache, (await catalog.current(ObjectKey(BUCKET, key), IMMUTABLE, headers={})).version)
        await cache.settle()
        await catalog.settle()
        origin.put(BUCKET, "k001", b"another")
        origin.buckets[BUCKET].remove("k002")
        origin.put(BUCKET, "new", b"x")
        await kept.crawled(2)
        assert kept.listed(FRESH) == there(origin)
        assert catalog.remembered(ObjectKey(BUCKET, "k001"), IMMUTABLE, headers={}) is None
        assert catalog.remembered(ObjectKey(BUCKET, "k002"), IMMUTABLE, headers={}) is None
        assert catalog.remembered(ObjectKey(BUCKET, "k003"), IMMUTABLE, headers={}) is not None
        assert cache.usage().blocks == 1
        assert (counted(metrics.INDEX_CHANGED_KEYS), kept.indexes.documents()[0].changed) == (2, 2)


async def test_9_8_a_crawl_finds_an_etag_of_different_objects(tmp_path: Path) -> None:
    """9.8 Two keys of a page with one ETag and different sizes: nothing is kept under that ETag; one that copies share
    is no sign of anything."""
    async with playing(tmp_path, IMMUTABLE, keys={f"k{number:03}" for number in range(10)}, page=100) as (kept, origin):
        catalog = kept.bench.catalog
        shared, copied = '"0123456789abcdef0123456789abcdef-2"', origin.put(BUCKET, "k010", b"copy")
        origin.put(BUCKET, "k011", b"copy")
        objects = origin.buckets[BUCKET].objects
        for key, body in (("k020", b"one"), ("k021", b"other")):
            origin.put(BUCKET, key, body)
            objects[key] = replace(objects[key], etag=shared)
        await kept.crawled(2)
        await catalog.settle()
        kept.clock.advance(HABITS_REREAD_SECONDS)
        habits = catalog.habits(BUCKET)
        assert not habits.is_distinct(ObjectVersion(ObjectKey(BUCKET, "k030"), shared, 5))
        assert habits.is_distinct(ObjectVersion(ObjectKey(BUCKET, "k010"), copied, 4))


async def test_an_own_write_that_was_looked_at_keeps_its_blocks(tmp_path: Path) -> None:
    """The crawl sees another version than the index knew; the catalog knows that one already."""
    async with playing(tmp_path) as (kept, origin):
        await kept.crawled()
        await write(kept, origin, "k001", b"own")
        catalog, cache = kept.bench.catalog, kept.bench.cache
        await read(cache, (await catalog.current(ObjectKey(BUCKET, "k001"), TTL, headers={})).version)
        await cache.settle()
        await catalog.settle()
        await kept.crawled(2)
        assert cache.usage().blocks == 1
        assert counted(metrics.INDEX_CHANGED_KEYS) == 0


async def test_an_immutable_slot_is_crawled_once(tmp_path: Path) -> None:
    """Unless it says how often: nothing is asked any more, however much time passes."""
    async with playing(tmp_path, IMMUTABLE, plan=ONCE) as (kept, origin):
        await kept.crawled()
        asked = lists(origin)
        kept.clock.advance(1e6)
        for _ in range(20):
            await asyncio.sleep(0.002)
            kept.clock.advance(10.0)
        assert lists(origin) == asked
        assert kept.indexes.documents()[0].next_at is None


@pytest.mark.slow
async def test_the_index_is_never_too_old_while_it_is_kept(tmp_path: Path) -> None:
    """At every moment of a few periods all of it is known, and none of it for longer than the period and a crawl."""
    async with playing(tmp_path) as (kept, _origin):
        await kept.crawled()
        while kept.indexes.documents()[0].crawls < 4:
            assert kept.listed(KeyBound(60.0, 60.0)) is not None
            await asyncio.sleep(0.002)
            kept.clock.advance(0.5)


async def test_a_refresh_asks_for_hardly_more_than_there_is(tmp_path: Path) -> None:
    """Where to cut is known by then: no request brings nothing but to find that out."""
    async with playing(tmp_path, plan=IndexPlan("data", 50.0, listers=32)) as (kept, origin):
        await kept.crawled()
        before = lists(origin)
        await kept.crawled(2)
        assert lists(origin) - before <= 12 + 3


async def test_what_is_voided_is_crawled_again(tmp_path: Path) -> None:
    """A forwarded request that may have changed any key voids the bucket; the next look finds that out."""
    async with playing(tmp_path, IMMUTABLE, plan=ONCE) as (kept, origin):
        await kept.crawled()
        kept.bench.catalog.forget_bucket(BUCKET)
        assert kept.listed() is None
        await kept.crawled(2)
        assert kept.listed() == there(origin)


async def test_a_crawl_that_is_voided_under_way_is_made_good(tmp_path: Path) -> None:
    """Pages asked for before are not kept, and asked for again."""
    async with playing(tmp_path, IMMUTABLE, plan=IndexPlan("data", None, listers=1)) as (kept, origin):
        await kept.until(lambda: lists(origin) >= 5)
        kept.bench.catalog.forget_bucket(BUCKET)
        await kept.until(lambda: kept.indexes.documents()[0].complete)
        assert kept.listed() == there(origin)


@pytest.mark.parametrize("effect", [Answer(503, "SlowDown"), Unreachable()], ids=["slow down", "unreachable"])
async def test_an_origin_that_is_down_is_waited_for(tmp_path: Path, effect: Answer | Unreachable) -> None:
    """Each lister asks again; when that does not help the crawl fails, says so, and goes on later."""
    async with playing(tmp_path) as (kept, origin):
        fault = origin.inject(LIST, effect, times=None)
        await kept.until(lambda: kept.indexes.documents()[0].state == "failing")
        assert kept.indexes.documents()[0].error
        assert by_label(metrics.INDEX_CRAWLS, "outcome") == {"failed": 1}
        fault.times = 0
        await kept.crawled()
        assert kept.listed() == there(origin)
        assert (counted(metrics.INDEX_CRAWLS, outcome="done"), kept.indexes.documents()[0].error) == (1, None)


async def test_a_refusal_is_not_repeated_at_once(tmp_path: Path) -> None:
    """An origin that says no is asked again with longer and longer pauses."""
    async with playing(tmp_path) as (kept, origin):
        origin.inject(LIST, Answer(403, "AccessDenied"), times=None)
        await kept.until(lambda: counted(metrics.INDEX_CRAWLS) >= 4)
        assert lists(origin) == counted(metrics.INDEX_CRAWLS)
        assert kept.indexes.documents()[0].error == "the origin answered 403 AccessDenied to LIST"


async def test_pages_without_keys_are_followed(tmp_path: Path) -> None:
    """Origins that skip deleted versions give nothing but a token."""
    nothing = b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>AA==</NextContinuationToken>"
    origin = make_origin()
    fill(origin, {f"k{number:03}" for number in range(30)})
    origin.inject(LIST, AlterBody(lambda _: nothing + b"</ListBucketResult>"), times=3)
    async with index_bench(tmp_path, origin, through=SmallPages(origin, 5), plans=[EVERY_50_SECONDS]) as kept:
        await kept.crawled()
        assert kept.listed() == there(origin)


async def test_what_a_killed_crawl_had_listed_is_not_listed_again(tmp_path: Path) -> None:
    """The next process asks for what is missing: no page of the other half."""
    origin = make_origin()
    fill(origin, {f"k{number:03}" for number in range(100)})
    through, plans = SmallPages(origin, 5), [IndexPlan("data", 50.0, listers=1)]
    async with index_bench(tmp_path, origin, through=through, plans=plans) as kept:
        stuck = asyncio.Event()
        await kept.until(lambda: lists(origin) >= 10)
        origin.inject(LIST, Hold(asyncio.Event(), stuck), times=None)
        await kept.until(stuck.is_set)
        clock = kept.clock
    first = lists(origin)
    origin.faults.clear()
    async with index_bench(tmp_path, origin, through=through, plans=plans, clock=clock) as kept:
        await kept.crawled()
        assert kept.listed(FRESH) == there(origin)
    assert first >= 10
    assert lists(origin) - first <= 20 - (first - 1) + 1


def shown(kept: IndexBench) -> dict[str, object]:
    """What people are told of the one index that there is."""
    [document] = kept.indexes.documents()
    return {name: getattr(document, name) for name in ("complete", "state", "keys", "keys_before")}


ALL_SHOWN = {"complete": True, "state": "waiting", "keys": 100, "keys_before": 100}


async def test_a_crawl_that_goes_on_where_another_broke_off_tells_of_all_keys(tmp_path: Path) -> None:
    """In the next process, and where the origin was away: what was listed before is part of what there is."""
    origin = make_origin()
    fill(origin, {f"k{number:03}" for number in range(100)})
    through, plans = SmallPages(origin, 5), [IndexPlan("data", 50.0, listers=1)]
    async with index_bench(tmp_path, origin, through=through, plans=plans) as kept:
        await kept.until(lambda: lists(origin) >= 7)
        origin.inject(LIST, Answer(403), times=1)
        await kept.until(lambda: kept.indexes.documents()[0].state == "failing")
        stuck = asyncio.Event()
        await kept.until(lambda: lists(origin) >= 14)
        origin.inject(LIST, Hold(asyncio.Event(), stuck), times=None)
        await kept.until(stuck.is_set)
        clock, landed = kept.clock, shown(kept)
    origin.faults.clear()
    assert landed["keys"] == 5 * (lists(origin) - 2)
    crawled_before = counted(metrics.INDEX_CRAWLED_KEYS)
    async with index_bench(tmp_path, origin, through=through, plans=plans, clock=clock) as kept:
        await kept.crawled()
        assert shown(kept) == ALL_SHOWN
        assert counted(metrics.INDEX_CRAWLED_KEYS) - crawled_before < 50


async def test_slots_that_change_elsewhere_do_not_break_off_a_crawl(tmp_path: Path) -> None:
    """Nothing of what the index keeps, or how, is another. One that is to be kept otherwise begins anew, and goes on
    with what is missing."""
    origin = make_origin()
    fill(origin, {f"k{number:03}" for number in range(100)})
    through, plan = SmallPages(origin, 5), IndexPlan("data", 50.0, listers=1)
    async with index_bench(tmp_path, origin, through=through, plans=[plan]) as kept:
        stuck, resume = asyncio.Event(), asyncio.Event()
        await kept.until(lambda: lists(origin) >= 10)
        origin.inject(LIST, Hold(resume, stuck), times=1)
        await kept.until(stuck.is_set)
        asked, before = lists(origin), shown(kept)
        kept.slots.apply_settings([TTL, Slot("other", Prefix.parse("s3://other/"), "read-only", "strict")])
        await kept.indexes.apply_settings([plan])
        assert shown(kept) == before
        assert lists(origin) == asked
        await kept.indexes.apply_settings([IndexPlan("data", 60.0, listers=1)])
        await kept.crawled()
        assert shown(kept) == ALL_SHOWN
        assert lists(origin) - asked <= 11
        await kept.indexes.apply_settings([])
        assert kept.indexes.documents() == []


async def test_strict_slots_within_are_not_crawled(tmp_path: Path) -> None:
    """Nothing is kept of them; the rest around them is complete."""

    strict = Slot("strict", Prefix.parse(f"s3://{BUCKET}/b/"), "read-write", "strict")
    keys = {"a/1", "b/1", "b0", "b/2", "c/1"}
    async with playing(tmp_path, TTL, strict, keys=keys, page=1) as (kept, _origin):
        await kept.crawled()
        assert kept.indexes.documents()[0].complete
        assert kept.listed(prefix="a/") == ["a/1"]
        assert kept.listed(prefix="c/") == ["c/1"]
        assert kept.listed(prefix="b/") is None


async def write(kept: IndexBench, origin: MemoryOrigin, key: str, body: bytes | None) -> None:
    """An own write, as the operations send one: marked, sent, and over."""
    catalog = kept.bench.catalog
    name = ObjectKey(BUCKET, key)
    own = await catalog.listing.begin_write(BUCKET, [key])
    catalog.forget(name)
    request = OriginRequest("DELETE" if body is None else "PUT", BUCKET, key, body=body or b"")
    async with await origin.send(request) as answer:
        assert answer.status in (200, 204)
    catalog.forget(name)
    await catalog.listing.end_write(own)


class Late:
    """Answers of LIST are held back: what they tell is older than what is written meanwhile."""

    def __init__(self, origin: MemoryOrigin) -> None:
        self._origin = SmallPages(origin, 3)
        self.held: list[asyncio.Event] = []

    async def send(self, request: OriginRequest) -> OriginResponse:
        answer = await self._origin.send(request)
        if request.key is None:
            event = asyncio.Event()
            self.held.append(event)
            await event.wait()
        return answer

    async def aclose(self) -> None:
        return

    def let_go(self, count: int) -> None:
        for event in self.held[:count]:
            event.set()
        del self.held[:count]


STEPS = st.lists(
    st.one_of(st.tuples(KEY, st.sampled_from([b"1", b"22", None])), st.integers(1, 3)), min_size=1, max_size=15
)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(KEYS, STEPS)
def test_no_crawl_takes_back_an_own_write(keys: set[str], steps: list[tuple[str, bytes | None] | int]) -> None:
    """Whenever its pages were asked for, and whenever they come: what the index tells by itself is what was written.

    Keys whose marks are not settled yet are asked about; the index's word on them does not count.
    """

    async def scenario(directory: Path) -> None:
        origin = make_origin()
        origin.create_bucket(BUCKET)
        fill(origin, keys)
        late = Late(origin)
        plans = [IndexPlan("data", 50.0, listers=3)]
        async with index_bench(directory, origin, through=late, plans=plans) as kept:
            await kept.until(lambda: late.held)
            for step in steps:
                if isinstance(step, int):
                    late.let_go(step)
                    await asyncio.sleep(0.002)
                else:
                    await write(kept, origin, *step)
            while not kept.indexes.documents()[0].crawls:
                late.let_go(5)
                await asyncio.sleep(0.002)
                kept.clock.advance(0.05)
            opened = kept.listing._opened
            assert opened is not None
            with opened.dirty.written(BUCKET) as written:
                unsettled = {key.decode() for key in written(b"", b"\xff", 1000)}
            with opened.listing.view(BUCKET) as view:
                assert view is not None
                told = {key.decode() for key, _ in view.read(b"", b"\xff", 1000)}
            assert told - unsettled == set(there(origin)) - unsettled
            assert unsettled <= {step[0] for step in steps if not isinstance(step, int)}

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(scenario(Path(directory)))


async def test_a_crawl_makes_way_for_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While workers fill blocks for those who wait for them, few ask for pages at once."""

    monkeypatch.setattr(BlockCache, "others_fill", lambda _: True)
    origin = make_origin()
    fill(origin, {f"k{number:03}" for number in range(200)})
    late = Late(origin)
    plans = [IndexPlan("data", 50.0, listers=16)]
    async with index_bench(tmp_path, origin, through=late, plans=plans) as kept:
        most = 0
        while not kept.indexes.documents()[0].crawls:
            most = max(most, len(late.held))
            late.let_go(1)
            await asyncio.sleep(0.001)
            kept.clock.advance(0.05)
        assert 0 < most <= LISTERS_WHILE_BUSY
