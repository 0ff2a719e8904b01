"""Fills of large blocks over real connections, where bodies are received straight into the fill's buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.core.errors import OriginBodyError
from gateway.core.model import ByteRange, ObjectVersion
from gateway.s3.requests import Operation
from tests.origin.origins import s3_origin
from tests.support.blocks import BUCKET, MIB, block_files, content_of, open_cache, partial_files, read, stored, until
from tests.support.memory_origin.faults import AlterHeaders, CutBody, on
from tests.support.strict_origin import StrictOrigin

GET = on(Operation.GET_OBJECT)


@pytest.fixture(scope="module")
def server() -> Iterator[StrictOrigin]:
    with StrictOrigin() as origin:
        origin.model.create_bucket(BUCKET)
        yield origin


@pytest.fixture
def version(server: StrictOrigin) -> ObjectVersion:
    """An object of three blocks and a bit."""
    server.model.faults.clear()
    server.model.calls.clear()
    server.clients.clear()
    return stored(server.model, "a", 13 * MIB)


def test_blocks_hold_the_objects_bytes(server: StrictOrigin, version: ObjectVersion, tmp_path: Path) -> None:
    """Cold, warm and after a restart; connections are used again."""

    async def scenario() -> None:
        origin = s3_origin(server.endpoint_url, max_connections=2)
        for _ in range(2):
            async with open_cache(tmp_path / "c", origin, block_size_bytes=4 * MIB) as cache:
                for _ in range(2):
                    assert await read(cache, version) == content_of(server.model, version)
                    await cache.settle()
        await origin.aclose()

    asyncio.run(scenario())
    assert server.model.count() == 4
    assert len(server.clients) <= 2


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("after_bytes", [0, 1, 300_000, 3 * MIB + 1, 4 * MIB - 1])
def test_a_body_that_breaks_off_is_resumed(
    server: StrictOrigin, version: ObjectVersion, tmp_path: Path, after_bytes: int, reset: bool
) -> None:
    """Behind the bytes that came; readers notice nothing."""
    server.model.inject(GET, CutBody(after_bytes, reset=reset))

    async def scenario() -> None:
        origin = s3_origin(server.endpoint_url)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=4 * MIB, readahead_bytes=0) as cache:
            first = ByteRange(0, 4 * MIB - 1)
            assert await read(cache, version, first) == content_of(server.model, version, first)
            await cache.settle()
        await origin.aclose()

    asyncio.run(scenario())
    again = server.model.calls[1].headers["range"].removeprefix("bytes=").partition("-")
    assert again[2] == str(4 * MIB - 1)
    assert int(again[0]) == after_bytes or (reset and int(again[0]) < after_bytes)


def test_a_whole_object_instead_of_a_range_is_refused(
    server: StrictOrigin, version: ObjectVersion, tmp_path: Path
) -> None:
    """Nothing of it is kept, and its connection is not left full of bytes for the next request."""

    async def scenario() -> None:
        origin = s3_origin(server.endpoint_url, max_connections=1)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=4 * MIB, readahead_bytes=0) as cache:
            server.model.inject(GET, AlterHeaders({"content-range": None}))
            with pytest.raises(OriginBodyError):
                await cache.open_range(version, ByteRange(0, 99))
            await cache.settle()
            assert partial_files(tmp_path / "c") == block_files(tmp_path / "c") == []
            assert await read(cache, version) == content_of(server.model, version)
        await origin.aclose()

    asyncio.run(scenario())


def test_a_cache_that_closes_in_the_middle_of_bodies_leaves_nothing(
    server: StrictOrigin, version: ObjectVersion, tmp_path: Path
) -> None:
    """Neither files nor connections, and the next one begins anew."""
    server.bytes_per_second = 20 * MIB

    async def scenario() -> None:
        origin = s3_origin(server.endpoint_url)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=4 * MIB) as cache:
            reader = await cache.open_range(version, ByteRange(0, version.size_bytes - 1))
            body = reader.body()
            await anext(body)
            await until(lambda: server.model.count() == 4)
            await body.aclose()
        assert partial_files(tmp_path / "c") == []
        server.bytes_per_second = None
        async with open_cache(tmp_path / "c", origin, block_size_bytes=4 * MIB) as cache:
            assert await read(cache, version) == content_of(server.model, version)
        await origin.aclose()

    try:
        asyncio.run(scenario())
    finally:
        server.bytes_per_second = None
