"""Buffers that receive large bodies again and again, in place of an object for each packet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

GATHERING_SECONDS_MAX = 0.1
"""Seconds for which bytes of a slow origin wait in a buffer for the next ones."""


@dataclass(slots=True)
class ReceiveBuffer:
    """A buffer, and how many bytes make a piece worth having; who receives may change that from piece to piece.

    Pieces are at least that long, unless the body ends, or GATHERING_SECONDS_MAX pass; at most as long as the buffer.
    """

    buffer: memoryview
    enough_bytes: int


async def gathered(pieces: AsyncIterator[bytes], into: ReceiveBuffer) -> AsyncIterator[memoryview]:
    """Gather pieces in a buffer: each result is a view of it, valid until the next is requested.

    Bytes that came before a failure are yielded before it is raised.
    """
    loop, filled, since = asyncio.get_running_loop(), 0, 0.0
    try:
        async for piece in pieces:
            rest = memoryview(piece)
            while rest:
                since = since if filled else loop.time()
                count = min(len(rest), len(into.buffer) - filled)
                into.buffer[filled : filled + count] = rest[:count]
                filled, rest = filled + count, rest[count:]
                late = loop.time() - since >= GATHERING_SECONDS_MAX
                if late or filled >= min(into.enough_bytes, len(into.buffer)):
                    yield into.buffer[:filled]
                    filled = 0
    except Exception:
        if filled:
            yield into.buffer[:filled]
        raise
    if filled:
        yield into.buffer[:filled]
