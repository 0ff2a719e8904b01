"""An answer of `MemoryOrigin`, and the object that it reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from gateway.core.errors import OriginBodyError
from gateway.core.model import ByteRange
from gateway.origin.receive_buffer import ReceiveBuffer
from gateway.origin.stores.response import StoreResponse
from gateway.origin.stores.store import Found
from tests.support.memory_origin.content import BytesContent, Content, SlicedContent
from tests.support.memory_origin.faults import CutBody

_PIECE_BYTES = 256 * 1024


@dataclass(slots=True)
class MemoryReading:
    """`Reading` of a content."""

    found: Found
    content: Content
    tagging: bytes | None = None

    async def pieces(self, wanted: ByteRange, buffer: ReceiveBuffer) -> AsyncIterator[bytes]:
        for offset in range(wanted.first, wanted.last + 1, _PIECE_BYTES):
            yield self.content.read(offset, min(_PIECE_BYTES, wanted.last + 1 - offset))

    def whole(self, wanted: ByteRange) -> memoryview | None:
        return None

    async def aclose(self) -> None:
        return


@dataclass(slots=True)
class MemoryResponse:
    """`OriginResponse` over a content. `with_body` False: the answer to a HEAD, whose headers still tell the length."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    content: Content = field(default_factory=lambda: BytesContent(b""))
    with_body: bool = True
    cut: CutBody | None = None
    _offset: int = 0
    closed: bool = False

    @classmethod
    def of(cls, answer: StoreResponse, request_method: str) -> Self:
        """The answer of a `MemoryStore`, with the content that it reads."""
        content: Content = BytesContent(answer.body)
        if isinstance(answer.reading, MemoryReading):
            content = BytesContent(b"")
            if answer.wanted is not None:
                content = SlicedContent(answer.reading.content, answer.wanted.first, answer.wanted.length)
        return cls(answer.status, answer.headers, content, request_method != "HEAD")

    async def stream(self, buffer: ReceiveBuffer | None = None) -> AsyncIterator[bytes]:
        end = self.content.size_bytes if self.with_body else 0
        stop = end if self.cut is None else min(end, self.cut.after_bytes)
        while self._offset < stop:
            piece = self.content.read(self._offset, min(_PIECE_BYTES, stop - self._offset))
            self._offset += len(piece)
            yield piece
            await asyncio.sleep(0)  # other tasks run between pieces, as they would between packets
        if stop < end:
            raise OriginBodyError(f"the origin's answer broke off after {stop} of {end} bytes")

    def whole(self) -> memoryview | None:
        return None  # bodies come piece by piece here

    async def read(self, limit_bytes: int) -> bytes:
        pieces: list[bytes] = []
        size = 0
        async for piece in self.stream():
            size += len(piece)
            if size > limit_bytes:
                raise OriginBodyError(f"the origin's answer is longer than {limit_bytes} bytes")
            pieces.append(piece)
        return b"".join(pieces)

    async def aclose(self) -> None:
        self.closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
