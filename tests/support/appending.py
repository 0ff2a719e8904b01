"""Small blocks appended to the segments of an open directory, without a cache, an origin or an event loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from gateway.blocks import layout
from gateway.blocks.small_block_fetch import SegmentAppender
from gateway.blocks.store import SmallBlock
from gateway.core.model import ObjectKey, ObjectVersion

BLOCK_SIZE_BYTES = 64 * 1024


def small_blocks(prefix: str, count: int, size_bytes: int = 100) -> list[SmallBlock]:
    content = memoryview(b"x" * size_bytes)
    versions = [ObjectVersion(ObjectKey("b", f"{prefix}{number}"), '"e"', size_bytes) for number in range(count)]
    return [SmallBlock(layout.block_at(version, 0, BLOCK_SIZE_BYTES), content) for version in versions]


def append_all(appender: SegmentAppender, blocks: Sequence[SmallBlock], slot: str = "default") -> None:
    """In batches, as they are written."""
    while blocks:
        blocks = blocks[appender.append(slot, blocks[:200]) :]
    appender.give_back()


def calls_of(function: Callable[[], Any]) -> int:
    """How many functions a function calls, those of C among them: work that no other process disturbs."""
    count = 0

    def count_calls(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_calls)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
