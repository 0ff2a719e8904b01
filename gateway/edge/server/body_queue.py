"""A request body between the connection and the application: framing taken off, pieces queued. No I/O."""

from __future__ import annotations

from collections import deque

from gateway.edge.server.chunked_body import ChunkedDecoder
from gateway.errors import S3Error

_PIECE_OVERHEAD_BYTES = 256
"""What a queued piece costs beside its bytes, so that a drizzle of one-byte packets is bounded in memory too."""

_WORTH_JOINING_BYTES = 64 * 1024


class BodyQueue:
    """The body of one request as it arrives.

    `length_bytes` is the Content-Length, None for a chunked body. `failure` is set once the body can never be
    completed: the reader raises it.
    """

    def __init__(self, length_bytes: int | None) -> None:
        self._decoder = ChunkedDecoder() if length_bytes is None else None
        self._left = length_bytes or 0
        self._pieces: deque[bytes] = deque()
        self.complete = length_bytes == 0
        self.failure: S3Error | None = None
        self.received_bytes = 0
        self.queued_bytes = 0

    @property
    def left_bytes(self) -> int | None:
        """What of the Content-Length is still to come; None for a chunked body."""
        return self._left if self._decoder is None else None

    def count(self, size_bytes: int) -> None:
        """So much of a body with a Content-Length was received past the queue."""
        self._left -= size_bytes
        self.received_bytes += size_bytes
        self.complete = not self._left

    def feed(self, data: bytes) -> bytes:
        """Take what belongs to the body; the rest, behind its end, is returned. Raises S3Error on bad chunks."""
        if self._decoder is None:
            return self._feed_counted(data)
        try:
            rest = self._decoder.feed(data, self._append)
        except S3Error as error:
            self.failure = error
            raise
        self.complete = self._decoder.complete
        return rest

    def _feed_counted(self, data: bytes) -> bytes:
        rest = b""
        if len(data) > self._left:
            data, rest = data[: self._left], data[self._left :]
        self._left -= len(data)
        self.complete = not self._left
        if data:
            self._append(data)
        return rest

    def _append(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.received_bytes += len(piece)
        self.queued_bytes += len(piece) + _PIECE_OVERHEAD_BYTES

    def __bool__(self) -> bool:
        """Is there something to take?"""
        return bool(self._pieces)

    def take(self) -> bytes:
        """The next bytes: a large piece as it came, or all of what is queued where the pieces are small."""
        if self._worth_joining():
            return self.take_all()[0]
        piece = self._pieces.popleft()
        self.queued_bytes -= len(piece) + _PIECE_OVERHEAD_BYTES
        return piece

    def take_all(self) -> list[bytes]:
        """All that is queued, joined where the pieces are small."""
        pieces = [b"".join(self._pieces)] if self._worth_joining() else list(self._pieces)
        self.discard()
        return pieces

    def _worth_joining(self) -> bool:
        count = len(self._pieces)
        return count > 1 and self.queued_bytes < count * _WORTH_JOINING_BYTES

    def discard(self) -> None:
        """Throw away what is queued."""
        self._pieces.clear()
        self.queued_bytes = 0


NO_BODY = BodyQueue(0)
"""Of all requests without one: nothing is ever fed to it."""
