"""The short way to a small object of which nothing was known: its first answer has brought all of it already.

The bytes are given from memory while they go to disk. Whatever else there may be to wait for, or to fetch besides, is
the range reader's (reader.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.blocks import layout
from gateway.blocks.filling.unpinned_get import UnpinnedResponse
from gateway.blocks.reading.reading_tools import ReadingTools
from gateway.objects import ByteRange, ObjectVersion

GIVEN_BYTES_MAX = 128 * 1024
"""What the client's socket does not take of them is copied, for every client that reads slowly."""


def arrived(
    tools: ReadingTools,
    version: ObjectVersion,
    byte_range: ByteRange,
    slot: str,
    headers: Mapping[str, str],
    answer: UnpinnedResponse,
) -> memoryview | None:
    """The bytes of a range, and their block's fill begun that lacks nothing but the disk; None: open a reader."""
    size_bytes, settings = version.size_bytes, tools.settings
    if answer.range.length != size_bytes or size_bytes > min(GIVEN_BYTES_MAX, settings.block_size_of(slot)):
        return None
    if not (settings.keeps(slot, size_bytes) and tools.isolation.readable):
        return None
    block = layout.block_at(version, 0, size_bytes)
    content = tools.fetches.start_inline(block, slot, headers, answer)
    if content is None:
        return None
    tools.observer.miss_bytes(slot, byte_range.length)
    return content[byte_range.first : byte_range.stop]
