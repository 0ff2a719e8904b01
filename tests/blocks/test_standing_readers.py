"""Readers that stand still in the midst of a small block: they hold a place in a file, not the block."""

from __future__ import annotations

import errno
import os
import tracemalloc
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from gateway.blocks import layout
from gateway.blocks.cache import BlockCache, PassthroughCache
from gateway.blocks.reader import RangeReader
from gateway.blocks.small_block_fetch import MAPPED_BYTES_MIN
from gateway.core.errors import StoreUnavailable
from gateway.core.model import BodyStream, BorrowedBuffer, ByteRange, FileSpan, ObjectKey, ObjectVersion
from gateway.telemetry import metrics
from tests.support.blocks import (
    BUCKET,
    KIB,
    MIB,
    TestClock,
    block_files,
    bytes_of,
    content_of,
    drop_page_cache,
    make_origin,
    open_cache,
    stored,
    take,
    whole,
)
from tests.support.counting import by_label, counted
from tests.support.memory_origin import MemoryOrigin
from tests.support.waiting import until

SMALL: dict[str, Any] = {"small_object_bytes_max": MIB, "block_size_bytes": MIB, "capacity_bytes": 4096 * MIB}
TAKEN = 90 * KIB
"""What a client takes before it stands still; not a whole number of chunks."""


class Standing:
    """A reader whose client has taken the first bytes of a block that lies in memory."""

    def __init__(self, reader: RangeReader, body: BodyStream, begin: bytes) -> None:
        self._reader = reader
        self._body = body
        self._begin = begin
        self.spans = 0

    @classmethod
    async def of(cls, cache: BlockCache, version: ObjectVersion) -> Standing:
        reader = await cache.open_range(version, whole(version))
        body = reader.body()
        piece = await anext(body)
        assert isinstance(piece, BorrowedBuffer)
        begin, piece.taken = bytes(piece.content[:TAKEN]), TAKEN
        piece.content.release()
        return cls(reader, body, begin)

    async def resume(self) -> bytes:
        """The client takes the rest; all that it got."""
        async with aclosing(self._body) as body:
            rest = []
            async for piece in body:
                self.spans += isinstance(piece, FileSpan)
                rest.append(bytes_of(piece))
            return b"".join((self._begin, *rest))


async def landed(cache: BlockCache, origin: MemoryOrigin, count: int) -> list[tuple[Standing, bytes]]:
    """So many readers that stand still, each in a block that has been written meanwhile, and what each is to get."""
    versions = [stored(origin, f"k{n}", MIB - 333, seed=n) for n in range(count)]
    standing = [(await Standing.of(cache, version), content_of(origin, version)) for version in versions]
    await cache.settle()
    return standing


async def test_they_hold_no_memory(tmp_path: Path) -> None:
    """Once the blocks lie on the disk, forty readers in forty blocks hold next to nothing.

    The blocks are of a size whose memory is traced; larger ones are mappings of their own.
    """
    origin = make_origin()
    versions = [stored(origin, f"k{n}", MAPPED_BYTES_MIN - 1, seed=n) for n in range(40)]
    async with open_cache(tmp_path / "c", origin, **SMALL) as cache:
        tracemalloc.start()
        try:
            standing = [await Standing.of(cache, version) for version in versions]
            await cache.settle()
            assert tracemalloc.get_traced_memory()[1] > 4 * MIB, "the blocks did lie in memory"
            # The thread that has written the last of them lets go of them a moment later.
            await until(lambda: tracemalloc.get_traced_memory()[0] < 40 * TAKEN + MIB)
        finally:
            tracemalloc.stop()
        for one, version in zip(standing, versions, strict=True):
            assert await one.resume() == content_of(origin, version)


async def test_they_go_on_where_the_block_lies_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Bytes of the file, all of them misses, one request to the origin, and no further use of the block counted."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, **SMALL) as cache:
        [(one, expected)] = await landed(cache, origin, 1)
        noted = cache._dependencies.accesses.take(10)
        assert await one.resume() == expected
        assert one.spans
        assert (counted(metrics.CACHE_HIT_BYTES), counted(metrics.CACHE_MISS_BYTES), origin.count()) == (
            0,
            len(expected),
            1,
        )
        assert [*noted, *cache._dependencies.accesses.take(10)] == []


