"""Bodies on their way from a connection to whoever asked, held in memory until they are taken, or received there."""

from __future__ import annotations

from collections import deque

from gateway.origin.http1_client.heads import ResponseParser
from gateway.origin.receive_buffer import ReceiveBuffer

UNREAD_BYTES_MAX = 512 * 1024
"""A body that comes in pieces is not received any further while so much of it waits; half of that makes it go on."""


_NOTHING = memoryview(b"")


class WholeBody:
    """A small body of known length, received where it stays. `rest` is where its next bytes belong."""

    __slots__ = ("_taken_bytes", "content", "rest")

    def __init__(self, length_bytes: int, begin: memoryview) -> None:
        """`begin` holds its first bytes, and perhaps more than its own."""
        if len(begin) >= length_bytes:
            self.content, self.rest = memoryview(bytes(begin[:length_bytes])), _NOTHING
        else:
            self.content = memoryview(bytearray(length_bytes))
            self.content[: len(begin)] = begin
            self.rest = self.content[len(begin) :]
        self._taken_bytes = 0

    @property
    def complete(self) -> bool:
        return not self.rest

    def received(self, count: int) -> None:
        """So many of the next bytes are there."""
        self.rest = self.rest[count:]

    def whole(self) -> memoryview | None:
        """All of it, if all is here and none of it was taken yet."""
        return None if self._taken_bytes or self.rest else self.content

    def take(self) -> bytes:
        """What has come since the last time."""
        arrived_bytes = len(self.content) - len(self.rest)
        piece = self.content[self._taken_bytes : arrived_bytes]
        self._taken_bytes = arrived_bytes
        return bytes(piece)


class QueuedBody:
    """Any other body. Its end is where its length says, where `parser` finds it, or where the connection ends."""

    __slots__ = ("_left_bytes", "_parser", "_pieces", "_unread_bytes", "complete")

    def __init__(self, length_bytes: int | None, parser: ResponseParser) -> None:
        self._left_bytes = length_bytes
        self._parser = parser
        self._pieces: deque[bytes] = deque()
        self._unread_bytes = 0
        self.complete = False

    @property
    def is_much(self) -> bool:
        return self._unread_bytes >= UNREAD_BYTES_MAX

    @property
    def is_little(self) -> bool:
        return self._unread_bytes <= UNREAD_BYTES_MAX // 2

    def put(self, data: memoryview) -> int:
        """Bytes have come; how many of them are too many. MalformedResponse."""
        if self._left_bytes is None:
            for piece in self._parser.body(bytes(data)):
                self._add(piece)
            self.complete = self._parser.complete
            return 0
        count = min(len(data), self._left_bytes)
        if count:
            self._add(bytes(data[:count]))
        self._left_bytes -= count
        self.complete = not self._left_bytes
        return len(data) - count

    @property
    def ends_with_connection(self) -> bool:
        return self._parser.ends_with_connection

    def take(self) -> bytes:
        """The next bytes; empty when none are here."""
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        self._unread_bytes -= len(piece)
        return piece

    def direct(self) -> DirectBody | None:
        """The same body, from here on received in buffers of its reader; None where its length is not known."""
        return None if self._left_bytes is None else DirectBody(self._pieces, self._left_bytes)

    def _add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._unread_bytes += len(piece)


class DirectBody:
    """A large body of known length, received in buffers of its reader: piece by piece, when that is wanted."""

    __slots__ = ("_begun", "_buffer", "_enough_bytes", "_filled_bytes", "_left_bytes")

    def __init__(self, begun: deque[bytes], left_bytes: int) -> None:
        """`begun` has come already, behind it come `left_bytes`."""
        self._begun = begun
        self._left_bytes = left_bytes
        self._buffer: ReceiveBuffer | None = None
        self._filled_bytes = 0
        self._enough_bytes = 0

    @property
    def complete(self) -> bool:
        return not self._left_bytes

    @property
    def has_enough(self) -> bool:
        """Whether there is a piece to be taken, or none is wanted."""
        return self._buffer is None or self._filled_bytes >= self._enough_bytes

    @property
    def rest(self) -> memoryview:
        """Where the next bytes belong, and not one behind the last."""
        if self._buffer is None:
            return _NOTHING
        return self._buffer.buffer[self._filled_bytes : self._filled_bytes + self._left_bytes]

    def received(self, count: int) -> None:
        """So many of the next bytes are there."""
        self._filled_bytes += count
        self._left_bytes -= count

    def want(self, buffer: ReceiveBuffer) -> None:
        """Have the next piece in `buffer`."""
        self._buffer, self._filled_bytes = buffer, 0
        self._enough_bytes = min(buffer.enough_bytes, len(buffer.buffer))
        while self._begun and (room := len(buffer.buffer) - self._filled_bytes):
            piece = self._begun.popleft()
            if len(piece) > room:
                self._begun.appendleft(piece[room:])
                piece = piece[:room]
            buffer.buffer[self._filled_bytes : self._filled_bytes + len(piece)] = piece
            self._filled_bytes += len(piece)

    def hurry(self) -> None:
        """Any byte is enough."""
        self._enough_bytes = 1

    def take(self) -> memoryview:
        """What has come of the piece; no more is wanted for now."""
        buffer, self._buffer = self._buffer, None
        return _NOTHING if buffer is None else buffer.buffer[: self._filled_bytes]
