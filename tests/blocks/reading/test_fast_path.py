"""The short way to bytes that are here."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gateway.blocks import block_file, page_cache
from gateway.blocks.cache import BlockCache
from gateway.core.errors import BlockDamaged
from gateway.core.model import ByteRange, ObjectVersion, PinnedFileSpan
from gateway.telemetry import metrics
from tests.support.blocks import BLOCK, content_of, make_origin, open_cache, read, stored, whole
from tests.support.counting import counted
from tests.support.descriptors import open_descriptors

SLOT = "default"


def span_of(cache: BlockCache, version: ObjectVersion, byte_range: ByteRange | None = None) -> PinnedFileSpan | None:
    asked = byte_range or whole(version)
    return cache.warm_span(version, asked.first, asked.length, slot=SLOT)


async def warm_up(cache: BlockCache, version: ObjectVersion) -> None:
    """Have an object filled, then read and verified."""
    for _ in range(2):
        await read(cache, version)
        await cache.settle()


def bytes_of(held: PinnedFileSpan) -> bytes:
    return os.pread(held.span.descriptor, held.span.count, held.span.offset)


def test_nothing_is_given_at_once_where_nobody_tells_what_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what this process has opened, nor what it has filled and kept open."""
    monkeypatch.setattr(page_cache, "is_supported", lambda _: False)

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", BLOCK)
        async with open_cache(tmp_path / "c", origin) as cache:
            await warm_up(cache, version)
            assert span_of(cache, version) is None
            assert await read(cache, version) == content_of(origin, version)

    asyncio.run(scenario())


@pytest.mark.parametrize("small_object_bytes_max", [0, BLOCK])
def test_bytes_that_were_read_a_moment_ago_are_given_at_once(tmp_path: Path, small_object_bytes_max: int) -> None:
    """All of a block and any part of it, counted as hits when they are let go of; the file is closed then."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", BLOCK)
        async with open_cache(tmp_path / "c", origin, small_object_bytes_max=small_object_bytes_max) as cache:
            await warm_up(cache, version)
            open_before, hits = open_descriptors(), counted(metrics.CACHE_HIT_BYTES)
            for wanted in (whole(version), ByteRange(5, 9), ByteRange(BLOCK - 1, BLOCK - 1)):
                held = span_of(cache, version, wanted)
                assert held is not None
                assert bytes_of(held) == content_of(origin, version, wanted)
                held.close()
                held.close()
                hits += wanted.length
                assert counted(metrics.CACHE_HIT_BYTES) == hits
            assert open_descriptors() == open_before

    asyncio.run(scenario())


def test_what_must_be_waited_for_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not there; there and not verified yet, where it is much; verified in part; in two blocks; another version."""
    monkeypatch.setattr(block_file, "VERIFIED_AT_ONCE_BYTES_MAX", 0)

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", 2 * BLOCK)
        async with open_cache(tmp_path / "c", origin) as cache:
            first = ByteRange(0, BLOCK - 1)
            assert span_of(cache, version, first) is None
            await read(cache, version)
            await cache.settle()
            assert span_of(cache, version, first) is None, "what was written is verified when it is read"
            await read(cache, version)
            assert span_of(cache, version, first) is not None
        async with open_cache(tmp_path / "c", origin) as cache:
            assert span_of(cache, version, first) is None
            await read(cache, version, ByteRange(0, 0))
            assert span_of(cache, version, ByteRange(0, 9)) is not None
            assert span_of(cache, version, first) is None
            await read(cache, version)
            assert span_of(cache, version, first) is not None
            assert span_of(cache, version) is None
            other = ObjectVersion(version.key, '"other"', version.size_bytes)
            assert span_of(cache, other, first) is None

    asyncio.run(scenario())


def test_what_is_in_memory_and_little_is_verified_at_once(tmp_path: Path) -> None:
    """Nobody has read it since it was written."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", BLOCK)
        async with open_cache(tmp_path / "c", origin) as cache:
            await read(cache, version)
            await cache.settle()
            held = span_of(cache, version)
            assert held is not None
            assert bytes_of(held) == content_of(origin, version)
            held.close()

    asyncio.run(scenario())


def test_a_file_that_was_changed_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was verified was verified of the file as it was."""
    monkeypatch.setattr(block_file, "VERIFIED_AT_ONCE_BYTES_MAX", 0)

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", BLOCK)
        async with open_cache(tmp_path / "c", origin) as cache:
            await warm_up(cache, version)
            held = span_of(cache, version)
            assert held is not None
            os.utime(f"/proc/self/fd/{held.span.descriptor}")
            held.close()
            assert span_of(cache, version) is None

    asyncio.run(scenario())


def test_a_span_that_could_not_be_sent_is_verified_again(tmp_path: Path) -> None:
    """The next reader looks at every byte."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", BLOCK)
        async with open_cache(tmp_path / "c", origin) as cache:
            await warm_up(cache, version)
            held = span_of(cache, version)
            assert held is not None
            held.failed(BlockDamaged("the file ended early"))
            held.close()
            assert span_of(cache, version) is None
            assert await read(cache, version) == content_of(origin, version)

    asyncio.run(scenario())


def test_an_unreadable_directory_gives_nothing(tmp_path: Path) -> None:
    """The origin serves until the directory has proved itself again."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", BLOCK)
        async with open_cache(tmp_path / "c", origin) as cache:
            await warm_up(cache, version)
            held = span_of(cache, version)
            assert held is not None
            held.failed(OSError(5, "Input/output error"))
            held.close()
            assert not cache.isolation.readable
            assert span_of(cache, version) is None

    asyncio.run(scenario())
