"""Ranges for other nodes: complete before they are sent, their checksums as the origin's bytes had them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

from gateway.blocks.complete_ranges import CompleteRange, CompleteRanges
from gateway.core.errors import OriginBusy
from gateway.core.model import ByteRange, PinnedFileSpan
from gateway.origin.client import Purpose
from gateway.telemetry import metrics
from tests.support.blocks import KIB, MIB, content_of, make_origin, open_cache, stored
from tests.support.blocks import bytes_of as of_piece
from tests.support.counting import by_label
from tests.support.peers import packed

BLOCK = 2 * MIB
CHUNK = 64 * KIB


async def bytes_of(complete: CompleteRange | None) -> bytes:
    """Return the bytes, read as the server reads them; the checksums must be theirs."""
    assert complete is not None
    body = complete.body
    if isinstance(body, PinnedFileSpan):
        async with aclosing(body.span.read()) as pieces:
            content = b"".join([bytes(piece) async for piece in pieces])
        body.close()
    elif isinstance(body, bytes):
        content = body
    else:
        assert complete.reader is not None
        content = b""
        async with aclosing(body):
            async for piece in body:
                content += of_piece(piece)
    assert packed(content) == complete.checksums
    return content


RANGES: Sequence[tuple[int, int]] = [
    (0, BLOCK - 1),
    (CHUNK, BLOCK - 1),
    (0, CHUNK - 1),
    (3 * CHUNK, 5 * CHUNK - 1),
    (BLOCK, BLOCK + 299_999),
]


@pytest.mark.parametrize("is_mappable", [True, False])
def test_every_range_has_the_checksums_of_its_own_chunks(tmp_path: Path, *, is_mappable: bool) -> None:
    """Also where the system cannot tell what stays in memory: then each piece is read and verified as it is sent."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "key", BLOCK + 300_000)
        async with open_cache(tmp_path, origin, block_size_bytes=BLOCK) as cache:
            cache._dependencies.directory.store._maps_files = is_mappable
            ranges: CompleteRanges = cache.complete_ranges()
            for was_cached in (False, True):
                for first, last in RANGES if was_cached else ((0, BLOCK - 1), (BLOCK, BLOCK + 299_999)):
                    wanted = ByteRange(first, last)
                    complete = await ranges.get(version, wanted, slot="default", purpose=Purpose.LIVE)
                    assert await bytes_of(complete) == content_of(origin, version, wanted)
                    assert complete is not None
                    assert complete.was_cached is was_cached
                await cache.settle()
            at_once = ranges.now(version, ByteRange(0, BLOCK - 1), slot="default")
            assert (at_once is not None) is is_mappable
            if at_once is not None:
                await bytes_of(at_once)

    asyncio.run(scenario())


def test_the_purpose_of_another_node_decides_on_whose_account_a_fetch_goes(tmp_path: Path) -> None:
    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "key", 3 * BLOCK)
        async with open_cache(tmp_path, origin, block_size_bytes=BLOCK, fills_max=3) as cache:
            ranges = cache.complete_ranges()
            for _ in range(2):  # more than may be read ahead at once, one after the other
                for number, purpose in enumerate((Purpose.READAHEAD, Purpose.WARM, Purpose.LIVE)):
                    wanted = ByteRange(number * BLOCK, (number + 1) * BLOCK - 1)
                    await bytes_of(await ranges.get(version, wanted, slot="default", purpose=purpose))
            purposes = [seen.purpose for seen in origin.calls]
            assert purposes == [Purpose.READAHEAD, Purpose.WARM, Purpose.LIVE]
            assert cache._dependencies.fetches._own.ahead == 0

    asyncio.run(scenario())


def test_nothing_is_read_ahead_and_no_readers_bytes_are_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "key", 8 * BLOCK)
        async with open_cache(tmp_path, origin, block_size_bytes=BLOCK) as cache:
            ranges = cache.complete_ranges()
            for number in range(4):
                wanted = ByteRange(number * BLOCK, (number + 1) * BLOCK - 1)
                await bytes_of(await ranges.get(version, wanted, slot="default", purpose=Purpose.LIVE))
            await cache.settle()
            assert len(origin.calls) == 4
            assert not by_label(metrics.CACHE_HIT_BYTES)
            assert not by_label(metrics.CACHE_MISS_BYTES)

    asyncio.run(scenario())


def test_a_large_range_without_room_on_the_disk_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "key", BLOCK)
        async with open_cache(tmp_path, origin, block_size_bytes=BLOCK, capacity_bytes=MIB) as cache:
            ranges = cache.complete_ranges()
            with pytest.raises(OriginBusy):
                await ranges.get(version, ByteRange(0, BLOCK - 1), slot="default", purpose=Purpose.LIVE)
            wanted = ByteRange(0, MIB - 1)
            small = await ranges.get(version, wanted, slot="default", purpose=Purpose.LIVE)
            assert await bytes_of(small) == content_of(origin, version, wanted)

    asyncio.run(scenario())
