"""A fill's bytes as they lie in its file: how long they count as those that came."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gateway.blocks.block_file import ChunkChecksums, lease_of
from gateway.blocks.directory import DiskThreads
from gateway.blocks.layout import block_at, data_offset
from gateway.blocks.page_cache import Residency
from gateway.blocks.reader import FillSource
from gateway.blocks.single_flight import InflightFetch
from gateway.core.model import FileSpan, ObjectKey, ObjectVersion
from gateway.origin.client import Purpose

MIB = 1024 * 1024
CONTENT = os.urandom(2 * MIB)
VERSION = ObjectVersion(ObjectKey("bucket", "key"), '"etag"', len(CONTENT))


def test_bytes_of_a_fill_are_doubted_as_soon_as_its_writer_doubts_them(tmp_path: Path) -> None:
    """1.4 Also those that a slow client was given before: they wait to be written again, whatever they are by now."""

    async def scenario() -> None:
        block, threads, doubted = block_at(VERSION, 0, len(CONTENT)), DiskThreads(1), 0
        fill = InflightFetch(block, "default", {}, Purpose.LIVE, None)
        with lease_of(os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)) as file:
            os.pwrite(file.descriptor, CONTENT, data_offset(block))
            checksums = ChunkChecksums(len(CONTENT))
            checksums.update(CONTENT)
            fill.enter()
            fill.advance(file, checksums, lambda: doubted)
            parts = SimpleNamespace(residency=Residency(), threads=threads)
            plan: Any = SimpleNamespace(dependencies=parts, purpose=Purpose.LIVE)
            source = FillSource(fill, plan)
            span = await source.read(0, len(CONTENT))
            assert isinstance(span, FileSpan)
            assert span.file is not None
            assert span.file.intact(span.offset, span.count)
            doubted = MIB
            assert not span.file.intact(span.offset, span.count)
            assert span.file.intact(span.offset + MIB, MIB)
            restored = await span.file.restore(span.offset, MIB)
            assert restored is not None
            assert restored == CONTENT[: len(restored)]
            assert isinstance(await source.read(0, len(CONTENT)), memoryview)
            await source.close()
            fill.end(None)
        threads.shut_down()

    asyncio.run(scenario())
