"""An answer of a store: a document in memory, or bytes of a version that is held open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from gateway.core.errors import OriginBodyError
from gateway.core.model import ByteRange
from gateway.origin.client import ClosedAtExit
from gateway.origin.receive_buffer import ReceiveBuffer
from gateway.origin.stores.store import Reading
from gateway.s3.list_result import ListedPage
from gateway.s3.xml_writer import document

PIECE_BYTES = 1024 * 1024


class StoreResponse(ClosedAtExit):
    """As `OriginResponse`. `wanted` None: no byte of `reading` follows."""

    def __init__(
        self,
        status: int,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        reading: Reading | None = None,
        wanted: ByteRange | None = None,
        rows: ListedPage | None = None,
    ) -> None:
        self.status = status
        self.headers: Mapping[str, str] = headers or {}
        self.body = body
        self.reading = reading
        self.wanted = wanted
        self.rows = rows

    @property
    def size_bytes(self) -> int:
        return self.wanted.length if self.wanted is not None else len(self.body)

    async def stream(self, buffer: ReceiveBuffer | None = None) -> AsyncIterator[bytes | memoryview]:
        body, self.body = self.body, b""
        if body:
            yield body
        elif self.reading is not None and self.wanted is not None:
            buffer = buffer or ReceiveBuffer(PIECE_BYTES, PIECE_BYTES)
            async for piece in self.reading.pieces(self.wanted, buffer):
                yield piece

    def whole(self) -> memoryview | None:
        if self.reading is None or self.wanted is None:
            return None
        return self.reading.whole(self.wanted)

    async def read(self, limit_bytes: int) -> bytes:
        pieces, size_bytes = list[bytes](), 0
        async for piece in self.stream():
            size_bytes += len(piece)
            if size_bytes > limit_bytes:
                raise OriginBodyError(f"the origin's answer is longer than {limit_bytes} bytes")
            pieces.append(bytes(piece))
        return b"".join(pieces)

    async def aclose(self) -> None:
        reading, self.reading = self.reading, None
        if reading is not None:
            await reading.aclose()


def xml_answer(root: str, children: str, headers: Mapping[str, str] | None = None) -> StoreResponse:
    return StoreResponse(200, {"content-type": "application/xml", **(headers or {})}, document(root, children))
