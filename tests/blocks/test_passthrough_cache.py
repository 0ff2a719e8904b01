"""A cache whose directory cannot be opened: the same cache, with its breaker open for good."""

from __future__ import annotations

import asyncio

from gateway.blocks.cache import PassthroughCache
from gateway.core.model import ByteRange
from gateway.telemetry import metrics
from tests.support.blocks import KIB, TestClock, content_of, make_origin, stored, take, whole
from tests.support.counting import by_label, counted


def test_every_read_goes_to_the_origin() -> None:
    """Again and again, for exactly the bytes that are wanted; they count as misses that were not kept."""

    async def scenario() -> None:
        origin = make_origin()
        cache = PassthroughCache.without_directory(origin, TestClock())
        version, wanted = stored(origin, "a", 300 * KIB), ByteRange(100, 200 * KIB)
        for _ in range(2):
            reader = await cache.open_range(version, wanted)
            assert (reader.outcome, reader.why_missing(None), reader.whole()) == ("miss", "not-kept", None)
            assert await take(reader) == content_of(origin, version, wanted)
        assert origin.count() == 2
        assert (counted(metrics.CACHE_HIT_BYTES), counted(metrics.CACHE_MISS_BYTES)) == (0, 2 * wanted.length)
        assert counted(metrics.CACHE_STORE_UNAVAILABLE) == 2
        assert by_label(metrics.CACHE_DISK_STATE, "state") == {"closed": 1}

    asyncio.run(scenario())


def test_nothing_is_looked_for_in_it() -> None:
    """No call that needs a directory fails for lack of one."""

    async def scenario() -> None:
        origin = make_origin()
        cache = PassthroughCache.without_directory(origin, TestClock())
        version = stored(origin, "a", 10)
        assert cache.warm_span(version, 0, version.size_bytes, slot="default") is None
        assert not cache.holds(version, whole(version), slot="default")
        assert cache.begin_unpinned_get(version.key, 0, {}) is None
        assert cache.why_missing(version, slot="default", before=None) == "not-kept"
        assert cache.isolation.state == "closed"
        await cache.invalidate(version.key)
        await cache.apply_settings(1)
        await cache.close()
        assert origin.count() == 0

    asyncio.run(scenario())
