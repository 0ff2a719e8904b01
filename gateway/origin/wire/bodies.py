"""Bodies on their way from a connection to whoever asked, held in memory until they are taken."""

from __future__ import annotations

from collections import deque

from gateway.origin.wire.heads import AnswerParser

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

    def landed(self, count: int) -> None:
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


class PiecedBody:
    """Any other body. Its end is where its length says, where `parser` finds it, or where the connection ends."""

    __slots__ = ("_left_bytes", "_parser", "_pieces", "_unread_bytes", "complete")

    def __init__(self, length_bytes: int | None, parser: AnswerParser) -> None:
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
        """Bytes have come; how many of them are too many. MalformedAnswer."""
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

    def _add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._unread_bytes += len(piece)
