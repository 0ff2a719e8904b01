"""Blocks that were fetched ahead for a reader: sent as they were written, as long as they can be nothing else."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.blocks.cache import BlockCache
from gateway.blocks.page_cache import Residency
from gateway.core.model import FileSpan, ObjectVersion
from tests.support.blocks import MIB, block_files, bytes_of, content_of, make_origin, open_cache, stored, take, whole

BLOCKS = 4


@pytest.fixture(autouse=True)
def told(tmp_path: Path) -> None:
    """Without this the promise is not made."""
    with (tmp_path / "trial").open("wb", buffering=0) as file:
        file.write(bytes(MIB))
        if not Residency().unwritten(file.fileno(), 0, MIB):
            pytest.skip("this system does not tell what waits to be written")


def written_back(path: Path) -> None:
    """The device has it, and may give it back otherwise from now on."""
    with path.open("rb") as file:
        os.fdatasync(file.fileno())


def touched(path: Path) -> None:
    """Somebody else writes to the file: the same bytes, as far as he says."""
    with path.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(first)


async def read_on(cache: BlockCache, version: ObjectVersion, happens: Callable[[Path], None], directory: Path) -> bytes:
    """Read an object; when all of it has been fetched, and nothing was sent, something happens to the files."""
    reader = await cache.open_range(version, whole(version))
    taken = bytearray()
    async for piece in reader.body():
        if not taken:
            await cache.settle()
            for path in block_files(directory):
                happens(path)
        taken += bytes_of(piece)
    return bytes(taken)


@pytest.mark.parametrize(
    ("happens", "are_checked"),
    [(lambda _: None, False), (written_back, True), (touched, True)],
    ids=["nothing happens", "the device has them", "somebody writes to them"],
)
def test_who_had_blocks_fetched_gets_them_as_they_were_written(
    tmp_path: Path, verified: list[str], happens: Callable[[Path], None], are_checked: bool
) -> None:
    """1.4 They are not read again as long as they wait to be written to the device; others have them checked."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", BLOCKS * MIB)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=MIB, readahead_bytes=BLOCKS * MIB) as cache:
            assert await read_on(cache, version, happens, tmp_path / "c") == content_of(origin, version)
            assert len(set(verified)) == (BLOCKS - 1 if are_checked else 0)
            verified.clear()
            assert await take(await cache.open_range(version, whole(version))) == content_of(origin, version)
            assert len(set(verified)) == (1 if are_checked else BLOCKS)

    asyncio.run(scenario())


def test_a_span_is_doubted_when_its_bytes_may_come_from_the_device(tmp_path: Path, verified: list[str]) -> None:
    """1.4 A slow client's, too: before it is sent more, the bytes are read and checked."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 2 * MIB)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=MIB, readahead_bytes=2 * MIB) as cache:
            body = (await cache.open_range(version, whole(version))).body()
            position = 0
            while position < MIB:
                position += len(bytes_of(await anext(body)))
                await cache.settle()
            span = await anext(body)
            assert isinstance(span, FileSpan)
            assert span.file is not None
            assert span.count == MIB
            assert span.file.intact(span.offset, span.count)
            for path in block_files(tmp_path / "c"):
                written_back(path)
            assert not span.file.intact(span.offset, span.count)
            assert not verified
            assert await span.file.restore(span.offset, span.count) is None
            assert span.file.intact(span.offset, span.count)
            await body.aclose()

    asyncio.run(scenario())