@pytest.mark.parametrize("fate", ["invalidated", "unlinked"])
async def test_whatever_becomes_of_the_block_they_end_it(tmp_path: Path, fate: str) -> None:
    """Overwritten or evicted while a client stands still: it gets the rest of what it began, and nobody is asked."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, **SMALL) as cache:
        [(one, expected)] = await landed(cache, origin, 1)
        origin.put(BUCKET, "k0", b"another version")
        if fate == "invalidated":
            await cache.invalidate(ObjectKey(BUCKET, "k0"))
            await cache._dependencies.open_files.drop_unlinked(cache._dependencies.threads.disk)
        else:
            for path in block_files(tmp_path / "c"):
                path.unlink()
        assert await one.resume() == expected
        assert origin.count() == 1


async def test_what_the_disk_made_of_it_is_not_believed(tmp_path: Path) -> None:
    """The file's bytes are verified before they go out, like those of any block: damage is healed by the origin."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, **SMALL) as cache:
        [(one, expected)] = await landed(cache, origin, 1)
        [path] = block_files(tmp_path / "c")
        with path.open("r+b") as file:
            file.seek(700 * KIB)
            file.write(b"\0" * 64)
        drop_page_cache(path)
        assert await one.resume() == expected
        assert (counted(metrics.CACHE_DAMAGED), origin.count()) == (1, 2)


async def test_they_stay_in_memory_where_the_disk_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC: the rest is given from memory, and nobody is asked again."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no room")

    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, **SMALL) as cache:
        monkeypatch.setattr(os, "pwritev", full)
        [(one, expected)] = await landed(cache, origin, 1)
        assert counted(metrics.CACHE_NOT_KEPT) == 1
        assert await one.resume() == expected
        assert (one.spans, origin.count()) == (0, 1)


async def test_they_stay_in_memory_where_the_file_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many files are open, say: the block is kept, and this reader ends it from memory."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, **SMALL) as cache:

        def refuse(*_: object) -> None:
            raise StoreUnavailable("too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(cache._dependencies.directory.store, "open_published", refuse)
            [(one, expected)] = await landed(cache, origin, 1)
        assert (counted(metrics.CACHE_FILLS, outcome="filled"), cache.usage().blocks) == (1, 1)
        assert await one.resume() == expected
        assert (one.spans, origin.count()) == (0, 1)


async def test_whoever_comes_while_the_block_lands_gets_it_too(tmp_path: Path) -> None:
    """Readers join from the first byte to the last moment in memory, however slowly they read."""
    origin = make_origin()
    version = stored(origin, "k", MIB - 1)
    async with open_cache(tmp_path / "c", origin, **SMALL) as cache:
        early = await Standing.of(cache, version)
        late = await cache.open_range(version, whole(version))
        await cache.settle()
        assert await early.resume() == content_of(origin, version)
        async with aclosing(late.body()) as body:
            assert b"".join([bytes_of(piece) async for piece in body]) == content_of(origin, version)
        assert origin.count() == 1


async def test_whoever_has_left_holds_nothing(tmp_path: Path) -> None:
    """A reader that left while the block was on its way to the disk keeps it from nobody, whatever still names it."""
    origin = make_origin()
    version = stored(origin, "k", MIB)
    async with open_cache(tmp_path / "c", origin, **SMALL) as cache:
        reader = await cache.open_range(version, whole(version))
        fill = cache._dependencies.fetches.join(layout.block_at(version, 0, MIB, layout.BlockIds(version)), {})
        assert fill is not None
        fill.leave()
        await reader.aclose()
        await cache.settle()
        assert fill.all_arrived
        assert fill.content is None


async def test_every_read_goes_to_the_origin() -> None:
    """Again and again, for exactly the bytes that are wanted; they count as misses that were not kept."""
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


async def test_nothing_is_looked_for_in_it() -> None:
    """No call that needs a directory fails for lack of one."""
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
