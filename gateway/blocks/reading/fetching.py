"""Having pieces of objects on disk that nobody reads yet: for warm-up."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from types import MappingProxyType

from gateway.blocks import layout
from gateway.blocks.reading.reader import RangeReader
from gateway.blocks.reading.reading_tools import ReadingTools
from gateway.objects import ByteRange, ObjectVersion
from gateway.origin.client import Purpose

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


async def fetch(
    tools: ReadingTools, version: ObjectVersion, piece: ByteRange, slot: str, purpose: Purpose
) -> tuple[int, bool]:
    """As `BlockCache.fetch`."""
    reader = RangeReader(tools, version, piece, slot, _NO_HEADERS, purpose)
    if reader.is_cached():
        return 0, True
    try:
        await reader.start()
        async with aclosing(reader.body()) as body:
            async for _ in body:
                if reader.past_the_cache:
                    return 0, False
    finally:
        await reader.aclose()
    return piece.length, await _published(tools, version, piece, slot)


async def _published(tools: ReadingTools, version: ObjectVersion, piece: ByteRange, slot: str) -> bool:
    """Wait until no fill of a piece runs here: what has arrived only is lost when the process ends.

    False when one has ended whose bytes the directory could not take.
    """
    kept = True
    for block in layout.blocks_of(version, piece, tools.settings.block_size_of(slot)):
        if (fill := tools.fetches.join(block, _NO_HEADERS)) is not None:
            try:
                await fill.over()
            finally:
                fill.leave()
            kept = kept and fill.kept
    return kept
