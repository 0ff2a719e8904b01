"""The file of one fill: what is written counts as verified, unless somebody else had a hand in it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.blocks.cache import BlockCache
from gateway.blocks.files.verification import read_verified
from gateway.blocks.filling.block_writer import BlockWriter
from gateway.blocks.layout import block_at
from gateway.objects import ObjectVersion
from tests.support.blocks import BLOCK, block_files, content_of, make_origin, open_cache, stored


def writer_of(cache: BlockCache, version: ObjectVersion) -> BlockWriter:
    """Of the version's first block."""
    block, directory = block_at(version, 0, BLOCK), cache._tools.directory
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
