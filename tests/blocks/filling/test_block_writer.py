"""The file of one fill: what is written counts as verified, unless somebody else had a hand in it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.blocks.block_file import read_verified
from gateway.blocks.cache import BlockCache
from gateway.blocks.large_block_fetch import FOLIO_BYTES_MAX, BlockWriter
from gateway.blocks.layout import block_at
from gateway.blocks.page_cache import Residency
from gateway.core.model import ObjectVersion
from tests.support.blocks import BLOCK, MIB, block_files, content_of, make_origin, open_cache, stored


def writer_of(cache: BlockCache, version: ObjectVersion, block_size_bytes: int = BLOCK) -> BlockWriter:
    """Of the version's first block."""
    block, directory = block_at(version, 0, block_size_bytes), cache._dependencies.directory
    begun = directory.begin(block, "default")
    assert begun is not None
    return BlockWriter(directory, begun[0])


def play(directory: Path, use: Callable[[BlockWriter, bytes], None]) -> None:
    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", BLOCK)
        async with open_cache(directory, origin) as cache:
            writer = writer_of(cache, version)
            use(writer, content_of(origin, version))
            writer.filled.file.close()

    asyncio.run(scenario())


class Folios:
    """As `Residency`: the kernel keeps files in units of FOLIO_BYTES_MAX, and a unit waits to be written as a whole."""

    def __init__(self) -> None:
        self.waiting: set[int] = set()

    def written(self, *places: int) -> None:
        self.waiting |= {place // FOLIO_BYTES_MAX for place in places}

    def device_takes_first(self) -> None:
        """It may be read from there again from now on, by anybody."""
        self.waiting.discard(0)

    def unwritten(self, _descriptor: int, offset: int, count: int) -> bool:
        return set(range(offset // FOLIO_BYTES_MAX, (offset + count - 1) // FOLIO_BYTES_MAX + 1)) <= self.waiting


@pytest.mark.parametrize(("pieces", "publishes"), [(5, False), (1, True)], ids=["more is written", "it is published"])
def test_what_lies_beside_the_header_may_have_come_from_the_device(
    tmp_path: Path, pieces: int, publishes: bool
) -> None:
    """1.4 Each write begins with the header, or ends with it: what lies beside it waits to be written again then."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", pieces * MIB)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=8 * MIB) as cache:
            folios, filled = Folios(), writer_of(cache, version, 8 * MIB).filled
            writer = BlockWriter(cache._dependencies.directory, filled, _residency=cast(Residency, folios))
            for number in range(pieces - 1 + publishes):
                writer.write(filled.file, bytes(MIB))
                folios.written(0, filled.data_offset + number * MIB, filled.data_offset + (number + 1) * MIB - 1)
                assert writer.unwritten_from == 0
            folios.device_takes_first()
            if publishes:
                writer.publish(filled.file)
            else:
                writer.write(filled.file, bytes(MIB))
            assert writer.unwritten_from == (pieces - 1 + publishes) * MIB
            filled.file.close()

    asyncio.run(scenario())


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, BLOCK), max_size=6))
def test_the_file_holds_what_was_given(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    """Whatever the pieces; the checksums of complete chunks are there as soon as they are written."""
    directory = tmp_path_factory.mktemp("cache") / "c"

    def use(writer: BlockWriter, content: bytes) -> None:
        for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), BLOCK], strict=True):
            writer.write(writer.filled.file, content[start:stop])
            assert writer.checksums.complete_bytes <= stop
        assert writer.checksums.complete
        assert writer.publish(writer.filled.file)
        [path] = block_files(directory)
        descriptor = os.open(path, os.O_RDONLY)
        extent = writer.directory.index.lookup(writer.filled.block.id)
        assert extent is not None
        assert bytes(read_verified(descriptor, extent, 0, BLOCK)) == content
        os.close(descriptor)

    play(directory, use)
